"""The tracking store gone, locked or damaged: the run's results stand, and tracking later fills in what is missing."""

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from demix.errors import DemixError
from demix.files import sha256_file
from demix.track.client import opened
from demix.track.store import track
from support.breaking import Note, command, run_tiny
from support.cli import said
from support.disturbed import TINY, printed, until
from support.synthetic_run import build_run

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


STORES = (corrupt, locked, gone, damaged)


def runs(database: Path) -> int:
    with sqlite3.connect(database) as opened:
        return opened.execute("select count(*) from runs where lifecycle_stage = 'active'").fetchone()[0]


def test_a_damaged_store_is_told_and_filled_in_later(tmp_path: Path, note: Note) -> None:
    run = build_run(tmp_path / "run", steps=1)
    for break_it in (corrupt, gone):
        database = tmp_path / f"{break_it.__name__}.db"
        mend = break_it(database)
        with (
            note.timed(f"tracking store {break_it.__name__}", "common error"),
            pytest.raises(DemixError, match=rf"{database.name}") as error,
        ):
            track(run.run, f"sqlite:///{database}", "broken")
        assert "\n" not in str(error.value)
        mend()
    # MLflow keeps what it once opened: the next process would take the mended one of the same name.
    with note.timed("tracking store mended", "track fills it in"):
        track(run.run, f"sqlite:///{tmp_path}/mended.db", "broken")
    assert runs(tmp_path / "mended.db") > 5


def test_a_kill_while_the_store_is_made(tmp_path: Path, note: Note) -> None:
    run = build_run(tmp_path / "run", steps=1)
    database = tmp_path / "mlflow.db"
    code = "import sys; from pathlib import Path; from demix.run.run import Run; from demix.track.store import track\n"
    code += "run, *rest = sys.argv[1:]; track(Run.read(Path(run)), *rest)"
    command = [sys.executable, "-c", code, str(run.path), f"sqlite:///{database}", "killed"]

    def size() -> int:
        # What is listed may have been renamed since.
        with suppress(FileNotFoundError):
            return max((path.stat().st_size for path in tmp_path.glob("*mlflow.db*")), default=0)
        return 0

    for least in (1, 50_000, 300_000):
        process = subprocess.Popen(command)
        until(lambda least=least: size() >= least)
        process.kill()
        process.wait()
    with note.timed("SIGKILL while the tracking store is made", "the next track makes it"):
        subprocess.run(command, check=True)
    assert runs(database) > 5
    # As a kill after the rename leaves it.
    (tmp_path / f".mlflow.db.{os.uname().nodename}.{process.pid}.x.partial").mkdir()
    opened(f"sqlite:///{database}")
    assert [path.name for path in tmp_path.glob("*.partial")] == []


@pytest.mark.faults
@pytest.mark.parametrize("break_it", STORES, ids=lambda store: store.__name__)
def test_a_run_ends_without_its_store_and_track_fills_it_in(
    break_it: Callable[[Path], Callable[[], None]], copied: Path, note: Note
) -> None:
    run = copied / RUN
    wanted = sha256_file(run / "results.parquet")
    database = run / "mlflow.db"
    before = runs(database)
    # All of the evaluation is to be done again, and the report.
    for name in ("results.parquet", "tracked.json"):
        (run / name).unlink()
    shutil.rmtree(run / "evaluations")
    mend = break_it(database)
    start = time.monotonic()
    assert run_tiny(copied).wait() == 1
    note.add(f"a run with its store {break_it.__name__}", "all but tracking is done", time.monotonic() - start)
    assert sha256_file(run / "results.parquet") == wanted
    assert (run / "report" / "claims.html").is_file()
    assert "demix: error: sqlite:///results/tiny/mlflow.db: " in printed(copied)
    assert not (run / "tracked.json").exists()
    mend()
    (copied / "printed.log").unlink()
    with note.timed(f"its store {break_it.__name__}, mended", "a rerun tracks and does nothing else"):
        assert run_tiny(copied).wait() == 0, printed(copied)
    assert printed(copied).count("\nFinished jobid: ") == 2, "track, and the target of all"
    assert runs(database) == before


@pytest.mark.faults
def test_a_server_that_is_away(copied: Path, note: Note) -> None:
    arguments = command(copied, "track ")
    place = arguments.index("--settings") + 1
    away = [*arguments[:place], '{"uri": "http://127.0.0.1:9", "experiment": "e"}', *arguments[place + 1 :]]
    with note.timed("tracking server away", "common error"):
        line = said(away)
    assert "demix: error: http://127.0.0.1:9: " in str(line)
    assert TINY["run"] in arguments[1]
