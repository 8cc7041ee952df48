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
from demix.report.watch import Course, courses, picture, watch
from demix.run.check import load_run
from demix.run.kept import write_run_config
from demix.run.run import Run
from support.cli import demix, said
from support.configs import small_run

REPOSITORY = Path(__file__).parents[2]
STEP_TOKENS = 8 * 256
STEPS = 1_000_000 // STEP_TOKENS


def rows(steps: int, *, dev: bool = True, speed: float = 1024.0) -> list[dict[str, float]]:
    lines = []
    for step in range(1, steps + 1):
        tokens = step * STEP_TOKENS
        lines.append({"step": step, "tokens": tokens, "loss": 8 - step / 100, "tokens_per_second": speed})
        if dev and step % 100 == 0:
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


def of_this_process() -> str:
    return f"{os.uname().nodename} {os.getpid()}\n"


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
    under_way(run, "demix", rows(250), of_this_process())
    under_way(run, "dense", [], of_this_process())
    under_way(run, "domain_token", rows(30, dev=False), dead)
    under_way(run, "demix_paper", rows(30), "another-node 1\n", age=module.RECENT / 2)
    under_way(run, "demix_seeded", rows(30), "another-node 1\n", age=module.RECENT * 2)
    write_json_lines(run / "metrics" / "without-licenses.jsonl", rows(STEPS))
    write_json_lines(run / "metrics" / "dense_paper.jsonl", rows(STEPS))
    os.utime(run / "metrics" / "dense_paper.jsonl", (time.time() - 2 * module.RECENT,) * 2)
    under_way(run, "demix_seeded-dapt-wiki", [{"step": 0, "tokens": 0, "early_stopping_loss": 7.0}], of_this_process())

    shown = demix("watch", run).stdout
    lines = {line.split()[0]: line for line in shown.splitlines()[2:]}
    names = ["demix", "dense", "domain_token", "demix_paper", "without-licenses", "demix_seeded-dapt-wiki"]
    assert [*lines] == names
    # The mean of the last 20 updates, and 2,048 tokens in 2 seconds.
    assert lines["demix"].split()[-6:] == ["51%", f"250/{STEPS}", "5.595", "7.000", "1,024", "7:56"]
    assert lines["dense"].split()[-5:] == [f"0/{STEPS}", "–", "–", "–", "running"]
    assert lines["demix_paper"].split()[-1] == "15:16"
    assert lines["domain_token"].split()[-3:] == ["–", "1,024", "stopped"]
    assert lines["without-licenses"].split()[-6:] == ["100%", f"{STEPS}/{STEPS}", "3.215", "5.000", "1,024", "ended"]
    assert lines["demix_seeded-dapt-wiki"].split()[-5:] == ["0/64", "–", "7.000", "–", "running"]
    assert shown.startswith("sample: 4 in training")


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_number_is_cut(width: int) -> None:
    """A terminal that is too narrow for all of it breaks names; a column that is empty is not shown."""
    one = Course("sweep/demix_seeded/0.002", "running", 1230, 56789, 14.512, None, 123456.0, 70000.0)
    console = Console(file=io.StringIO(), width=width)
    console.print(picture(small_run(Path("sample")), [one]))
    _, heads, line, *_ = console.file.getvalue().splitlines()
    assert heads.split() == ["model", "update", "loss", "tokens/s", "left"]
    assert line.split()[-5:] == ["2%", "1,230/56,789", "14.512", "123,456", "19:26:40"]
    console.print(picture(small_run(Path("sample")), [Course("demix", "running")]))
    assert console.file.getvalue().splitlines()[-2].split() == ["model", "update", "left"]


def test_it_ends_when_nothing_runs(run: Path, dead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two trainings the run's snakemake holds its lock; what ends is left on the screen."""
    folder = under_way(run, "demix", rows(250), of_this_process())
    (run / ".lock").write_text(of_this_process())
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
    last = screen.getvalue().rpartition("in training")[2]
    assert "ended" in last
    assert "7:56" not in last


def test_a_number_that_a_later_process_got_is_not_the_holder(run: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as later:
        under_way(run, "demix", rows(5), f"{os.uname().nodename} {later.pid}\n", age=module.RECENT / 2)
        (course,) = courses(Run.read(run))
        later.kill()
    assert course.state == "stopped"


def test_a_folder_that_is_no_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parents[1])
    line = said(["watch", "results/smaple"])
    assert line is not None
    assert "none of a run; did you mean results/sample?" in line
