"""Rows of models whose tokens choose their experts: configs, training, upcycling, files, costs."""

import copy
import dataclasses
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from demix.config.architecture import Architecture, architecture_from
from demix.config.counts import parameters, training_flops_per_token
from demix.errors import DemixError, StoppedError
from demix.files import read_json_lines
from demix.launch.job import Places
from demix.model.checkpoint import describe, load_model
from demix.model.experts import add_expert, read_experts
from demix.model.export import export_hf
from demix.model.gpt import GPT
from demix.model.merge import merge_experts
from demix.model.scoring import log_probabilities
from demix.plan.cost import plan_training, training_tables
from demix.plan.flops import HARDWARE, scoring_flops
from demix.report.families import families, one_clusters
from demix.report.material import Material
from demix.run.check import completed_run
from demix.run.models import Model
from demix.run.rules import RunRules
from demix.run.run import Run
from demix.run.systems import evaluated
from demix.train.adapt import adapt_expert
from demix.train.batches import Batches, mixed_batches
from demix.train.branch import upcycled
from demix.train.loop import train
from demix.train.stage import optimization
from demix.train.state import State
from support.plain_training import adamw, plain_steps, rates
from support.report import table_of
from support.tokens import TRAINING
from support.training import ADAPT, SIZES, TRAIN, opened, shard_paths, stop_at, train_model

TINY = yaml.safe_load((Path(__file__).parents[1] / "workflow" / "tiny.yaml").read_text())
SWITCH = {"kind": "routed", "experts": 4}
UPCYCLED = {"kind": "routed", "experts": 4, "top_k": 2, "every": 2, "parent": "dense", "seed_tokens": 6000}
CONTINUED = UPCYCLED | {"schedule": "continue", "match": "updates"}
ROUTED = {"experts": 4, "top_k": 2, "every": 2, "capacity": 4.0, "balance": 0.1}
ARCHITECTURE = Architecture(**SIZES, routed=ROUTED)
RECIPE = dataclasses.replace(TRAIN, architecture=SIZES | {"routed": ROUTED})


def tiny(**rows: Any) -> Run:
    return completed_run(copy.deepcopy(TINY) | {"models": rows})


def row_of(config: Run, name: str) -> Model:
    return next(model for model in config.trained if model.name == name)


def test_a_row_trains_one_column_for_the_flops_of_a_dense_model() -> None:
    config = tiny(switch=SWITCH, upcycled=UPCYCLED, same=SWITCH | {"match": "updates"})
    switch, up, same = (row_of(config, name) for name in ("switch", "upcycled", "same"))
    assert switch.experts == switch.columns == ("dense",)
    tables = [table for table in evaluated(config, "parliament") if table.model in ("switch", "upcycled")]
    assert [(table.columns, table.sets) for table in tables] == [(("dense",), ())] * 2
    layers, width, context, tokens = 2, 32, 32, config.config.training.tokens
    types = config.types
    dense = 96 * layers * width**2 * (1 + context / 6 / width + types / 16 / layers / width)
    assert same.settings.tokens == tokens
    assert switch.settings.tokens == int(tokens * dense / (dense + 4 * 2 * 2 * width * 4))
    more = 4 * 1 * (16 * width**2 + 2 * width * 4)
    assert up.settings.tokens == 6000 + int((tokens - 6000) * dense / (dense + more))
    assert up.restarts
    assert up.settings.warmup == 0
    rules = RunRules(config)
    given = json.loads(rules.training_settings(switch))["architecture"]
    assert given == TINY["architecture"] | {
        "routed": {"experts": 4, "top_k": 1, "every": 1, "capacity": 1.25, "balance": 0.01}
    }
    assert json.loads(rules.training_settings(up))["architecture"]["routed"]["capacity"] == 2.0
    assert "routed" not in rules.training_settings(row_of(config, "dense"))
    assert rules.beginning(up).endswith("--schedule restart")


def test_an_upcycled_row_may_go_on_with_its_parents_schedule() -> None:
    config = tiny(upcycled=UPCYCLED, continued=CONTINUED)
    up, continued, dense = (row_of(config, name) for name in ("upcycled", "continued", "dense"))
    assert (up.restarts, continued.restarts) == (True, False)
    for key in ("tokens", "warmup", "learning_rate", "sequences"):
        assert getattr(continued.settings, key) == getattr(dense.settings, key)
    rules = RunRules(config)
    assert rules.beginning(continued) == rules.beginning(up).removesuffix(" --schedule restart")
    plans = {plan.name: plan for plan in plan_training(config, None, HARDWARE["cpu"])}
    assert plans["continued"].steps == plans["dense"].steps > plans["upcycled"].steps


