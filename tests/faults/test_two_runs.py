"""Two at once: of one run the second is refused and told who holds it; two runs do not disturb each other."""

import fcntl
import os
from pathlib import Path

import pandas as pd
import pytest

from support.breaking import run_tiny
from support.disturbed import printed, until
from support.dry_run import TINY


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
def test_a_second_snakemake_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    first = run_tiny(tmp_path)
    lock = tmp_path / "results/tiny/.lock"
    try:
        until(lambda: holder(lock))
        assert run_tiny(tmp_path).wait() == 1
        assert first.poll() is None
        shown = printed(tmp_path)
        assert f"{os.uname().nodename} {first.pid}" in shown
        assert "Traceback" not in shown
    finally:
        first.kill()
        first.wait()
    assert holder(lock) is None


@pytest.mark.faults
def test_runs_of_two_names_in_one_folder(finished: Path, tmp_path: Path) -> None:
    """With one tracking store."""
    started = []
    for name in ("one", "two"):
        config = TINY | {"run": name, "tracking": {"uri": "sqlite:///results/mlflow.db"}}
        started.append(run_tiny(tmp_path, config=config))
        # The config's file has the same name for both.
        until(lambda name=name: (tmp_path / "results" / name / ".lock").exists())
    assert [process.wait() for process in started] == [0, 0], printed(tmp_path)
    wanted = pd.read_parquet(finished / "results/tiny/results.parquet")
    for name in ("one", "two"):
        found = pd.read_parquet(tmp_path / "results" / name / "results.parquet")
        pd.testing.assert_frame_equal(found, wanted)
