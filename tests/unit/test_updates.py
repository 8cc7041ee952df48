"""Optimizers, schedules and the z-loss against torch, transformers and plain formulas; what a plan counts of them."""

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from demix.config.architecture import Architecture, Routed
from demix.config.training import OptimizerSettings
from demix.model.gpt import GPT
from demix.plan.cost import TrainingPlan, plan_training
from demix.plan.flops import HARDWARE
from demix.run.placement import owners_of, place_experts
from demix.run.run import Run
from demix.train import optimizers
from demix.train.optimizers import AdamW, Muon, Optimizers, group_of, orthogonalised
from demix.train.schedule import Optimization
from support.configs import small_run

SIZES = {"layers": 2, "width": 16, "heads": 2, "context": 8}
OPTIMIZATION = Optimization(steps=100, learning_rate=1e-2, weight_decay=0.1)


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_have_the_bits_of_torchs_class(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.arange(float(size)).to(dtype) / 7) for size in (5, 33, 1)] for _ in range(2))
    mine = AdamW(iter(ours), weight_decay=0.1)
    peer = torch.optim.AdamW(theirs, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1, fused=True)
    for rate in (1e-2, 3e-3, 0.0, 1e-1):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        peer.param_groups[0]["lr"] = rate
        mine.step(rate)
        peer.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
            assert {name: value.tolist() for name, value in mine.state[a].items()} == {
                name: value.tolist() for name, value in peer.state[b].items()
            }


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (7, 7)])
def test_muon_is_that_of_torch(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch orthogonalises in bf16, ours on a CPU does not: their difference is that of the rounding."""
    monkeypatch.setattr(optimizers, "MOMENTUM", 0.9)
    ours, theirs = (nn.Parameter(numbers(*shape, dtype=torch.float32)) for _ in range(2))
    mine = Muon([ours], 0.1, {})
    peer = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.9, ns_steps=optimizers.ITERATIONS)
    for step in range(6):
        ours.grad = numbers(step + 1, *shape, dtype=torch.float32)[step]
        theirs.grad = ours.grad.clone()
        before = ours.detach().clone()
        mine.step(0.02)
        peer.step()
        moved = (ours - before).norm()
        assert (ours - theirs).norm() < 0.03 * (step + 1) ** 0.5 * moved
        torch.testing.assert_close(mine.state[ours]["momentum"], peer.state[theirs]["momentum_buffer"])


def newton_schulz(x: torch.Tensor, iterations: int) -> torch.Tensor:
    x = x / x.norm(dim=(-2, -1), keepdim=True)
    for _ in range(iterations):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


@pytest.mark.parametrize("shape", [(16, 50), (2, 50, 16), (2, 16, 20)])
def test_iterations_by_squares_are_the_plain_ones(shape: tuple[int, ...]) -> None:
    """For singular values of any size down to 0, as gradients of few tokens have them."""
    for rank, iterations in itertools.product((1, 7, 16), (0, 1, 5, 6, 13)):
        left, right = numbers(*shape[:-1], rank), numbers(*shape[:-2], rank, shape[-1])
        x = left * 10.0 ** -torch.arange(rank) @ right
        plain = newton_schulz(x, iterations)
        torch.testing.assert_close(orthogonalised(x, iterations), plain, rtol=0, atol=1e-9)
        if iterations in (1, 5):
            # In fp32 it is far nearer than the bf16 of torch's own Muon.
            ours, usual = orthogonalised(x.float(), iterations), newton_schulz(x.bfloat16(), iterations)
            assert (ours - plain).abs().max() < 0.1 * (usual - plain).abs().max()


def maps(stack: torch.Tensor, rows: tuple[int, ...]) -> list[torch.Tensor]:
    """The matrices of a stack [experts, rows, columns], in which several of so many rows stand one below the other."""
    return [one.clone() for part in stack.detach().split(rows, -2) for one in part.reshape(-1, *part.shape[-2:])]


def test_each_matrix_is_updated_by_itself() -> None:
    """Those of queries, keys and values, both of a gated feedforward, and each expert's: as parameters of their own."""
    architecture = Architecture(**SIZES, key_heads=1, gated=True, biases="none")
    model = GPT(architecture, 20, ("a", "b")).initialise(1).double()
    named = {name: p for name, p in model.named_parameters() if name.endswith(("qkv.weight", "feedforward.up"))}
    rows = {name: (16, 8, 8) if "qkv" in name else (64, 64) for name in named}
    alone = {name: [nn.Parameter(one) for one in maps(parameter, rows[name])] for name, parameter in named.items()}
    for name, parameter in named.items():
        lengths = torch.tensor([1.0, 100.0]).view(2, 1, 1) if parameter.dim() == 3 else 1.0
        parameter.grad = numbers(*parameter.shape) * lengths
        for one, gradient in zip(alone[name], maps(parameter.grad, rows[name]), strict=True):
            one.grad = gradient
    optimization = OPTIMIZATION.replace(optimizer=OptimizerSettings(kind="muon"))
    Optimizers(named, optimization, architecture).step(0.1)
    Muon([one for parts in alone.values() for one in parts], 0.1, {}).step(0.1)
    for name, parameter in named.items():
        torch.testing.assert_close(
            maps(parameter, rows[name]), [one.data for one in alone[name]], rtol=1e-9, atol=1e-12
        )


def test_groups_have_their_rates_and_their_decay() -> None:
    sizes = Architecture(**SIZES, head="untied", gated=True)
    tables = sizes.replace(bigrams="experts", value_embeddings=True)
    routed = sizes.replace(routed=Routed(experts=2, top_k=1, every=2, capacity=2.0, balance=0.0))
    names = {name for one in (sizes, routed, tables) for name, _ in GPT(one, 20, ("a",)).named_parameters()}
    groups: dict[str, set[str]] = {}
    for name in names:
        groups.setdefault(group_of(name), set()).add(name.split(".", 2)[-1] if name.startswith("blocks") else name)
    assert groups["matrices"] == {"attention.qkv.weight", "attention.out.weight", "feedforward.up", "feedforward.down"}
    assert groups["embeddings"] == {"token_embedding", "position_embedding"}
    assert groups["head"] == {"output_embedding"}
    assert {"feedforward.router", "feedforward.up_bias", "final_norm.weight", "attention.qkv.bias"} <= groups["rest"]
    assert groups["bigrams"] == {"bigrams.expert_table"}
    assert groups["value_embeddings"] == {"value_embedding"}
    model, peer = (GPT(tables, 20, ("a", "b")).initialise(1).double() for _ in range(2))
    updates = OptimizerSettings(
        kind="adamw",
        beta1=0.8,
        beta2=0.9,
        epsilon=1e-8,
        decay="matrices",
        matrices=2.0,
        embeddings=3.0,
        head=0.5,
        bigrams=4.0,
    )
    optimization = OPTIMIZATION.replace(optimizer=updates)
    ours = Optimizers(dict(model.named_parameters()), optimization, model.architecture)
    rates = {"matrices": 2.0, "embeddings": 3.0, "head": 0.5, "bigrams": 4.0, "value_embeddings": 3.0, "rest": 1.0}
    theirs = torch.optim.AdamW(
        [
            {"params": [p], "lr": 1e-2 * rates[group_of(name)], "weight_decay": 0.1 * (group_of(name) == "matrices")}
            for name, p in peer.named_parameters()
        ],
        betas=(0.8, 0.9),
        eps=1e-8,
    )
    for step in range(3):
        for one, other in zip(model.parameters(), peer.parameters(), strict=True):
            one.grad = numbers(*one.shape) * (step + 1)
            other.grad = one.grad.clone()
        ours.step(1e-2)
        theirs.step()
    for one, other in zip(model.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 9))
def test_no_rank_has_more_than_another_and_one_thing(sizes: list[int], ranks: int) -> None:
    owners = owners_of(sizes, ranks)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)


LLAMA = {"preset": "llama", "layers": 3, "width": 24, "heads": 2, "context": 8, "key_heads": 1, "inner": 40}
ROUTED = {"kind": "routed", "experts": 4, "top_k": 2, "every": 2, "capacity": 2.0, "balance": 0.01}
MODELS = {"btm": {"kind": "branched", "parent": "dense", "seed_tokens": 64}, "switch": ROUTED}


@cache
def run_with(kind: str | None, ranks: int = 1, shard: bool = False) -> Run:
    optimizer: dict[str, Any] = {"shard_optimizer": shard} | ({"optimizer": {"kind": kind}} if kind else {})
    training = {"tokens": 16 * 8 * 10, "sequences": 4} | optimizer
    models = MODELS if ranks == 1 else {}
    return small_run(architecture=LLAMA, training=training, models=models, adaptation={"tokens": 64})


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
    updates, scope = OptimizerSettings(kind=kind) if kind else None, "model" if name == "btm" else "feedforward"
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
