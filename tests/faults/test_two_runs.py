"""Two at once: of one run the second is refused and told who holds it; two runs do not disturb each other."""

import copy
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from demix.errors import DemixError
from demix.files import exclusive
from support.breaking import Note, run_tiny
from support.disturbed import TINY, printed, snakemake, until


def holder(lock: Path) -> str | None:
    """Who holds the file `lock`, as "node pid"; None if nobody does."""
    if not lock.exists():
        return None
    with open(lock) as held:
        try:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return held.read().strip()
    return None


@pytest.mark.faults
def test_a_second_snakemake_is_refused_and_told_who_is_there(tmp_path: Path, note: Note) -> None:
    first = run_tiny(tmp_path)
    lock = tmp_path / "results/tiny/.lock"
    try:
        until(lambda: holder(lock))
        with note.timed("a second snakemake in one folder", "refused, the first one named"):
            assert run_tiny(tmp_path).wait() == 1
        assert first.poll() is None
        shown = printed(tmp_path)
        assert f"results/tiny: another process ({os.uname().nodename} {first.pid}) works on this run; wait" in shown
        assert "Traceback" not in shown
    finally:
        first.kill()
        first.wait()
    assert holder(lock) is None


@pytest.mark.faults
def test_runs_of_two_names_in_one_folder(finished: Path, tmp_path: Path, note: Note) -> None:
    (tmp_path / "other").mkdir()
    configs = [copy.deepcopy(TINY) | {"run": name} for name in ("one", "two")]
    for config in configs:
        config["tracking"] = {"uri": "sqlite:///results/mlflow.db"}
    with note.timed("runs of two names at once, one tracking store", "both as one alone"):
        (tmp_path / "resources").symlink_to(finished / "resources")
        started = []
        for config in configs:
            started.append(snakemake(tmp_path, config, profile="default"))
            # The config's file has the same name for both.
            until(lambda config=config: (tmp_path / "results" / config["run"] / ".lock").exists())
        assert [process.wait() for process in started] == [0, 0], printed(tmp_path)
    wanted = pd.read_parquet(finished / "results/tiny/results.parquet")
    for config in configs:
        found = pd.read_parquet(tmp_path / "results" / config["run"] / "results.parquet")
        pd.testing.assert_frame_equal(found, wanted)


def test_a_second_process_is_told_who_holds_a_folder(tmp_path: Path, note: Note) -> None:
    lock = tmp_path / "lock"
    code = f"""
import sys
from pathlib import Path
from demix.files import exclusive
with exclusive(Path({str(lock)!r}), "trains this run"):
    print("held", flush=True)
    sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    who = f"{os.uname().nodename} {other.pid}"
    assert holder(lock) == who
    with (
        note.timed("a second process in a folder of checkpoints", "refused, the first one named"),
        pytest.raises(DemixError, match=rf"another process \({who}\) trains this run"),
        exclusive(lock, "trains this run"),
    ):
        pass
    other.kill()
    other.wait()
    assert holder(lock) is None
    with exclusive(lock, "trains this run"):
        assert holder(lock) == f"{os.uname().nodename} {os.getpid()}"