REFUSED = {
    "experts: is 0; allowed": {"experts": 0},
    "top_k: is 9, and a layer has 8 experts; lower it": {"top_k": 9},
    "every: is 3, and the model has 2 layers; use 1 to 2": {"every": 3},
    "capacity: is 0; allowed": {"capacity": 0},
    "capacity: is 0.1, which leaves an expert no token": {"capacity": 0.1},
    "data: is given to a row of kind routed": {"data": "k2"},
    "averages: is given to a row of kind routed": {"averages": True},
    "top_k: is 1, and a parent's feedforward": {"parent": "dense", "seed_tokens": 6000},
    "schedule: is continue, and with match flops training ends before": UPCYCLED | {"schedule": "continue"},
    "tokens: is 9000 where its parent dense has": CONTINUED | {"tokens": 9000},
    "top_k: is given to a row of kind demix; use kind: routed": {"kind": "demix", "top_k": 2},
}


@pytest.mark.parametrize("told", REFUSED)
def test_rows_that_cannot_be_are_refused_in_one_line(told: str) -> None:
    with pytest.raises(DemixError) as refused:
        tiny(x={"kind": "routed"} | REFUSED[told])
    assert str(refused.value).startswith(f"config key models.x.{told}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("section", "key"), [("adaptation", "model"), ("adaptation", "dense"), ("removal", "model")])
def test_neither_adaptation_nor_removal_takes_a_routed_row(section: str, key: str) -> None:
    content = copy.deepcopy(TINY) | {"models": {"x": SWITCH}}
    content[section] = content.get(section, {}) | {key: "x"}
    with pytest.raises(DemixError, match=f"config key {section}.{key}"):
        completed_run(content)


def test_training_is_the_obvious_loop_in_any_micro_batches(tokens: Path, tmp_path: Path) -> None:
    drawn = mixed_batches(opened(tokens), TRAINING, 2, 32, seed=1)
    tight = Architecture(**SIZES, routed=ROUTED | {"capacity": 1.0})
    about = dataclasses.replace(optimization(RECIPE, 4, 3e-3), precision="fp64")
    model = GPT(tight, 400, ("dense",)).initialise(1).double()
    told = []
    for step in plain_steps(model, adamw(model), drawn, dict(enumerate(rates(4, 3e-3, RECIPE.warmup)))):
        (counts,) = [each.counts.tolist() for each in step.routers]
        told.append((step.loss, step.norm, counts[1] / 192, counts[3] / 384, counts[5] / 384))
    assert sum(row[3] for row in told) > 0, "some choices are dropped"
    for micro, checkpointing in itertools.product((None, 4), (False, True)):
        again = dataclasses.replace(about, micro_sequences=micro, checkpoint_activations=checkpointing)
        ours = GPT(tight, 400, ("dense",)).initialise(1)
        rows = train(ours, drawn, TRAINING, again, tmp_path / f"{micro}{checkpointing}")
        keys = ("loss", "gradient_norm", "router_entropy", "router_dropped", "router_load/1")
        found = [tuple(row[key] for key in keys) for row in rows]
        np.testing.assert_allclose(found, told, rtol=1e-9)
        for name, parameter in ours.named_parameters():
            torch.testing.assert_close(parameter, model.get_parameter(name), rtol=0, atol=1e-9)


@pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler: apt-get install g++, or conda install gxx"
)
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_compiled_training_tells_the_same_losses(tokens: Path, tmp_path: Path) -> None:
    drawn = mixed_batches(opened(tokens), TRAINING, 2, 32, seed=1)
    tight = Architecture(**SIZES, routed=ROUTED | {"capacity": 1.0, "every": 1})
    told = []
    for compiled in (False, True):
        about = dataclasses.replace(optimization(RECIPE, 4, 3e-3), compile=compiled, dropout=0.1)
        model = GPT(tight, 400, ("dense",)).initialise(1)
        # Other tests of this process have compiled blocks of other sizes.
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        # Both layers, and steps whose experts take other numbers of tokens, share one compiled block.
        with torch._dynamo.config.patch(error_on_recompile=True):
            rows = train(model, drawn, TRAINING, about, tmp_path / str(compiled))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
        assert len({row["router_dropped"] for row in rows}) > 1
        keys = ("loss", "gradient_norm", "router_balance", "router_dropped", "router_load/1")
        told.append([[row[key] for key in keys] for row in rows])
    np.testing.assert_allclose(told[1], told[0], rtol=1e-5)


