"""Branch-Train-MiX: rows that train merged domain experts, all of them or their routers alone."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from demix.config.counts import parameters
from demix.errors import DemixError, StoppedError
from demix.files import read_json_lines
from demix.model.checkpoint import describe, load_model
from demix.model.merge_routed import merge_routed
from demix.plan.cost import plan_training
from demix.plan.flops import HARDWARE
from demix.plan.jobs import kept_bytes, plan_jobs
from demix.report.families import families
from demix.run.check import completed_run
from demix.run.rules import RunRules
from demix.run.run import Run
from demix.train.batches import mixed_batches
from support.plain_training import adamw, plain_steps, rates
from support.tokens import TRAINING
from support.training import SIZES, TRAIN, opened, shard_paths, stop_at, train_model

TINY = yaml.safe_load((Path(__file__).parents[1] / "workflow" / "tiny.yaml").read_text())
SEEDED = {"kind": "demix", "parent": "dense", "seed_tokens": 6000}
BTX = {"kind": "routed", "parent": "demix_seeded", "tokens": 6000}
ROUTED = {"experts": 3, "top_k": 2, "every": 1, "capacity": 2.0, "balance": 0.01}
RECIPE = dataclasses.replace(TRAIN, architecture=SIZES | {"routed": ROUTED}, tokens=192 * 6)
ROUTERS = dataclasses.replace(RECIPE, trained="routers")


def tiny(btx: dict[str, Any], **more: Any) -> Run:
    return completed_run(copy.deepcopy(TINY) | {"models": {"demix_seeded": SEEDED, "btx": BTX | btx}} | more)


def test_a_row_begins_with_the_merged_experts_of_its_seed() -> None:
    run = tiny({"trained": "routers"}, seeds=[1, 2])
    models, rules = {model.name: model for model in run.trained}, RunRules(run)
    assert [merged.place for merged in run.routed_merges] == ["demix_seeded-routed", "demix_seeded-seed2-routed"]
    assert not run.merged, "nothing asks for scores of what is not trained"
    for name, folder in (("btx", "demix_seeded-routed"), ("btx-seed2", "demix_seeded-seed2-routed")):
        model = models[name]
        assert rules.beginning(model) == f" --branch results/tiny/models/{folder}"
        assert rules.seed_of(model)[0] == f"results/tiny/models/{folder}/model.json"
        assert '"trained": "routers"' in rules.training_settings(model)
        assert (model.architecture.routed.experts, model.architecture.routed.top_k) == (3, 2)
    # Of all steps of a dense model of 6,000 tokens as many as take its FLOPs.
    dense, routed = (
        sum(plan.all_flops for plan in plan_training(tiny(changes), None, HARDWARE["cpu"]) if plan.name == name)
        for name, changes in (("dense", {}), ("btx", {}))
    )
    assert routed < dense * 6000 / TINY["training"]["tokens"]
    assert families(run)["btx"].begun == "merged"
    (routing,) = [jobs for jobs in plan_jobs(run, "cpu") if "merge_routed_demix_seeded" in jobs.rules]
    assert routing.rules["merge_routed_demix_seeded_seed2"] == 1


def test_a_row_begins_with_the_merged_experts_of_branches() -> None:
    alone = {"kind": "branched", "parent": "dense", "seed_tokens": 6000}
    btm = alone | {"merged_routed": True}
    run = completed_run(copy.deepcopy(TINY) | {"models": {"btm": btm, "btx": BTX | {"parent": "btm"}}})
    (model,) = [model for model in run.trained if model.mixes]
    assert RunRules(run).beginning(model) == " --branch results/tiny/models/btm-routed"
    assert [merged.place for merged in run.routed_merges] == ["btm-routed"]
    assert (model.architecture.routed.experts, model.architecture.routed.top_k) == (3, 2)
    plans = {plan.name: plan for plan in plan_training(run, None, HARDWARE["cpu"])}
    assert plans["btx"].all_flops < plans["dense"].all_flops * 6000 / TINY["training"]["tokens"]
    # The merged model and the one that is trained, each with a whole model's shared weights and three feedforwards.
    disks = [kept_bytes(one, "cpu") for one in (run, completed_run(copy.deepcopy(TINY) | {"models": {"btm": alone}}))]
    assert disks[0] - disks[1] > 2 * 4 * sum(parameters(model.architecture, run.types))
    for told, changes in {
        "seed_tokens: is given beside the parent btm of kind branched, whose whole training": {"seed_tokens": 6000},
        "experts: is 4, and its parent's merged experts have 3": {"experts": 4},
    }.items():
        with pytest.raises(DemixError, match=rf"^config key models\.btx\.{told}"):
            completed_run(copy.deepcopy(TINY) | {"models": {"btm": btm, "btx": BTX | {"parent": "btm"} | changes}})
    masked = {"kind": "demix", "architecture": {"attention": "bidirectional", "objective": "mlm"}}
    with pytest.raises(DemixError, match=r"^config key models\.btx\.parent: is a masked model"):
        completed_run(copy.deepcopy(TINY) | {"models": {"masked": masked, "btx": BTX | {"parent": "masked"}}})


REFUSED = {
    "seed_tokens: is given beside the parent demix_seeded of kind demix, whose whole training": {"seed_tokens": 6000},
    "schedule: is given to a row with a training of its own": {"schedule": "restart"},
    "experts: is 4, and its parent's merged experts have 3": {"experts": 4},
    "every: is 2, and its parent's merged experts have 1": {"every": 2},
    "top_k: is 1, and a parent's feedforward": {"top_k": 1},
    "architecture.position: is alibi where its parent demix_seeded has": {"architecture": {"position": "alibi"}},
    "parent: is nothing, which is no row of models": {"parent": "nothing", "seed_tokens": 6000},
    "trained: is given to a row that begins with no routed experts": {
        "parent": "dense", "seed_tokens": 6000, "top_k": 2, "trained": "routers",
    },
}  # fmt: skip


@pytest.mark.parametrize("told", REFUSED)
def test_rows_that_cannot_be_are_refused_in_one_line(told: str) -> None:
    with pytest.raises(DemixError) as refused:
        tiny(REFUSED[told])
    assert str(refused.value).startswith(f"config key models.btx.{told}")
    assert "\n" not in str(refused.value)


@pytest.fixture(scope="module")
def merged(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The merged experts of a DEMix model that was trained for a while."""
    folder = tmp_path_factory.mktemp("merged")
    train_model("demix", TRAIN, shard_paths(tokens), folder / "demix", None, folder / "checkpoints")
    dev = {domain: tokens / "tokens" / domain / "dev.arrow" for domain in TRAINING}
    merge_routed(folder / "demix", dev, folder / "demix-routed")
    return folder / "demix-routed"


