"""Trainings that begin with a state or the parameters of a dense model, and what a config may say of them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from demix.files import digest, read_json, write_json
from demix.model.directory import describe, expert_lineage, load_model
from demix.model.manifest import tokens_learned
from demix.model.merge import merge_experts
from demix.run.rules import RunRules
from demix.train.branch import branched
from demix.train.state import State
from support.cli import demix, succeeds
from support.entries import tiny, trained
from support.errors import refused
from support.tokens import TRAINING
from support.training import (
    TRAIN,
    balanced_batches,
    dense_with_seeds,
    opened,
    rows,
    shard_paths,
    tensors,
    train_into,
    updates,
)

# A step of TRAIN is 192 tokens, and there are 24.
STEPS = 24


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model with its states after 10 and after all steps as seeds, and DEMix from scratch."""
    folder = tmp_path_factory.mktemp("run")
    dense_with_seeds(folder, shard_paths(tokens), [10, STEPS])
    assert not list((folder / "checkpoints").iterdir()), "what was kept is moved"
    train_into(folder / "demix", "demix", shard_paths(tokens))
    return folder


def seed(folder: Path, step: int = 10) -> Path:
    return folder / "seeds" / "dense" / f"step-{step:08d}"


@pytest.fixture(scope="module")
def half(run: Path, tokens: Path) -> Path:
    """A model of experts that goes on from the dense one after ten steps."""
    return train_into(run / "half", "demix", shard_paths(tokens), branch=seed(run))


def test_a_seed_of_all_tokens_is_the_dense_model_in_every_expert(run: Path, tokens: Path) -> None:
    every = train_into(run / "all", "demix", shard_paths(tokens), branch=seed(run, STEPS))
    dense = tensors(run)
    assert tensors(every) == {"shared.safetensors": dense["shared.safetensors"]} | {
        f"experts/{name}.safetensors": dense["experts/dense.safetensors"] for name in TRAINING
    }
    assert [row["branched_from"] for row in rows(every)] == ["dense"]


def test_a_dense_training_goes_on_from_its_own_state_to_the_bit(run: Path, tokens: Path, tmp_path: Path) -> None:
    again = train_into(tmp_path, "dense", shard_paths(tokens), branch=seed(run))
    assert tensors(again) == tensors(run)
    assert updates(again) == updates(run)[10:]


def test_moments_of_experts_are_an_eth_of_the_dense_ones() -> None:
    moments = {f"optimizer/{key}/up": torch.full((2,), 8.0) for key in ("exp_avg", "exp_avg_sq", "momentum")}
    shared = {"optimizer/exp_avg/x": torch.ones(1), "optimizer/step/up": torch.tensor(7.0)}
    dense = moments | {"parameter/up": torch.full((2,), 8.0)}
    state = branched(State(7, shared, {"dense": dense}, [{"step": 7}]), ("a", "b", "c", "d"))
    assert (state.step, state.shared, state.metrics) == (7, shared, [{"step": 7}])
    assert [*state.experts] == ["a", "b", "c", "d"]
    for own in state.experts.values():
        assert [own[name].tolist() for name in dense] == [[2.0, 2.0]] * 3 + [[8.0, 8.0]]


