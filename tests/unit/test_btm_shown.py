"""Experts that are whole models while they train: the progress of their jobs."""

import json
from pathlib import Path

from demix.launch.job import TrainingJob
from demix.launch.outcome import progress_line

LINES = [
    {"step": step, "tokens": 32 * step, "loss": 5.0, "tokens_per_second": 64.0, "learning_rate": 1e-3}
    for step in (1, 2)
]


def write_lines(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))


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
