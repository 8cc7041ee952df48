"""The tracking store gone, locked or damaged: the run's results stand, and tracking later fills in what is missing."""

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from demix.files import sha256_file
from demix.run.run import Run
from demix.track.store import track
from support.breaking import run_tiny
from support.disturbed import printed, until
from support.errors import refused
from support.frozen import with_models

RUN = "results/tiny"


def corrupt(database: Path) -> Callable[[], None]:
    database.write_bytes(b"this is no database" * 1000)
    return database.unlink


def locked(database: Path) -> Callable[[], None]:
    held = sqlite3.connect(database, isolation_level=None)
    held.execute("BEGIN EXCLUSIVE")
    return held.close


def gone(database: Path) -> Callable[[], None]:
    """A folder in its place, as of a disk that is not mounted."""
    database.unlink(missing_ok=True)
    database.mkdir()
    return database.rmdir


def damaged(database: Path) -> Callable[[], None]:
    content = bytearray(database.read_bytes()) if database.exists() else bytearray(b"SQLite format 3\0" + b"\0" * 9000)
    content[100:8000] = b"\xff" * 7900
    database.write_bytes(content)
    return database.unlink


def runs(database: Path) -> int:
    with sqlite3.connect(database) as opened:
        return opened.execute("select count(*) from runs where lifecycle_stage = 'active'").fetchone()[0]


@pytest.fixture
def run(frozen: Run, tmp_path: Path) -> Run:
    """A run of the usual models alone."""
    return with_models(frozen, tmp_path / "run", "demix", "dense")


@pytest.mark.parametrize("break_it", [corrupt, gone])
def test_a_broken_store_is_named_and_another_is_filled(
    break_it: Callable[[Path], Callable[[], None]], run: Run, tmp_path: Path
) -> None:
    database = tmp_path / "broken.db"
    break_it(database)
    with refused(f"sqlite:///{database}"):
        track(run, f"sqlite:///{database}", "broken")
    # MLflow keeps what it once opened: the next process would take the mended one of the same name.
    track(run, f"sqlite:///{tmp_path}/mended.db", "broken")
    assert runs(tmp_path / "mended.db") > 5


def test_a_kill_while_the_store_is_made(run: Run, tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    code = "import sys; from pathlib import Path; from demix.run.run import Run; from demix.track.store import track\n"
    code += "run, *rest = sys.argv[1:]; track(Run.read(Path(run)), *rest)"
    words = [sys.executable, "-c", code, str(run.folder), f"sqlite:///{database}", "killed"]

    def size() -> int:
        # What is listed may have been renamed since.
        with suppress(FileNotFoundError):
            return max((path.stat().st_size for path in tmp_path.glob("*mlflow.db*")), default=0)
        return 0

    for least in (1, 300_000):
        process = subprocess.Popen(words)
        until(lambda least=least: size() >= least)
        process.kill()
        process.wait()
    subprocess.run(words, check=True)
    assert runs(database) > 5


@pytest.mark.faults
@pytest.mark.parametrize("break_it", [corrupt, locked, gone, damaged])
def test_a_run_ends_without_its_store_and_track_fills_it_in(
    break_it: Callable[[Path], Callable[[], None]], copied: Path
) -> None:
    run = copied / RUN
    wanted, database = sha256_file(run / "results.parquet"), run / "mlflow.db"
    before = runs(database)
    # All of the evaluation is to be done again, and the report.
    for name in ("results.parquet", "tracked.json"):
        (run / name).unlink()
    shutil.rmtree(run / "evaluations")
    mend = break_it(database)
    assert run_tiny(copied).wait() == 1
    assert sha256_file(run / "results.parquet") == wanted
    assert (run / "report" / "claims.html").is_file()
    assert "demix: error: sqlite:///results/tiny/mlflow.db: " in printed(copied)
    assert not (run / "tracked.json").exists()
    mend()
    (copied / "printed.log").unlink()
    assert run_tiny(copied).wait() == 0, printed(copied)
    assert printed(copied).count("\nFinished jobid: ") == 2, "track, and the target of all"
    assert runs(database) == before
