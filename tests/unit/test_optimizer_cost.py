"""What the plan counts for the optimizers: moments, Muon's work, and what ranks send with a sharded optimizer."""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from demix.config.architecture import PRESETS, Architecture
from demix.config.counts import matrices, orthogonalising_flops, sizes
from demix.config.training import Updates
from demix.model.gpt import GPT
from demix.plan.cost import TrainingPlan, plan_training
from demix.plan.flops import HARDWARE
from demix.plan.memory import sharded_moments
from demix.plan.muon import muon_cost
from demix.plan.network import Network, Ring, given, synchronizing
from demix.run.placement import place_experts
from demix.run.run import Run
from demix.train.schedule import Optimization
from demix.train.updates import Optimizers, group_of
from support.configs import small_run

SIZES = {"preset": "llama", "layers": 3, "width": 24, "heads": 2, "context": 8, "key_heads": 1, "inner": 40}
ROUTED = {"kind": "routed", "experts": 4, "top_k": 2, "every": 2, "capacity": 2.0, "balance": 0.01}
MODELS = {"btm": {"kind": "branched", "parent": "dense", "seed_tokens": 64}, "switch": ROUTED}
MUON = Updates(kind="muon")


@cache
def run_with(kind: str | None, ranks: int = 1, shard: bool = False) -> Run:
    optimizer: dict[str, Any] = {"shard_optimizer": shard} | ({"optimizer": {"kind": kind}} if kind else {})
    training = {"tokens": 16 * 8 * 10, "sequences": 4} | optimizer
    models = MODELS if ranks == 1 else {}
    return small_run(architecture=SIZES, training=training, models=models, adaptation={"tokens": 64} | optimizer)


@cache
def plans(kind: str | None, ranks: int = 1, shard: bool = False) -> dict[str, TrainingPlan]:
    found = plan_training(run_with(kind, ranks, shard), ranks, HARDWARE["cpu"])
    return {plan.name.partition("-")[0] + ("" if plan.stage == "train" else "-dapt"): plan for plan in found}


def architecture_of(name: str) -> Architecture:
    (found,) = {one.base.architecture for one in run_with(None).trained if one.name == name.removesuffix("-dapt")}
    return found


@dataclass(frozen=True)
class Group:
    """The ranks that have a parameter, seen from one; nothing is sent."""

    name: str
    of: int
    own: int

    def rank(self) -> int:
        return self.own

    def size(self) -> int:
        return self.of


