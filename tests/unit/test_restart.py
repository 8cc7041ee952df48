"""A row that begins with the parameters of a dense training, and restarts the schedule."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from demix.errors import DemixError, StoppedError
from demix.files import read_json_lines
from demix.model.checkpoint import describe, load_model
from demix.run.check import completed_run
from demix.run.models import Model
from demix.run.rules import RunRules
from demix.train import stage
from demix.train.stage import ModelTraining, take_seed
from support.cli import said
from support.tokens import TRAINING
from support.training import TRAIN, shard_paths, stop_at, train_command, train_model

SEED = 10
# A step of TRAIN is 192 tokens, one of OWN 288. The seed's 1,920 tokens are 6 of these steps and a part of the next.
OWN = dataclasses.replace(TRAIN, tokens=192 * 31, sequences=3, learning_rate=1e-3, warmup=0.0, seed=3)
CONFIG = yaml.safe_load((Path(__file__).parents[1] / "workflow" / "tiny.yaml").read_text())
ROW = {"parent": "dense", "seed_tokens": 6000, "schedule": "restart"}


@pytest.fixture(scope="module")
def seed(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    kept = run / "checkpoints" / "dense"
    train_model("dense", TRAIN, shard_paths(tokens), run / "model", run / "metrics.jsonl", kept, keep=(SEED,))
    whole = ModelTraining("dense", TRAIN, shard_paths(tokens), until=SEED)
    assert take_seed(whole, kept, run / "seeds/dense/step-00000010")
    return run / "seeds" / "dense" / "step-00000010"


def train_into(folder: Path, kind: str, tokens: Path, seed: Path, training: stage.Training = OWN) -> Path:
    places = folder / "model", folder / "metrics.jsonl", folder / "checkpoints"
    train_model(kind, training, shard_paths(tokens), *places, branch=seed, schedule="restart")
    return folder / "model"


@pytest.mark.parametrize("kind", ["demix", "dense", "dense_unbalanced"])
def test_it_has_settings_of_its_own(seed: Path, tokens: Path, tmp_path: Path, kind: str) -> None:
    model = train_into(tmp_path, kind, tokens, seed)
    begun, *rows = read_json_lines(tmp_path / "metrics.jsonl")
    assert (begun["step"], begun["tokens"], begun["branched_from"]) == (7, 1920, "dense")
    assert [row["step"] for row in rows] == list(range(8, 21))
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e-3 * (13 - n) / 13 for n in range(13)])
    about = describe(model)
    assert (about["parent"]["schedule"], about["parent"]["step"], about["training"]["warmup"]) == ("restart", 10, 0.0)
    assert (about["tokens"], about["tokens_seed"], about["tokens_branch"]) == (1920 + 13 * 288, 1920, 3744)
    assert sorted(load_model(model).experts) == sorted(TRAINING if kind == "demix" else ["dense"])


def test_a_stopped_one_resumes_to_the_bit(
    seed: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train_into(tmp_path / "whole", "demix", tokens, seed)
    stops = {7, 10}
    stop_at(monkeypatch, stops)
    for _ in range(2):
        with pytest.raises(StoppedError):
            train_into(tmp_path / "again", "demix", tokens, seed)
    again = train_into(tmp_path / "again", "demix", tokens, seed)
    assert not stops
    for path in whole.rglob("*.safetensors"):
        assert path.read_bytes() == (again / path.relative_to(whole)).read_bytes()


def test_its_checkpoints_are_not_those_of_a_branch_that_continues(seed: Path, tokens: Path) -> None:
    shards = shard_paths(tokens)
    identities = [
        ModelTraining("demix", TRAIN, shards, branch=seed, schedule=schedule).identity
        for schedule in ("continue", "restart")
    ]
    assert "schedule" not in identities[0]["parent"], "fingerprints of runs without the key stay"
    assert identities[1]["parent"] == identities[0]["parent"] | {"schedule": "restart"}


def test_what_cannot_restart_is_refused(seed: Path, tokens: Path, tmp_path: Path) -> None:
    with pytest.raises(DemixError, match=r"has seen 1920 tokens, and this training ends after 1920; raise tokens"):
        train_into(tmp_path, "demix", tokens, seed, dataclasses.replace(OWN, tokens=1920))
    other = dataclasses.replace(OWN, architecture=OWN.architecture | {"layers": 1})
    with pytest.raises(DemixError, match="is of a training with architecture"):
        train_into(tmp_path, "demix", tokens, seed, other)
    command = [*train_command("demix", tokens, tmp_path)[3:], "--branch", str(seed)]
    assert "--schedule again: is not known; use continue or restart" in str(said([*command, "--schedule", "again"]))
    command[-1] = str(seed.parents[2] / "model")
    assert "is a model, with which a training of its own begins" in str(said([*command, "--schedule", "restart"]))
    assert not (tmp_path / "model").exists()


def rules(**rows: Any) -> RunRules:
    config = copy.deepcopy(CONFIG) | {"models": rows}
    return RunRules(completed_run(config))


def row(one: RunRules, name: str) -> Model:
    return next(model for model in one.run.planned if model.name == name)


def test_a_row_that_restarts_has_its_parents_settings_and_its_own() -> None:
    # The parent's steps are 384 tokens, those of `small` 192.
    small = ROW | {"kind": "dense_unbalanced", "sequences": 2, "learning_rate": 1e-4}
    sweep = {"learning_rates": [1e-3, 0.5], "tokens": 7680}
    one = rules(dense={"sweep": sweep}, half=ROW | {"kind": "demix"}, small=small)
    state = "results/tiny/seeds/dense/step-00000015"
    ends = f" --branch {state} --schedule restart"
    assert one.beginning(row(one, "half")) == f" --learning-rate-from results/tiny/sweep/dense.json{ends}"
    assert one.beginning(row(one, "small")) == ends, "a rate of its own is not the sweep's"
    assert list(one.run.seeds) == [("dense", 15)]
    assert [row(one, name).settings.warmup for name in ("half", "small", "demix")] == [0, 0, 0.08]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "demix", "schedule": "restart"}, r"x\.schedule: is given to a row that begins with no state"),
        ({"kind": "demix", "schedule": "restart", "parent": "a/b"}, r"x\.schedule: is given to a row that begins"),
        (ROW | {"kind": "demix", "seed_tokens": 0}, r"x\.schedule: is given to a row whose seed_tokens are 0"),
        (ROW | {"kind": "domain_token"}, r"x\.parent: is given to a row of kind domain_token"),
        (ROW | {"kind": "dense", "schedule": "continue"}, r"x\.parent: .* kind dense; use kind: demix, add schedule"),
        (ROW | {"kind": "demix", "sweep": {"learning_rates": [1], "tokens": 768}}, r"x\.sweep: .* give the row a lear"),
        (ROW | {"kind": "demix", "tokens": 6143}, r"x\.tokens: is 6143, which leaves no update after the 5760 tokens"),
        (ROW | {"kind": "demix", "seed_tokens": 383, "sequences": 1}, r"x\.seed_tokens: is 383, less than the 384 tok"),
    ],
)
def test_rows_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(DemixError, match=message):
        rules(x=given)


def test_a_branch_of_a_branch_is_refused() -> None:
    with pytest.raises(
        DemixError, match=r"models\.x\.parent: is y, which begins with the state of another row itself; us"
    ):
        rules(y=ROW | {"kind": "dense"}, x={"kind": "demix", "parent": "y", "seed_tokens": 6000})