def test_a_stopped_training_goes_on_to_the_bit(tokens: Path, tmp_path: Path) -> None:
    drawn = mixed_batches(opened(tokens), TRAINING, 2, 32, seed=1)
    about = dataclasses.replace(optimization(RECIPE, 9, 3e-3), checkpoint_every=4)

    def stops(step: int) -> Any:
        if step == 6:
            raise KeyboardInterrupt
        return drawn.draw(step)

    models = [GPT(ARCHITECTURE, 400, ("dense",)).initialise(1) for _ in range(3)]
    whole = train(models[0], drawn, TRAINING, about, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(models[1], Batches(stops, drawn.tokens), TRAINING, about, tmp_path / "part")
    parts = train(models[2], drawn, TRAINING, about, tmp_path / "part")
    assert [row | {"tokens_per_second": 0} for row in parts] == [row | {"tokens_per_second": 0} for row in whole]
    for name, parameter in models[2].named_parameters():
        assert torch.equal(parameter, models[0].get_parameter(name)), name


def test_an_upcycled_model_is_the_dense_one_before_its_first_step() -> None:
    dense = GPT(ARCHITECTURE.unrouted, 400, ("dense",)).initialise(3)
    shared, own = dense.parted({f"parameter/{name}": p.detach() for name, p in dense.named_parameters()})
    model = GPT(ARCHITECTURE, 400, ("dense",)).initialise(1)
    router = model.blocks[1].feedforward.router.detach().clone()
    state = upcycled(State(5, shared, own, []), model)
    tensors = model.stacked(state.shared, state.experts)
    model.load_state_dict({name.removeprefix("parameter/"): tensor for name, tensor in tensors.items()})
    assert torch.equal(model.blocks[1].feedforward.router, router)
    inputs = np.random.default_rng(1).integers(400, size=(3, 32))
    mask = np.ones_like(inputs, bool)
    before, after = (log_probabilities(one.double(), inputs, inputs[:, ::-1].copy(), mask) for one in (dense, model))
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-6)
    for expert in range(4):
        assert torch.equal(model.blocks[1].feedforward.up[0, expert], dense.blocks[1].feedforward.up[0])


def test_an_experts_moments_are_shares_of_the_dense_ones() -> None:
    """The first is an E-th, the second a k·E-th; what is no expert's is as it was, and the router has none."""
    dense = GPT(ARCHITECTURE.unrouted, 400, ("dense",)).initialise(3)
    parameters = dict(dense.named_parameters())
    tensors = {f"parameter/{name}": p.detach() for name, p in parameters.items()}
    tensors |= {f"optimizer/{key}/{name}": torch.rand(p.shape) for name, p in parameters.items()
                for key in ("exp_avg", "exp_avg_sq")}  # fmt: skip
    shared, own = dense.parted(tensors)
    model = GPT(ARCHITECTURE, 400, ("dense",)).initialise(1)
    found = upcycled(State(5, shared, own, [{"step": 5}]), model)
    assert (found.step, found.shared, found.metrics) == (5, shared, [{"step": 5}])
    state = model.stacked(found.shared, found.experts)
    assert not [name for name in state if name.startswith("optimizer") and "router" in name]
    for name in parameters:
        for key, share in (("exp_avg", 4), ("exp_avg_sq", 8)):
            wanted = tensors[f"optimizer/{key}/{name}"]
            if name.startswith("blocks.1.feedforward."):
                wanted = torch.stack([wanted[0] / share] * 4)[None]
            torch.testing.assert_close(state[f"optimizer/{key}/{name}"], wanted)


