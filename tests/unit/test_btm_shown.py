"""Experts that are whole models while they train: in `demix watch`, and in the progress of their jobs."""

import json
import os
from pathlib import Path

import pytest

from demix.files import write_json_lines
from demix.launch.job import TrainingJob
from demix.launch.outcome import progress_line
from demix.report.watch import courses
from support.configs import small_run

LINES = [
    {"step": step, "tokens": 32 * step, "loss": 5.0, "tokens_per_second": 64.0, "learning_rate": 1e-3}
    for step in (1, 2)
]


def write_lines(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))


def test_watch_shows_each_expert_that_trains(tmp_path: Path) -> None:
    run = small_run(tmp_path, models={"btm": {"kind": "branched", "tokens": 640}}, training={"sequences": 4})
    write_lines(tmp_path / "checkpoints" / "btm" / "law" / "0123")
    (tmp_path / "checkpoints" / "btm" / "law" / "0123" / "lock").write_text(f"{os.uname().nodename} {os.getpid()}\n")
    write_json_lines(tmp_path / "metrics" / "btm" / "news.jsonl", LINES)
    found = {course.name: course for course in courses(run)}
    assert {name: (one.state, one.step, one.steps) for name, one in found.items()} == {
        "btm/law": ("running", 2, 10),
        "btm/news": ("ended", 2, 10),
    }
    assert found["btm/law"].seconds_left == pytest.approx(8 * 32 / 64)


def test_a_job_of_several_experts_says_which_one_is_on(tmp_path: Path) -> None:
    names = ("licenses", "parliament", "scripture")
    places = [tmp_path / "results" / "tiny" / "checkpoints" / "btm" / name for name in names]
    for place in places[:2]:
        write_lines(place / "0123")
    job = TrainingJob((), "", {}, 1, 1, places[0].with_name("licenses-and-2-more"), 12, tuple(places))
    assert job.label == "btm/licenses-and-2-more"
    shown = {"JobState": "RUNNING", "StartTime": "2026-01-01T00:00:00", "NodeList": "n1"}
    assert "  parliament, 2 of 3  step 2/12  " in progress_line(job, "7", shown)
    alone = TrainingJob((), "", {}, 1, 1, places[0], 12)
    assert " of 3" not in progress_line(alone, "7", shown)
