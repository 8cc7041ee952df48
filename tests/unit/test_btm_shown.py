"""Experts that are whole models while they train and after: in `demix watch`, in MLflow, in `demix sql`."""

import json
import os
from pathlib import Path

import pytest
import yaml

from demix.files import read_json, write_json, write_json_lines
from demix.launch.job import TrainingJob
from demix.launch.outcome import progress_line
from demix.launch.pace import tokens_of_update
from demix.report.watch import courses
from demix.track.live import Sender
from demix.track.records import records
from support.cli import demix
from support.configs import changed
from support.synthetic_run import build_run, with_keys

ROWS = yaml.safe_load((Path(__file__).parents[1] / "workflow" / "tiny.yaml").read_text())
BTM = {"kind": "branched", "parent": "dense", "seed_tokens": 6000}


def line(step: int, tokens: int) -> dict[str, float]:
    return {"step": step, "tokens": tokens, "loss": 5.0, "tokens_per_second": 64.0, "learning_rate": 1e-3}


def test_watch_shows_each_expert_that_trains(tmp_path: Path) -> None:
    run = tmp_path / "results" / "tiny"
    made = with_keys(run, ROWS | {"models": {"btm": BTM}})
    # Of 32 updates of 128 tokens the seed, of 384 tokens an update, was the first 15.
    folder = run / "checkpoints" / "btm" / "licenses" / "0123"
    folder.mkdir(parents=True)
    (folder / "lock").write_text(f"{os.uname().nodename} {os.getpid()}\n")
    rows = [line(step, 15 * 384 + (step - 15) * 128) for step in range(16, 21)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_json_lines(run / "metrics" / "btm" / "scripture.jsonl", rows)
    found = {course.name: course for course in courses(made)}
    assert found.keys() == {"btm/licenses", "btm/scripture"}
    one = found["btm/licenses"]
    assert (one.state, one.step, one.steps, found["btm/scripture"].state) == ("running", 20, 32, "ended")
    assert one.seconds_left == pytest.approx(12 * 128 / 64)
    assert tokens_of_update(rows[:1]) == rows[0]["tokens"] / 16


def test_a_job_of_several_experts_says_which_one_is_on(tmp_path: Path) -> None:
    checkpoints = tmp_path / "results" / "tiny" / "checkpoints" / "btm"
    names = ("licenses", "parliament", "scripture")
    for name in names[:2]:
        (checkpoints / name / "0123").mkdir(parents=True)
        rows = [line(step, step * 128) for step in (1, 2)]
        (checkpoints / name / "0123" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = TrainingJob(
        (), "", {}, 1, 1, checkpoints / "licenses-and-2-more", 12, tuple(checkpoints / name for name in names)
    )
    assert job.label == "btm/licenses-and-2-more"
    assert job.name.startswith("demix-btm-licenses-and-2-more-")
    shown = {"JobState": "RUNNING", "StartTime": "2026-01-01T00:00:00", "NodeList": "n1"}
    wanted = "job 7 running on n1  parliament, 2 of 3  step 2/12  loss 5.000  64 tokens/s  0:20 left for it"
    assert progress_line(job, "7", shown) == wanted
    alone = TrainingJob((), "", {}, 1, 1, checkpoints / names[0], 12)
    assert progress_line(alone, "7", shown) == wanted.replace("  parliament, 2 of 3", "").removesuffix(" for it")


def test_live_metrics_name_the_model_and_the_expert(tmp_path: Path) -> None:
    results = tmp_path / "results"
    for run in ("tiny", "checkpoints"):
        for place in ("dense", "btm/licenses"):
            folder = results / run / "checkpoints" / place
            sender = Sender(json.dumps({"uri": "sqlite:///x"}), "training", str(folder), "metrics.jsonl", 0.0)
            assert sender._place() == (place, results)


def test_each_expert_has_a_record_and_rows_of_its_own(tmp_path: Path) -> None:
    run = build_run(tmp_path / "results" / "made-up", steps=4)
    training = run.run.training
    with_btm = changed(run.run, models={"btm": {"kind": "branched", "experts_per_job": 2}})
    rows = [line(step, step * 64) for step in range(1, 4)]
    for name in training:
        write_json_lines(run.path / "metrics" / "btm" / f"{name}.jsonl", rows)
        (folder := run.path / "branches" / "btm" / name / "experts").mkdir(parents=True)
        write_json(folder.parent / "model.json", read_json(run.path / "models" / "dense" / "model.json"))
    write_json_lines(run.path / "metrics" / "btm.jsonl", rows)
    found = {record.key: record for record in records(with_btm)}
    assert {f"training/btm/{name}" for name in training} | {"training/btm"} <= found.keys()
    own = found[f"training/btm/{training[0]}"]
    assert (run.path / "metrics" / "btm" / f"{training[0]}.jsonl", "") in own.artifacts
    assert own.params["model.uri"].endswith(f"branches/btm/{training[0]}")
    assert [point[2] for point in own.metrics if point[0] == "loss"] == [1, 2, 3]
    query = "select expert, count(*) as n from metrics where model = 'btm' and metric = 'loss' group by 1"
    told = demix("sql", run.path, query, "--format", "csv")
    assert set(told.stdout.split()[1:]) == {*(f"{name},3" for name in training), ",3"}, told.exception