def test_the_gradients_of_experts_add_up_to_the_dense_one(tokens: Path) -> None:
    """Of the loss alone, where no choice is dropped: the gates of a token sum to 1."""
    batch = mixed_batches(opened(tokens), TRAINING, 2, 32, seed=1).draw(0)
    dense = GPT(ARCHITECTURE.unrouted, 400, ("dense",)).initialise(3)
    model = GPT(ARCHITECTURE, 400, ("dense",)).initialise(1)
    shared, own = dense.parted({f"parameter/{name}": p.detach() for name, p in dense.named_parameters()})
    state = upcycled(State(0, shared, own, []), model)
    tensors = model.stacked(state.shared, state.experts)
    model.load_state_dict({name.removeprefix("parameter/"): tensor for name, tensor in tensors.items()})
    for one in (dense.double(), model.double()):
        logits = one.logits(one(batch.inputs))
        torch.nn.functional.cross_entropy(logits.flatten(0, 2), batch.targets.flatten()).backward()
    for name in ("up", "up_bias", "down", "down_bias"):
        whole, parts = (getattr(one.blocks[1].feedforward, name).grad for one in (dense, model))
        torch.testing.assert_close(parts.sum(1), whole)


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, its state after ten steps, and the routed model that begins with it."""
    folder = tmp_path_factory.mktemp("run")
    paths, kept = shard_paths(tokens), folder / "checkpoints" / "dense"
    train_model("dense", TRAIN, paths, folder / "models/dense", folder / "metrics/dense.jsonl", kept)
    seed = folder / "seeds" / "dense" / "step-00000010"
    train_model("dense", TRAIN, paths, seed, None, folder / "checkpoints" / "seed", until=10)
    recipe = dataclasses.replace(RECIPE, warmup=0.0)
    train_model(
        "routed", recipe, paths, folder / "models/up", folder / "metrics/up.jsonl", folder / "checkpoints/up",
        branch=seed, schedule="restart",
    )  # fmt: skip
    return folder


def test_upcycling_begins_with_the_next_loss_of_its_parent(run: Path) -> None:
    dense, up = (read_json_lines(run / "metrics" / f"{name}.jsonl") for name in ("dense", "up"))
    rows = [row for row in up if "loss" in row]
    assert up[0] == {"step": 10, "tokens": 1920, "branched_from": "dense"}
    assert [row["step"] for row in rows] == list(range(11, 25))
    assert rows[0]["loss"] == pytest.approx(dense[10]["loss"], rel=1e-5)
    assert rows[0]["learning_rate"] == TRAIN.learning_rate
    assert rows[0]["router_dropped"] == 0, "a capacity of all tokens"
    assert sum(rows[-1][f"router_load/{expert}"] for expert in range(4)) == pytest.approx(1)
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_a_continued_model_is_the_obvious_one(run: Path, tokens: Path, tmp_path: Path) -> None:
    """Against a plain loop, from the dense model's own files after ten steps."""
    folder = run / "seeds" / "dense" / "step-00000010"
    places = tmp_path / "model", tmp_path / "on.jsonl", tmp_path / "checkpoints"
    train_model("routed", RECIPE, shard_paths(tokens), *places, branch=folder)
    saved = load_file(folder / "shared.safetensors") | load_file(folder / "expert-dense.safetensors")
    model = GPT(ARCHITECTURE, 400, ("dense",)).initialise(1)
    optimizer = adamw(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router" in name:
                continue
            shares = (4, 8) if name.startswith("blocks.1.feedforward.") else (1, 1)
            parameter.copy_(saved[f"parameter/{name}"])
            moments = {
                key: (saved[f"optimizer/{key}/{name}"] / share).expand(parameter.shape).clone()
                for key, share in zip(("exp_avg", "exp_avg_sq"), shares, strict=True)
            }
            optimizer.state[parameter] = {"step": torch.tensor(10.0)} | moments
    drawn = mixed_batches(opened(tokens), TRAINING, 2, 32, seed=1)
    rows, dense = (read_json_lines(path) for path in (tmp_path / "on.jsonl", run / "metrics" / "dense.jsonl"))
    rows, dense = [row for row in rows if "loss" in row], [row for row in dense if "loss" in row]
    assert [row["learning_rate"] for row in rows] == [row["learning_rate"] for row in dense[10:]]
    of_steps = dict(list(enumerate(rates(24, TRAIN.learning_rate, TRAIN.warmup)))[10:])
    for row, step in zip(rows, plain_steps(model, optimizer, drawn, of_steps), strict=True):
        assert row["loss"] == pytest.approx(step.loss, rel=1e-5)
    trained = load_model(tmp_path / "model")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained.get_parameter(name), parameter, rtol=0, atol=2e-5)


