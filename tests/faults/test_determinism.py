"""The same config on one machine gives the same bytes, whatever clock, locale, hashing, order of files or cores."""

import os
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from demix.files import read_json, sha256_file
from support.breaking import run_tiny
from support.disturbed import printed
from support.dry_run import ENVIRONMENT, REPOSITORY, dry_run, jobs

RUN = "results/tiny"
DAY = 86_400 * 10**9
# What of a run holds its numbers. MLflow's runs, logs and times of jobs tell when it was made.
KINDS = ("corpus", "documents", "tokens", "scores", "evaluations", "models", "report")
# Another date; what files say of their age stays true, which snakemake compares.
SHIFTED = {"LD_PRELOAD": "/usr/$LIB/faketime/libfaketime.so.1", "NO_FAKE_STAT": "1"}
AROUND = {"TZ": "Asia/Kathmandu", "LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8", "PYTHONHASHSEED": "4711"}


def artefacts(folder: Path) -> dict[str, str]:
    run = folder / RUN
    paths = [path for kind in KINDS for path in (run / kind).rglob("*") if path.is_file()]
    paths += [*run.glob("*.parquet"), run / "tokenizer.json", *(run / "metrics").rglob("*.jsonl")]
    # A lock names the process that held it.
    return {path.relative_to(run).as_posix(): sha256_file(path) for path in paths if path.name != ".lock"}


def age(folder: Path, days: int) -> None:
    """Make all files `days` older."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            found = path.stat()
            os.utime(path, ns=(found.st_atime_ns - days * DAY, found.st_mtime_ns - days * DAY))


@pytest.mark.faults
@pytest.mark.parametrize(("cores", "days"), [("1", 400), ("4", -400)])
def test_two_runs_have_the_same_bytes(
    cores: str, days: int, finished: Path, mounted: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tmpfs lists files in another order."""
    other_file_system = mounted("size=50%")
    shifted = bool(shutil.which("faketime"))
    for name, value in (AROUND | SHIFTED | {"FAKETIME": f"{days:+}d"} if shifted else AROUND).items():
        monkeypatch.setitem(ENVIRONMENT, name, value)
    shutil.copytree(REPOSITORY / "resources", other_file_system / "resources")
    # No source is of a time to come.
    age(other_file_system / "resources", 800)
    assert run_tiny(other_file_system, "--cores", cores).wait() == 0, printed(other_file_system)
    logs = [name.name for name in (other_file_system / ".snakemake" / "log").iterdir()]
    assert all(name.startswith(str((datetime.now() + timedelta(days * shifted)).year)) for name in logs), logs
    first, second = artefacts(finished), artefacts(other_file_system)
    assert first.keys() == second.keys()
    # The speed of training is measured.
    measured = {name for name in first if name.startswith(("metrics/", "report/"))}
    assert {name for name in first if first[name] != second[name]} <= measured
    assert read_json(finished / RUN / "config.json") == read_json(other_file_system / RUN / "config.json")


@pytest.mark.faults
def test_a_clock_that_was_set_back(copied: Path) -> None:
    """What was made before is of a time to come: nothing is made again for that, and no job ends as if it were new."""
    results = copied / RUN / "results.parquet"
    age(copied, -400)
    assert jobs(dry_run(copied, "config.yaml")) == set()
    sha256 = sha256_file(results)
    results.unlink()
    assert run_tiny(copied).wait() != 0
    assert f"Output {RUN}/results.parquet has older modification time" in printed(copied)
    assert not results.exists()
    age(copied, 400)
    assert run_tiny(copied, f"{RUN}/results.parquet").wait() == 0, printed(copied)
    assert sha256_file(results) == sha256
