"""One job that trains several experts that are whole models, and what a config can ask of such rows."""

import copy
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from demix.errors import DemixError, StoppedError
from demix.files import read_json
from demix.run.check import completed_run
from demix.run.models import Model
from demix.run.rules import RunRules
from demix.train.in_turn import job_folder
from support.cli import demix, said
from support.tokens import TRAINING
from support.training import TRAIN, shard_paths, stop_at

CONFIG = yaml.safe_load((Path(__file__).parents[1] / "workflow" / "tiny.yaml").read_text())
SHORT = dataclasses.replace(TRAIN, tokens=32 * 2 * 3 * 12)


def command(tokens: Path, folder: Path, *experts: str) -> list[str]:
    return [
        "train", "branched", *map(str, shard_paths(tokens)), "--settings", json.dumps(dataclasses.asdict(SHORT)),
        "--experts", ",".join(experts), "--output", str(folder / "branches"), "--metrics", str(folder / "metrics"),
        "--checkpoints", str(folder / "checkpoints"),
    ]  # fmt: skip


def files(folder: Path) -> dict[str, bytes]:
    branches = folder / "branches"
    return {path.relative_to(branches).as_posix(): path.read_bytes() for path in branches.rglob("*.*")}


@pytest.mark.parametrize("again", [[TRAINING], [(name,) for name in TRAINING]], ids=["one job", "a job for each"])
def test_experts_of_one_job_are_those_of_many(
    again: list[tuple[str, ...]], tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    for name in TRAINING:
        assert said(command(tokens, alone, name)) is None
    drawn = stop_at(monkeypatch, {7}, TRAINING[1:2])
    lost = demix(*command(tokens, together, *TRAINING))
    assert isinstance(lost.exception, StoppedError)
    assert not list((together / "branches").glob("*")), "Snakemake would delete them"
    assert not list((together / "metrics").glob("*"))
    assert set(drawn) == {(name,) for name in TRAINING[:2]}
    drawn.clear()
    for experts in again:
        assert said(command(tokens, together, *experts)) is None
    # The lost one goes on from its own state after seven updates, and the one before it is not trained again.
    assert [drawn.count((name,)) for name in TRAINING] == [0, 12 - 7, 12]
    assert files(together) == files(alone)
    for name in TRAINING:
        found = [
            [json.loads(line) for line in (folder / "metrics" / f"{name}.jsonl").read_text().splitlines()]
            for folder in (alone, together)
        ]
        timeless = [[{**row, "tokens_per_second": 0} for row in rows if "step" in row] for rows in found]
        assert timeless[0] == timeless[1]
    assert not list((together / "checkpoints").rglob("*.safetensors"))


def test_the_job_tells_slurm_when_all_are_written(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank of a SLURM job has WORLD_SIZE, and outputs below the folder of `done.json`."""
    done = tmp_path / "done.json"
    for name, value in (("WORLD_SIZE", "1"), ("RANK", "0"), ("MASTER_ADDR", "here"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DEMIX_DONE", str(done))
    assert said(command(tokens, tmp_path, *TRAINING[:2])) is None
    told = read_json(done)["files"]
    for name in TRAINING[:2]:
        assert {f"branches/{name}/model.json", f"metrics/{name}.jsonl"} <= told.keys()
    assert os.environ["DEMIX_DONE"] == str(done)
    assert job_folder(Path("c"), ["a"]) != job_folder(Path("c"), ["a", "b"]) != job_folder(Path("c"), ["b", "c"])


def rules(**sections: Any) -> RunRules:
    config = copy.deepcopy(CONFIG)
    for name, section in sections.items():
        config[name] = config.get(name, {}) | section
    return RunRules(completed_run(config))


BTM = {"kind": "branched", "parent": "dense", "seed_tokens": 6000}


def row(one: RunRules, name: str) -> Model:
    return next(model for model in one.run.trained if model.name == name)


def test_the_number_of_experts_a_job_changes_nothing_that_reruns_a_job() -> None:
    one, two = rules(models={"btm": BTM}), rules(models={"btm": BTM | {"experts_per_job": 2}})
    model = row(two, "btm")
    assert [[part.part for part in job] for job in row(one, "btm").jobs] == [[name] for name in model.domains]
    assert [[part.part for part in job] for job in model.jobs] == [[*model.domains[:2]], [model.domains[2]]]
    for told in (RunRules.training_settings, RunRules.beginning, RunRules.train_inputs, RunRules.seed_of):
        assert told(one, row(one, "btm")) == told(two, model)


def test_a_model_without_a_domain_has_its_own_training_of_the_replacement_alone() -> None:
    removal = {"retrain_without": ["licenses"], "replacement": "fantasy", "model": "btm"}
    model = row(rules(models={"btm": BTM}, removal=removal), "without-licenses")
    (job,) = model.jobs
    assert [part.folder for part in job] == ["branches/without-licenses/fantasy"]
    assert {part.folder for part in model.parts} == {
        "branches/btm/parliament", "branches/btm/scripture", "branches/without-licenses/fantasy",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"models": {"x": {"kind": "demix", "experts_per_job": 2}}}, r"x\.experts_per_job: is given to a row of kind"),
        (
            {"models": {"btm": BTM | {"ranks": 2, "experts_per_job": 2}}},
            r"models\.btm\.ranks: is 2 with experts_per_job 2; use 1",
        ),
        ({"models": {"btm": BTM | {"ranks": 5}}}, r"models\.btm\.ranks: gives \w+ 5 ranks for 4 sequences"),
        (
            {"training": {"ranks": 4, "replicas": {"licenses": 2}}, "models": {"btm": BTM}},
            r"models\.btm\.replicas: is .*each expert trains by itself; give this row replicas: \{\}",
        ),
        (
            {"models": {"btm": {"kind": "branched", "sweep": {"learning_rates": [1], "tokens": 768}}}},
            r"models\.btm\.sweep: has no single training",
        ),
    ],
)
def test_rows_that_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(DemixError, match=message):
        rules(**sections)