def test_a_continued_model_goes_on_to_the_bit(
    run: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the router has moments, and after."""

    def into(name: str) -> bytes:
        train_model(
            "routed", RECIPE, shard_paths(tokens), tmp_path / name, None, tmp_path / "checkpoints" / name,
            branch=run / "seeds" / "dense" / "step-00000010",
        )  # fmt: skip
        return (tmp_path / name / "experts" / "dense.safetensors").read_bytes()

    whole, stops = into("whole"), {10, 13}
    stop_at(monkeypatch, stops)
    for _ in range(2):
        with pytest.raises(StoppedError):
            into("again")
    assert into("again") == whole
    assert not stops
    about = describe(tmp_path / "again")
    assert (about["parent"]["step"], about["tokens_branch"], "schedule" in about["parent"]) == (10, 14 * 192, False)


def test_a_routed_model_is_one_expert_in_its_files(run: Path, tokens: Path) -> None:
    directory = run / "models" / "up"
    about = describe(directory)
    assert about["kind"] == "routed"
    assert about["architecture"] == SIZES | {"routed": ROUTED}
    assert about["parent"]["schedule"] == "restart"
    assert (about["shared_parameters"], about["expert_parameters"]) == parameters(ARCHITECTURE, 400)
    assert "routed" not in describe(run / "models" / "dense")["architecture"]
    (expert,) = read_experts(directory)
    assert (expert.name, expert.fault, expert.parameters) == ("dense", None, about["expert_parameters"])
    model = load_model(directory)
    inputs = np.random.default_rng(1).integers(400, size=(2, 32))
    mask = np.ones_like(inputs, bool)
    scored = log_probabilities(model, inputs, inputs, mask)
    alone = [log_probabilities(model, inputs[n : n + 1, :t], inputs[n : n + 1, :t], mask[n : n + 1, :t])
             for n, t in ((0, 32), (1, 9))]  # fmt: skip
    np.testing.assert_allclose(alone[0], scored[:, :32], atol=1e-5)
    np.testing.assert_allclose(alone[1], scored[:, 32:41], atol=1e-5)


def test_what_needs_experts_of_domains_refuses_a_routed_model(run: Path, tokens: Path, tmp_path: Path) -> None:
    up, paths = run / "models" / "up", shard_paths(tokens)
    told = "is a model whose tokens choose their experts, which "
    with pytest.raises(DemixError, match=r"has routed\.every 2, which Mixtral.s format cannot hold"):
        export_hf(up, "dense", None, tmp_path / "exported")
    with pytest.raises(DemixError, match=told + "have no average"):
        merge_experts(up, {"dense": 1.0}, tmp_path / "merged")
    with pytest.raises(DemixError, match="is no model that was merged of experts among which its tokens choose"):
        add_expert(up, up / "experts" / "dense.safetensors", "law")
    with pytest.raises(DemixError, match=told + "no expert of a domain can join"):
        adapt_expert(up, (paths[0], paths[0]), {}, {}, ADAPT, Places(up, tmp_path / "m", tmp_path / "c"))
    seed = run / "seeds" / "dense" / "step-00000010"
    places = tmp_path / "model", None, tmp_path / "checkpoints"
    shorter = dataclasses.replace(RECIPE, tokens=RECIPE.tokens // 2)
    with pytest.raises(DemixError, match="step-00000010: is of a training with tokens 4608, and this one has 2304"):
        train_model("routed", shorter, paths, *places, branch=seed)
    for kind, recipe, cause in (("routed", TRAIN, "lacks routed"), ("dense", RECIPE, "has routed")):
        with pytest.raises(DemixError, match=f"architecture: {cause}, and the kind of the model is {kind}"):
            train_model(kind, recipe, paths, *places)
    assert not (tmp_path / "model").exists()


def test_a_folder_of_a_dense_model_is_a_parent_too(run: Path, tokens: Path, tmp_path: Path) -> None:
    train_model(
        "routed", dataclasses.replace(RECIPE, tokens=192), shard_paths(tokens), tmp_path / "model", None,
        tmp_path / "checkpoints", branch=run / "models" / "dense",
    )  # fmt: skip
    assert describe(tmp_path / "model")["parent"]["model"] == "dense"


def test_costs_of_the_papers_upcycled_model() -> None:
    """c-BTM, section 6: 24×2048, twelve routed layers, top-2 of 32, 27% more FLOPs."""
    dense = architecture_from({"preset": "gpt3-xl", "context": 2048})
    routed = dataclasses.replace(dense, routed=ROUTED | {"experts": 32})
    whole, more = (training_flops_per_token(one, 50272, 2048) for one in (dense, routed))
    assert more / whole == pytest.approx(1.27, abs=0.005)
    assert more - whole == 4 * 12 * (16 * 2048**2 + 2 * 2048 * 32)
    assert scoring_flops(routed, 50272, 1) - scoring_flops(dense, 50272, 1) == (more - whole) / 4


def test_the_plan_tells_what_routed_rows_cost() -> None:
    config = tiny(switch=SWITCH | {"label": "switch"}, upcycled=UPCYCLED | {"label": "upcycled"})
    plans = {plan.name: plan for plan in plan_training(config, None, HARDWARE["cpu"])}
    dense, switch, up = (plans[name] for name in ("dense", "switch", "upcycled"))
    assert switch.all_flops <= dense.all_flops < switch.all_flops + switch.flops
    assert up.all_flops <= dense.all_flops < up.all_flops + up.flops
    assert up.steps < switch.steps <= dense.steps
    architecture = architecture_from(TINY["architecture"] | {"routed": ROUTED | {"every": 1}})
    assert (switch.shared, switch.expert) == parameters(architecture, config.types)
    assert switch.state - dense.state == 16 * (switch.expert - dense.expert)
    assert plans["upcycled"].activations > dense.activations == plans["switch"].activations
    assert "16h²(k - 1)" in training_tables(config, None, "cpu")[0].caption
    assert "16h²(k - 1)" not in training_tables(tiny(), None, "cpu")[0].caption


def test_the_table_of_costs_counts_chosen_experts_and_the_seed_of_a_dense_model() -> None:
    config = tiny(switch=SWITCH | {"label": "switch"}, upcycled=UPCYCLED | {"label": "upcycled"})
    frame = table_of("family_costs", Material(config)).frame
    switch, up = (architecture_from(TINY["architecture"] | {"routed": ROUTED | one})
                  for one in ({"top_k": 1, "every": 1}, {}))  # fmt: skip
    types, step, dense = config.types, row_of(config, "dense").step_tokens, "Dense (Balanced)"
    seed, updates = (
        6000 // step,
        {name: row_of(config, name).settings.tokens // step for name in ("switch", "upcycled")},
    )
    by_token = [training_flops_per_token(one, types, 32) for one in (switch, up, up.unrouted)]
    whole = [sum(parameters(one, types)) for one in (switch, up, up.unrouted)]
    assert frame.at["switch", "Parameters"] == whole[0]
    assert frame.at["switch", "Parameters a token, all"] == whole[2] + 2 * 4 * 32, "one expert and the routers"
    assert frame.at["upcycled", "Parameters a token, all"] == whole[2] + 8 * 32**2 + 5 * 32 + 4 * 32
    assert frame["Updates"][["switch", "upcycled"]].tolist() == list(updates.values())
    assert frame.at["switch", "FLOPs of training"] == pytest.approx(by_token[0] * updates["switch"] * step)
    rest = updates["upcycled"] - seed
    assert frame.at["upcycled", "FLOPs of training"] == pytest.approx(step * (by_token[1] * rest + by_token[2] * seed))
    assert frame.at["upcycled", "FLOPs of training"] < frame.at[dense, "FLOPs of training"]
    assert frame.at["upcycled", "Bytes synchronised"] == 4 * (whole[1] * rest + whole[2] * seed)
    more = frame.at["upcycled", "FLOPs a token, all"] - frame.at[dense, "FLOPs a token, all"]
    assert more == 16 * 32**2 + 2 * 32 * 4
    known = families(config)
    assert [known[name].name for name in ("switch", "upcycled")] == ["Token-routed"] * 2
    assert [known[name].chosen for name in ("switch", "dense")] == ["4, top-1", "1"]
    assert [system.model for system in one_clusters(config).values()] == ["dense"]
