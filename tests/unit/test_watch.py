"""`demix watch`: the trainings under way in a run, from its files."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from demix.files import write_json_lines
from demix.report import watch as module
from demix.report.watch import Course, courses, watch
from demix.run.check import load_run
from demix.run.kept import write_run_config
from demix.run.run import Run
from support.cli import demix

REPOSITORY = Path(__file__).parents[2]
STEP_TOKENS = 8 * 256
STEPS = 1_000_000 // STEP_TOKENS
THIS_PROCESS = f"{os.uname().nodename} {os.getpid()}\n"


def rows(steps: int) -> list[dict[str, float]]:
    """The metrics of updates of 2 seconds each, with a loss on dev every hundred updates."""
    lines = []
    for step in range(1, steps + 1):
        tokens = step * STEP_TOKENS
        lines.append({"step": step, "tokens": tokens, "loss": 8 - step / 100, "tokens_per_second": STEP_TOKENS / 2})
        if step % 100 == 0:
            lines.append({"step": step, "tokens": tokens, "dev_loss": 9 - step / 100})
    return lines


def under_way(run: Path, name: str, lines: list[dict[str, float]], holder: str, age: float = 0.0) -> Path:
    folder = run / "checkpoints" / name / "0123abcd"
    folder.mkdir(parents=True)
    (folder / "lock").write_text(holder)
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9')
    for path in folder.iterdir():
        os.utime(path, (time.time() - age,) * 2)
    return folder


@pytest.fixture(scope="module")
def dead() -> str:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return f"{os.uname().nodename} {ended.pid}\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "results" / "sample"
    write_run_config(run / "config.json", load_run(REPOSITORY / "config" / "sample.yaml").config)
    return run


def test_what_runs_what_ended_and_what_stopped(run: Path, dead: str) -> None:
    under_way(run, "demix", rows(250), THIS_PROCESS)
    under_way(run, "dense", [], THIS_PROCESS)
    under_way(run, "domain_token", rows(30), dead)
    under_way(run, "demix_paper", rows(30), "another-node 1\n", age=module.RECENT / 2)
    under_way(run, "demix_seeded", rows(30), "another-node 1\n", age=module.RECENT * 2)
    write_json_lines(run / "metrics" / "without-licenses.jsonl", rows(STEPS))
    write_json_lines(run / "metrics" / "dense_paper.jsonl", rows(STEPS))
    os.utime(run / "metrics" / "dense_paper.jsonl", (time.time() - 2 * module.RECENT,) * 2)
    under_way(run, "demix_seeded-dapt-wiki", [{"step": 0, "tokens": 0, "early_stopping_loss": 7.0}], THIS_PROCESS)
    # The loss is the mean of the last 20 updates.
    speed = STEP_TOKENS / 2
    assert courses(Run.read(run)) == [
        Course("demix", "running", 250, STEPS, pytest.approx(5.595), 7.0, speed, 2.0 * (STEPS - 250)),
        Course("dense", "running", 0, STEPS),
        Course("domain_token", "stopped", 30, STEPS, pytest.approx(7.795), None, speed, None),
        Course("demix_paper", "running", 30, STEPS, pytest.approx(7.795), None, speed, 2.0 * (STEPS - 30)),
        Course("without-licenses", "ended", STEPS, STEPS, pytest.approx(3.215), 5.0, speed, None),
        Course("demix_seeded-dapt-wiki", "running", 0, 64, None, 7.0),
    ]
    lines = {line.split()[0]: line.split() for line in demix("watch", run).stdout.splitlines()[2:]}
    assert lines["demix"][-6:] == ["51%", f"250/{STEPS}", "5.595", "7.000", "1,024", "7:56"]
    assert lines["domain_token"][-1] == "stopped"


def test_it_ends_when_nothing_runs(run: Path, dead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two trainings the run's snakemake holds its lock; what ends is left on the screen."""
    folder = under_way(run, "demix", rows(250), THIS_PROCESS)
    (run / ".lock").write_text(THIS_PROCESS)
    seen: list[list[str]] = []

    def sleep(_: float) -> None:
        seen.append([course.state for course in courses(Run.read(run))])
        if len(seen) == 1:
            write_json_lines(run / "metrics" / "demix.jsonl", rows(STEPS))
            (folder / "metrics.jsonl").unlink()
        else:
            (run / ".lock").write_text(dead)

    monkeypatch.setattr(module, "time", SimpleNamespace(time=time.time, sleep=sleep))
    screen = io.StringIO()
    watch(run, Console(file=screen, force_terminal=True, width=120))
    assert seen == [["running"], ["ended"]]
    assert "100%" in screen.getvalue().rpartition("demix ")[2]