@pytest.mark.parametrize("recipe", [RECIPE, ROUTERS], ids=["all", "routers"])
def test_training_is_the_obvious_loop_on_the_merged_model(
    recipe: Any, merged: Path, tokens: Path, tmp_path: Path
) -> None:
    places = tmp_path / "btx", tmp_path / "btx.jsonl", tmp_path / "checkpoints"
    train_model("routed", recipe, shard_paths(tokens), *places, branch=merged)
    model = load_model(merged)
    for block in model.blocks:
        block.feedforward.routed = dataclasses.replace(block.feedforward.routed, capacity=2.0, balance=0.01)
    begun = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(recipe is RECIPE or "router" in name)
    drawn = mixed_batches(opened(tokens), TRAINING, 2, 32, seed=1)
    of_steps = dict(enumerate(rates(6, TRAIN.learning_rate, TRAIN.warmup)))
    rows = [row for row in read_json_lines(tmp_path / "btx.jsonl") if "loss" in row]
    for row, step in zip(rows, plain_steps(model, adamw(model), drawn, of_steps), strict=True):
        assert row["loss"] == pytest.approx(step.loss, rel=1e-5)
    trained = load_model(tmp_path / "btx")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained.get_parameter(name), parameter.detach(), rtol=0, atol=2e-5)
        changed = not torch.equal(trained.get_parameter(name), begun[name])
        assert changed == (recipe is RECIPE or "router" in name), name
    assert describe(tmp_path / "btx")["parent"]["model"] == "demix-routed"
    assert describe(tmp_path / "btx")["parent"]["tokens"] == describe(merged)["tokens"] == TRAIN.tokens


def test_a_stopped_training_of_routers_goes_on_to_the_bit(
    merged: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def into(name: str) -> list[bytes]:
        places = tmp_path / name, None, tmp_path / "checkpoints" / name
        train_model("routed", ROUTERS, shard_paths(tokens), *places, branch=merged)
        return [(tmp_path / name / file).read_bytes() for file in ("shared.safetensors", "experts/dense.safetensors")]

    whole, stops = into("whole"), {1, 4}
    stop_at(monkeypatch, stops)
    for _ in range(2):
        with pytest.raises(StoppedError):
            into("again")
    assert into("again") == whole
    assert not stops


def test_other_experts_than_those_of_the_parent_are_refused(merged: Path, tokens: Path, tmp_path: Path) -> None:
    four = dataclasses.replace(RECIPE, architecture=SIZES | {"routed": ROUTED | {"experts": 4}})
    with pytest.raises(DemixError, match="has the architecture"):
        train_model("routed", four, shard_paths(tokens), None, None, tmp_path / "checkpoints", branch=merged)
    with pytest.raises(DemixError, match="this training begins with no experts"):
        train_model("routed", ROUTERS, shard_paths(tokens), None, None, tmp_path / "checkpoints")
