"""Runs that are killed at any moment and go on to the same bytes, a second one of the same run, and two at once."""

import fcntl
import os
import random
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pandas as pd
import psutil
import pytest

from demix.files import sha256_file
from support.breaking import run_tiny
from support.disturbed import printed, until
from support.dry_run import TINY

RESULTS = "results/tiny/results.parquet"
# What the seconds between two kills are drawn from: a start of snakemake alone takes a few.
SECONDS = (1.0, 25.0)


def ran_again(shown: str) -> list[str]:
    """Commands that were started though snakemake had said that they were finished."""
    finished, again, jobs, job = set(), [], {}, None
    for line in shown.splitlines():
        if match := re.match(r"\s+jobid: (\d+)$", line):
            job = match[1]
        elif match := re.match(r"Shell command: (.*)", line):
            jobs[job] = match[1]
            if match[1] in finished:
                again.append(match[1])
        elif match := re.match(r"Finished jobid: (\d+) ", line):
            finished.add(jobs.get(match[1]))
        elif line.startswith("Building DAG of jobs"):
            jobs = {}
    return again


def below(process: subprocess.Popen) -> list[psutil.Process]:
    """The `demix` commands that a snakemake has running."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if any(Path(word).name == "demix" for word in child.cmdline()[:2]):
                    found.append(child)
    return found


def kill(process: subprocess.Popen, jobs: list[psutil.Process], chance: random.Random) -> None:
    """SIGKILL snakemake, snakemake with all of its jobs, or one job, whereupon the jobs beside it are finished."""
    what = chance.choice(["snakemake", "snakemake and its jobs", "a job"])
    if what == "a job" and jobs:
        with suppress(psutil.NoSuchProcess):
            chance.choice(jobs).kill()
        process.wait()
        return
    process.kill()
    process.wait()
    for job in jobs if what != "snakemake" else []:
        with suppress(psutil.NoSuchProcess):
            job.kill()


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.faults
def test_a_run_that_is_killed_at_random_moments(
    finished: Path, tmp_path: Path, chance: random.Random, request: pytest.FixtureRequest
) -> None:
    kills, runs, wanted = 0, 0, request.config.getoption("--kills")
    while kills < wanted:
        runs += 1
        folder = tmp_path / f"run{runs}"
        while True:
            process = run_tiny(folder)
            try:
                assert process.wait(chance.uniform(*SECONDS) if kills < wanted else None) == 0, printed(folder)
                break
            except subprocess.TimeoutExpired:
                jobs = below(process)
            kills += 1
            kill(process, jobs, chance)
            # Nothing runs on unseen, training neither.
            until(lambda jobs=jobs: all(map(has_ended, jobs)), 60)
        assert sha256_file(folder / RESULTS) == sha256_file(finished / RESULTS)
        assert ran_again(printed(folder)) == []


PARENT = '''
import os, subprocess, sys
child = """
import os, signal
from demix.launch.snakemake import end_with_snakemake
end_with_snakemake()
print(os.getpid(), flush=True)
signal.pause()
"""
# A shell between the two, as snakemake has one.
shell = ["bash", "-c", 'export DEMIX_SNAKEMAKE=$PPID; "$0" -c "$1"; true', sys.executable, child]
subprocess.run(shell)
'''


def test_a_job_ends_when_its_snakemake_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        job = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    until(lambda: has_ended(job))


def test_a_job_by_hand_outlives_who_started_it() -> None:
    code = "from demix.launch.snakemake import end_with_snakemake, is_job; end_with_snakemake(); print(is_job.is_set())"
    environment = {key: value for key, value in os.environ.items() if key != "DEMIX_SNAKEMAKE"}
    for more, shown in (({}, "False\n"), ({"DEMIX_SNAKEMAKE": str(os.getpid())}, "True\n")):
        assert subprocess.check_output([sys.executable, "-c", code], text=True, env=environment | more) == shown


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