@pytest.mark.parametrize("kind", [None, "adamw", "muon"])
@pytest.mark.parametrize("name", ["demix", "dense", "switch", "btm", "demix-dapt", "dense-dapt"])
def test_the_plans_state_is_that_of_the_optimizers_of_the_fullest_rank(name: str, kind: str | None) -> None:
    updates, scope = Updates(kind=kind) if kind else None, "model" if name == "btm" else "feedforward"
    for ranks, shard in ((1, False), (1, True), (2, True), (8, True)) if name in ("demix", "dense") else ((1, False),):
        plan = plans(kind, ranks, shard)[name]
        optimization = Optimization(steps=1, learning_rate=1.0, shard_optimizer=shard, optimizer=updates)
        states = []
        for rank, place in enumerate(place_experts("ab"[: plan.experts], plan.sequences // plan.experts, ranks)):
            with torch.device("meta"):
                model = GPT(
                    architecture_of(name), run_with(None).types, tuple("ab"[n] for n in place.experts), (), scope
                )
            groups = Group("all", ranks, rank), Group("own", len(place.ranks), place.ranks.index(rank))
            holders = (groups[0], groups[0] if len(place.ranks) == ranks else groups[1])
            trained = {key: p for key, p in model.named_parameters() if name != "demix-dapt" or model.owned(key)}

            def held(key: str, model: GPT = model, holders: tuple[Group, Group] = holders) -> Group | None:
                return holders[model.owned(key)] if holders[model.owned(key)].of > 1 else None

            of_rank = Optimizers(trained, optimization, model.architecture, held).optimizers
            moments = sum(parameter.nbytes * len(one.means) for one, _ in of_rank for parameter in one.parameters)
            weights = sum(parameter.nbytes for parameter in trained.values())
            states.append(2 * weights + moments)
        # An adaptation has its best parameters too, and DEMix-DAPT the frozen ones of the model.
        best = weights if plan.stage == "adapt" else 0
        assert plan.state == max(states) + best + 4 * plan.shared * (name == "demix-dapt")
        if ranks == 1:
            assert plan.checkpoint == weights + moments + best


@pytest.mark.parametrize("scope", ["feedforward", "model"])
@pytest.mark.parametrize("name", ["dense", "switch"])
def test_the_matrices_are_those_of_the_model(name: str, scope: str) -> None:
    architecture = architecture_of(name)
    model = GPT(architecture, 300, ("a",), (), scope)
    found: tuple[Counter, Counter] = (Counter(), Counter())
    for key, parameter in model.named_parameters():
        if group_of(key) == "matrices":
            parts = {"qkv.weight": (24, 12, 12), "feedforward.up": (40, 40)}.get(key.split("attention.")[-1][-14:])
            for part in parameter.split(parts or parameter.shape[-2], -2):
                found[model.owned(key)][tuple(part.shape[-2:])] += part.shape[:-2].numel()
    assert matrices(architecture, scope) == found


@pytest.mark.parametrize("name", ["demix", "dense", "demix-dapt", "dense-dapt"])
def test_a_rank_sends_what_it_updated(name: str) -> None:
    whole, sharded = (plans(None, 8, shard)[name] for shard in (False, True))
    assert sharded.state < whole.state
    assert sharded.checkpoint == whole.checkpoint
    assert sharded.synced == whole.synced
    sent = [ring for ring in sharded.rings if ring.broadcasts]
    summed = [ring for ring in sharded.rings if not ring.broadcasts]
    assert [(ring.size, tuple(ring.ranks)) for ring in sent] == [(ring.size, tuple(ring.ranks)) for ring in summed]
    assert whole.rings == tuple(summed)


def test_1_3_billion_parameters_on_8_gpus() -> None:
    shared, own = sizes(PRESETS["gpt3-xl"], 50257)
    count = sum(size.parameters for size in shared + own)
    places = place_experts(["all"], 8, 8)
    assert 8 * count / 8 <= sharded_moments(shared, own, places, muon=False) < 1.02 * count


def test_the_plan_counts_muons_work_and_what_it_sends() -> None:
    sizes = Architecture(2, 16, 2, 8)
    shared = 2 * 4 * orthogonalising_flops(16, 16)
    expert = 4 * orthogonalising_flops(64, 16)
    costs = {}
    for ranks in (1, 2, 4, 64):
        costs[ranks] = muon_cost(sizes, MUON, "feedforward", place_experts("ab", 32, ranks), frozen=False)
    assert costs[1].flops == 5 * (shared + 2 * expert)
    assert costs[2].flops == 5 * (shared / 2 + expert)
    # A rank of four has two of the eight shared matrices.
    assert costs[4].flops == 5 * (2 * orthogonalising_flops(16, 16) + expert / 2)
    assert costs[64].flops == 5 * (orthogonalising_flops(16, 16) + orthogonalising_flops(64, 16))
    assert (costs[1].rings, costs[2].rings) == ((), (Ring(4 * 2 * 1024, range(2), 8),))
    one, two = 4 * 2 * 1024, 4 * 4 * 1024
    assert costs[4].rings == (Ring(one, range(4), 8), Ring(two, (0, 1), 4), Ring(two, (2, 3), 4))
    # Each broadcast crosses three hops of a ring of four ranks, of which each sends three quarters of all bytes.
    assert costs[4].rings[0].sent == 3 / 4 * one
    network = Network(8, 1e-6, 100e9, 10e-6, 10e9)
    assert network.seconds(costs[4].rings[0]) == pytest.approx(8 * 3 * 1e-6 + 3 / 4 * one / 100e9)
    assert given(costs[4].rings) == 0
    frozen = muon_cost(sizes, MUON, "feedforward", place_experts("a", 32, 1), frozen=True)
    assert (frozen.flops, frozen.shared) == (5 * expert, 0)
    assert muon_cost(sizes, dataclasses.replace(MUON, kind="adamw"), "none", (), frozen=False).flops == 0


def test_hours_count_muons_work_and_operations_of_passes_do_not() -> None:
    plain, muon = plans(None, 2)["demix"], plans("muon", 2)["demix"]
    assert muon.flops == plain.flops
    assert muon.hours / plain.hours == pytest.approx(1 + 2 * muon.orthogonalising / plain.flops)
    assert muon.synced == plain.synced
    assert synchronizing(muon.rings, HARDWARE["a100"].network) > synchronizing(plain.rings, HARDWARE["a100"].network)