def test_its_record_says_where_it_comes_from(run: Path, half: Path, tmp_path: Path) -> None:
    description, manifest = describe(half / "model").content, read_json(seed(run) / "manifest.json")
    sha256 = digest(manifest["sha256"])
    assert description["parent"] == {"model": "dense", "step": 10, "tokens": 1920, "state_sha256": sha256}
    assert (description["tokens"], description["tokens_seed"]) == (4608, 1920)
    for name in TRAINING:
        lineage = expert_lineage(half / "model", name).content
        assert (lineage["parent"], lineage["tokens"], lineage["steps"]) == ("dense", 1920 + 2688 // 3, STEPS)
        assert lineage["seeds"] == {sha256: 1920}
        assert lineage["data_sha256"] == manifest["data_sha256"], "the seed has read all domains"
    merge_experts(half / "model", dict.fromkeys(TRAINING, 1 / 3), tmp_path / "merged")
    assert expert_lineage(tmp_path / "merged", "dense").tokens == 4608
    assert describe(run / "demix" / "model").content.get("parent") is None
    assert "seeds" not in expert_lineage(run / "demix" / "model", TRAINING[0]).content


@pytest.mark.parametrize("keep", [(), (10,)], ids=["not kept", "damaged"])
def test_a_state_that_cannot_be_moved_is_trained_again(
    keep: Sequence[int], run: Path, tokens: Path, tmp_path: Path
) -> None:
    train_into(tmp_path, "dense", shard_paths(tokens), keep=keep)
    for kept in tmp_path.glob("checkpoints/*/step-00000010/shared.safetensors"):
        kept.write_bytes(kept.read_bytes()[:-1] + b"x")

    def command(step: int) -> list[object]:
        settings, places = json.dumps(TRAIN.as_dict()), ["--kept", tmp_path / "checkpoints"]
        places += ["--output", seed(tmp_path, step), "--checkpoints", tmp_path / "again"]
        return ["seed", "dense", *shard_paths(tokens), "--settings", settings, "--step", step, *places]

    before = tensors(tmp_path)
    succeeds(*command(10))
    for name in ("manifest.json", "shared.safetensors", "expert-dense.safetensors"):
        assert (seed(tmp_path) / name).read_bytes() == (seed(run) / name).read_bytes()
    assert tensors(tmp_path) == before
    assert not list((tmp_path / "again").rglob("step-*"))
    with refused("--step 99"):
        raise demix(*command(99)).exception


def test_seeds_that_do_not_fit_are_refused(run: Path, tokens: Path, tmp_path: Path) -> None:
    def begin(branch: Path, **changes: Any) -> None:
        train_into(tmp_path, "demix", shard_paths(tokens), TRAIN.replace(**changes), branch=branch)

    for key, value in (("learning_rate", 1e-3), ("tokens", 9600), ("sequences", 4), ("warmup", 0.2), ("seed", 2)):
        with refused("seeds/dense/step-00000010"):
            begin(seed(run), **{key: value})
    damaged = shutil.copytree(seed(run), seed(tmp_path))
    (damaged / "expert-dense.safetensors").write_bytes(b"x" * 99)
    with refused("step-00000010/expert-dense.safetensors"):
        begin(damaged)
    write_json(damaged / "manifest.json", {"step": -1})
    with refused("step-00000010/manifest.json"):
        begin(damaged)
    assert not (tmp_path / "model").exists()
    # What time and memory alone depend on, and how often dev is measured, may differ.
    begin(seed(run), checkpoint_every=3, micro_sequences=1)


def test_a_model_in_a_folder_gives_its_parameters_and_nothing_else(run: Path, tokens: Path, tmp_path: Path) -> None:
    """As `demix import` writes them: each rate, step and batch is that of a training from scratch."""
    folder = shutil.copytree(run / "model", tmp_path / "my model")
    mine = train_into(tmp_path / "mine", "demix", shard_paths(tokens), branch=folder)
    found, scratch = updates(mine), updates(run / "demix")
    for key in ("step", "tokens", "learning_rate"):
        assert [row[key] for row in found] == [row[key] for row in scratch]
    batch, dense = balanced_batches(opened(tokens), TRAINING, 2, 32, seed=1).draw(0), load_model(folder)
    inputs, targets = (tensor.flatten(0, 1)[None] for tensor in (batch.inputs, batch.targets))
    with torch.no_grad():
        loss = -dense.log_probabilities(dense(inputs), targets).mean()
    assert found[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert found[-1]["loss"] < scratch[-1]["loss"] - 0.1
    description = describe(mine / "model").content
    assert (description["parent"]["model"], description["parent"]["step"]) == ("my_model", 0)
    assert description["tokens_seed"] == 0
    assert tokens_learned(description) == 2 * 4608

    other = TRAIN.replace(architecture=TRAIN.architecture | {"activation": "gelu_new"})
    with refused("my model"):
        train_into(tmp_path / "other", "demix", shard_paths(tokens), other, branch=folder)
    write_json(folder / "model.json", {**describe(folder).content, "tokenizer_sha256": "f" * 64})
    with refused("my model/experts/dense.json"):
        train_into(tmp_path / "other", "demix", shard_paths(tokens), branch=folder)


# A step is 288 tokens. The seed's 1,920 tokens are 6 of these steps and a part of the next.
OWN = TRAIN.replace(tokens=192 * 31, sequences=3, learning_rate=1e-3, warmup=0.0, seed=3)


@pytest.mark.parametrize("kind", ["demix", "dense", "dense_unbalanced"])
def test_a_restart_has_settings_of_its_own(kind: str, run: Path, tokens: Path, tmp_path: Path) -> None:
    train_into(tmp_path, kind, shard_paths(tokens), OWN, branch=seed(run), restart=True)
    begun, *found = rows(tmp_path)
    assert (begun["step"], begun["tokens"], begun["branched_from"]) == (7, 1920, "dense")
    assert [row["step"] for row in found] == list(range(8, 21))
    assert [row["learning_rate"] for row in found] == pytest.approx([1e-3 * (13 - n) / 13 for n in range(13)])
    about = describe(tmp_path / "model").content
    assert (about["parent"]["schedule"], about["parent"]["step"], about["training"]["warmup"]) == ("restart", 10, 0.0)
    assert (about["tokens"], about["tokens_seed"]) == (1920 + 13 * 288, 1920)
    assert sorted(load_model(tmp_path / "model").experts) == sorted(TRAINING if kind == "demix" else ["dense"])


def test_a_restart_that_has_no_token_left_or_another_architecture_is_refused(
    run: Path, tokens: Path, tmp_path: Path
) -> None:
    for changes in ({"tokens": 1920}, {"architecture": OWN.architecture | {"layers": 1}}):
        with refused("step-00000010"):
            other = OWN.replace(**changes)
            train_into(tmp_path, "demix", shard_paths(tokens), other, branch=seed(run), restart=True)


RESTART = {"parent": "dense", "seed_tokens": 6000, "schedule": "restart"}


def test_a_model_that_restarts_has_its_parents_settings_and_its_own() -> None:
    # The parent's steps are 384 tokens, those of `small` 192.
    small = RESTART | {"kind": "dense_unbalanced", "sequences": 2, "learning_rate": 1e-4}
    sweep = {"learning_rates": [1e-3, 0.5], "tokens": 7680}
    run = tiny({"dense": {"sweep": sweep}, "half": RESTART | {"kind": "demix"}, "small": small})
    state = "results/tiny/seeds/dense/step-00000015"
    ends = f" --branch {state} --restart"
    assert RunRules(run).beginning(trained(run, "half")) == f" --learning-rate-from results/tiny/sweep/dense.json{ends}"
    assert RunRules(run).beginning(trained(run, "small")) == ends, "a rate of its own is not the sweep's"
    assert list(run.seeds) == [("dense", 15)]
    assert [trained(run, name).settings.warmup for name in ("half", "small", "demix")] == [0, 0, 0.08]
