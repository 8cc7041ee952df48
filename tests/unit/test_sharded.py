"""The owners of parameters with a sharded optimizer, and what the plan says of their memory and traffic."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import TCPStore

from demix.config.architecture import PRESETS
from demix.config.counts import sizes
from demix.config.training import Updates
from demix.model.gpt import GPT
from demix.plan.cost import TrainingPlan, plan_training
from demix.plan.flops import HARDWARE
from demix.plan.memory import sharded_moments
from demix.run.placement import owners_of, place_experts
from demix.train.parallel import joined
from demix.train.schedule import Optimization
from demix.train.updates import Optimizers
from support.configs import small_run
from support.forks import FORKS

SIZES = {"preset": "llama", "layers": 3, "width": 24, "heads": 2, "context": 8, "key_heads": 1, "inner": 40}
DOMAINS = tuple("abcdefgh")


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 9))
def test_no_rank_has_more_than_another_and_one_thing(sizes: list[int], ranks: int) -> None:
    owners = owners_of(sizes, ranks)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)


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


def plans(ranks: int, shard: bool, **training: object) -> dict[str, TrainingPlan]:
    settings = {"tokens": 16 * 8 * 10, "sequences": 4, "shard_optimizer": shard} | training
    run = small_run(architecture=SIZES, training=settings, adaptation={"tokens": 64, "shard_optimizer": shard})
    return {plan.name.partition("-")[0] + ("" if plan.stage == "train" else "-dapt"): plan
            for plan in plan_training(run, ranks, HARDWARE["cpu"])}  # fmt: skip


@pytest.mark.parametrize("kind", [None, "muon"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("name", ["demix", "dense"])
def test_the_plans_state_is_that_of_the_fullest_rank(name: str, ranks: int, kind: str | None) -> None:
    updates = Updates(kind=kind) if kind else None
    plan = plans(ranks, True, **{"optimizer": {"kind": kind}} if kind else {})[name]
    run = small_run(architecture=SIZES, training={"tokens": 16 * 8 * 10, "sequences": 4})
    (architecture,) = {one.base.architecture for one in run.trained if one.name == name}
    optimization = Optimization(steps=1, learning_rate=1.0, shard_optimizer=True, optimizer=updates)
    states = []
    places = place_experts(DOMAINS[: plan.experts], plan.sequences // plan.experts, ranks)
    for rank, place in enumerate(places):
        with torch.device("meta"):
            model = GPT(architecture, run.types, tuple(DOMAINS[expert] for expert in place.experts))
        every = Group("all", ranks, rank)
        same = every if len(place.ranks) == ranks else Group("own", len(place.ranks), place.ranks.index(rank))
        holders = {False: every, True: same}
        named = dict(model.named_parameters())
        held = Optimizers(
            named, optimization, architecture,
            lambda parameter, m=model, h=holders: h[m.owned(parameter)] if h[m.owned(parameter)].of > 1 else None,
        )  # fmt: skip
        moments = sum(p.nbytes * len(one.means) for one, _ in held.optimizers for p in one.parameters)
        states.append(2 * sum(p.nbytes for p in named.values()) + moments)
    assert plan.state == max(states)


@pytest.mark.parametrize("name", ["demix", "dense", "demix-dapt", "dense-dapt"])
def test_a_rank_sends_what_it_updated(name: str) -> None:
    whole, sharded = (plans(8, shard)[name] for shard in (False, True))
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


def beside_torch(rank: int, port: int, sharded: bool, out: Path) -> None:
    """One of three ranks that update a few tensors, by ours or by torch's ZeroRedundancyOptimizer."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "DEMIX_LAUNCHER": "1"}
    shapes = [(40, 24), (40, 24), (7,), (24, 40), (90, 24), (1,)]
    named = {
        f"tensor{number}": nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(number)))
        for number, shape in enumerate(shapes)
    }
    with joined():
        if sharded:
            optimization = Optimization(steps=9, learning_rate=1.0, weight_decay=0.1, shard_optimizer=True)
            ours = Optimizers(named, optimization, PRESETS["gpt3-small"], lambda _: dist.group.WORLD)
        else:
            # Its import takes seconds and warns of torch's own compiler.
            from torch.distributed.optim import ZeroRedundancyOptimizer

            theirs = ZeroRedundancyOptimizer(
                named.values(), torch.optim.AdamW, lr=0.01, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1, fused=True
            )
        for step in range(4):
            for number, parameter in enumerate(named.values()):
                generator = torch.Generator().manual_seed(100 * step + number)
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            ours.step(0.01) if sharded else theirs.step()
        state = ours.state if sharded else theirs.optim.state
        kept = sum(tensor.nbytes for one in state.values() for name, tensor in one.items() if name != "step")
        everything = {name: parameter.detach() for name, parameter in named.items()}
        if sharded:
            of = {parameter: name for name, parameter in named.items()}
            everything |= {f"{of[one]}/{key}": t for one, held in ours.gathered().items() for key, t in held.items()}
        else:
            theirs.consolidate_state_dict(to=0)
            if rank == 0:
                held = theirs.state_dict()["state"]
                everything |= {f"tensor{one}/{key}": tensor for one in held for key, tensor in held[one].items()}
        save_file({name: tensor.contiguous() for name, tensor in everything.items()}, out / f"rank-{rank}")
        (out / f"kept-{rank}").write_text(str(kept))


def test_updates_and_moments_are_those_of_torchs_zero(tmp_path: Path) -> None:
    for name, sharded in (("ours", True), ("torch", False)):
        (tmp_path / name).mkdir()
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = [
            FORKS.Process(target=beside_torch, args=(rank, store.port, sharded, tmp_path / name)) for rank in range(3)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(120)
        assert {rank.exitcode for rank in ranks} == {0}
    for rank in range(3):
        mine, others = (load_file(tmp_path / name / f"rank-{rank}") for name in ("ours", "torch"))
        assert mine.keys() == others.keys()
        assert len(mine) == (24 if rank == 0 else 6)
        assert all(torch.equal(mine[name], others[name]) for name in mine)
    kept = [
        sorted(int((tmp_path / name / f"kept-{rank}").read_text()) for rank in range(3)) for name in ("ours", "torch")
    ]
    assert kept[0] == kept[1]
