"""What Muon takes: memory, operations and bytes sent, by the plan and by what a training does; the work of ranks."""

import dataclasses
import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore
from torch.utils.flop_counter import FlopCounterMode

from demix.config.architecture import PRESETS, Architecture
from demix.config.counts import matrices, orthogonalising_flops, training_flops_per_token
from demix.config.training import Updates
from demix.model.gpt import GPT
from demix.plan.cost import TrainingPlan, plan_training, training_tables
from demix.plan.flops import HARDWARE
from demix.plan.muon import muon_cost
from demix.plan.network import Network, Ring, given, synchronizing
from demix.run.check import load_run
from demix.run.placement import place_experts
from demix.run.run import Run
from demix.train.muon import Muon, orthogonalised, shared_out
from demix.train.parallel import joined
from demix.train.schedule import Optimization
from demix.train.updates import Optimizers, group_of
from support.configs import small_run
from support.forks import FORKS

ROOT = Path(__file__).parents[2]
SIZES = {"preset": "llama", "layers": 3, "width": 24, "heads": 2, "context": 8, "key_heads": 1, "inner": 40}
ROUTED = {"kind": "routed", "experts": 4, "top_k": 2, "every": 2, "capacity": 2.0, "balance": 0.01}
ROWS = {"btm": {"kind": "branched", "parent": "dense", "seed_tokens": 64}, "switch": ROUTED}
MUON = Updates(kind="muon")


def run_with(kind: str | None) -> Run:
    optimizer = {"optimizer": {"kind": kind}} if kind else {}
    training = {"tokens": 16 * 8 * 10, "sequences": 4} | optimizer
    return small_run(architecture=SIZES, training=training, models=ROWS, adaptation={"tokens": 64} | optimizer)


def plans(kind: str | None, ranks: int = 1) -> dict[str, TrainingPlan]:
    found = plan_training(run_with(kind), ranks, HARDWARE["cpu"])
    return {plan.name.partition("-")[0] + ("" if plan.stage == "train" else "-dapt"): plan for plan in found}


def moments(model: GPT, kind: str | None) -> int:
    """Bytes of what the optimizers keep after a step, but the counts of AdamW's updates, 4 bytes a tensor."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimization = Optimization(steps=10, learning_rate=1e-3, optimizer=Updates(kind=kind) if kind else None)
    optimizers = Optimizers(trained, optimization, model.architecture)
    for parameter in trained.values():
        parameter.grad = torch.ones_like(parameter)
    optimizers.step(1e-3)
    assert optimizers.state.keys() == {*trained.values()}
    return sum(t.nbytes for kept in optimizers.state.values() for name, t in kept.items() if name != "step")


@pytest.mark.parametrize("kind", [None, "adamw", "muon"])
@pytest.mark.parametrize("name", ["demix", "dense", "switch", "btm", "demix-dapt", "dense-dapt"])
def test_the_plans_state_is_that_of_the_optimizers(name: str, kind: str | None) -> None:
    run, plan = run_with(kind), plans(kind)[name]
    scope = "model" if name == "btm" else "feedforward"
    (architecture,) = {one.base.architecture for one in run.trained if one.name == name.removesuffix("-dapt")}
    model = GPT(architecture, run.types, ("a", "b")[: plan.experts], (), scope).initialise(1)
    for parameter in model.shared_tensors().values():
        parameter.requires_grad = name != "demix-dapt"
    weights = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    # An adaptation has its best parameters too, and DEMix-DAPT the frozen ones of the model.
    still = (weights if plan.stage == "adapt" else 0) + 4 * plan.shared * (name == "demix-dapt")
    assert plan.state == 2 * weights + moments(model, kind) + still
    assert plan.checkpoint == weights + moments(model, kind) + (weights if plan.stage == "adapt" else 0)


@pytest.mark.parametrize("scope", ["feedforward", "model"])
@pytest.mark.parametrize("name", ["dense", "switch"])
def test_the_matrices_are_those_of_the_model(name: str, scope: str) -> None:
    (architecture,) = {one.base.architecture for one in run_with("muon").trained if one.name == name}
    model = GPT(architecture, 300, ("a",), (), scope)
    found: tuple[Counter, Counter] = (Counter(), Counter())
    for key, parameter in model.named_parameters():
        if group_of(key) == "matrices":
            parts = {"qkv.weight": (24, 12, 12), "feedforward.up": (40, 40)}.get(key.split("attention.")[-1][-14:])
            for part in parameter.split(parts or parameter.shape[-2], -2):
                found[model.owned(key)][tuple(part.shape[-2:])] += part.shape[:-2].numel()
    assert matrices(architecture, scope) == found


@pytest.mark.parametrize("shape", [(8, 8), (9, 6), (3, 10, 12), (12, 5), (3, 5, 12)])
def test_the_operations_are_those_that_torch_counts(shape: tuple[int, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalised(torch.randn(shape), 5)
    number = shape[0] if len(shape) == 3 else 1
    m, n = sorted(shape[-2:])
    # Of a wide matrix: its square, its product, and five squares of squares, four products of them, twice four more.
    expected = 5 * orthogonalising_flops(m, n) if n <= 1.5 * m else 4 * m**2 * n + 17 * 2 * m**3
    assert counter.get_total_flops() == number * expected
    assert expected <= 5 * orthogonalising_flops(m, n)


def newton_schulz(x: torch.Tensor, iterations: int) -> torch.Tensor:
    x = x / x.norm(dim=(-2, -1), keepdim=True)
    for _ in range(iterations):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


@pytest.mark.parametrize("iterations", [0, 1, 5, 6, 13])
@pytest.mark.parametrize("rank", [1, 7, 16])
@pytest.mark.parametrize("shape", [(16, 50), (2, 50, 16), (2, 16, 20)])
def test_iterations_by_squares_are_the_plain_ones(shape: tuple[int, ...], rank: int, iterations: int) -> None:
    """For singular values of any size down to 0, as gradients of few tokens have them."""
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(*shape[:-1], rank, generator=generator, dtype=torch.float64)
    x = left * 10.0 ** -torch.arange(rank) @ torch.randn(*shape[:-2], rank, shape[-1], generator=generator).double()
    plain = newton_schulz(x, iterations)
    torch.testing.assert_close(orthogonalised(x, iterations), plain, rtol=0, atol=1e-9)
    if iterations not in (1, 5):
        return
    # In fp32 it is far nearer than the bf16 of torch's own Muon.
    missed, usual = orthogonalised(x.float(), iterations) - plain, newton_schulz(x.bfloat16(), iterations) - plain
    assert missed.abs().max() < 0.1 * usual.abs().max()


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 50])
def test_ranks_share_the_work_out(ranks: int) -> None:
    shapes = [(1, 36, 12), (1, 12, 12), (8, 48, 12), (8, 12, 48), (1, 36, 12)]
    stacks = [torch.arange(number * rows * columns).view(number, rows, columns) for number, rows, columns in shapes]
    parts = [*shared_out(stacks, ranks)]
    assert torch.equal(torch.cat([part.flatten() for _, part in parts]), torch.cat([one.flatten() for one in stacks]))
    owners = [owner for owner, _ in parts]
    assert owners == sorted(owners)
    assert set(owners) <= set(range(ranks))
    work = Counter()
    for owner, part in parts:
        work[owner] += len(part) * orthogonalising_flops(*part.shape[1:])
    costs = [orthogonalising_flops(*shape[1:]) for shape in shapes]
    assert max(work.values()) <= work.total() / ranks + max(costs)


def steps_of(rank: int, port: int, folder: Path) -> None:
    """Save what three updates by a group of ranks give, and what a rank alone does with the same gradients."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_PORT": str(port), "MASTER_ADDR": "127.0.0.1"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    torch.set_num_threads(1)
    with joined():
        found = []
        for group in (dist.group.WORLD, None):
            parameters = [nn.Parameter(torch.ones(shape)) for shape in ((36, 12), (12, 12), (2, 48, 12), (2, 12, 48))]
            muon = Muon(parameters, 0.1, 0.95, 5, group, {parameters[0]: (20, 8, 8), parameters[2]: (24, 24)})
            generator = torch.Generator().manual_seed(7)
            for _ in range(3):
                for parameter in parameters:
                    parameter.grad = torch.randn(parameter.shape, generator=generator)
                muon.step(0.1)
            found.append([*(p.detach() for p in parameters), *(kept["momentum"] for kept in muon.state.values())])
        torch.save(found, folder / str(rank))


def test_what_ranks_share_out_is_what_one_computes_to_the_bit(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [FORKS.Process(target=steps_of, args=(rank, store.port, tmp_path)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    _, alone = torch.load(tmp_path / "0")
    for rank in range(3):
        for ours, theirs in zip(torch.load(tmp_path / str(rank))[0], alone, strict=True):
            assert torch.equal(ours, theirs)


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
    told = [training_tables(run_with(kind), 1, "cpu")[1].caption for kind in ("adamw", "muon")]
    assert ["Muon" in caption for caption in told] == [False, True]


def test_the_documented_share_of_muons_work_is_the_computed_one() -> None:
    text = (ROOT / "docs" / "training.md").read_text()
    run = load_run(ROOT / "config" / "sample.yaml")
    (sample,) = {one.base.architecture for one in run.trained if one.name in ("demix", "dense")}
    sequences = 8 * run.config.training.sequences
    cases = {
        "the sample, 8 experts, 1 rank": (sample, run.types, "abcdefgh", sequences, 1),
        "the sample, dense, 1 rank": (sample, run.types, "a", sequences, 1),
        "125M, 8 experts, 32 ranks": (PRESETS["gpt3-small"], 50257, "abcdefgh", 512, 32),
        "1.3B, 8 experts, 128 ranks": (PRESETS["gpt3-xl"], 50257, "abcdefgh", 2048, 128),
        "1.3B, dense, 128 ranks": (PRESETS["gpt3-xl"], 50257, "a", 2048, 128),
    }
    rows = []
    for name, (sizes, types, experts, sequences, ranks) in cases.items():
        # By its ranks together, and by each for itself.
        shared, unshared = (
            muon_cost(sizes, MUON, "feedforward", place_experts(some, 2048, number), frozen=False).flops
            for some, number in ((experts, ranks), (experts[: -(-len(experts) // ranks)], 1))
        )
        passes = sequences * sizes.context * training_flops_per_token(sizes, types, sizes.context) / ranks
        rows.append([name, *(f"{flops / 1e9:,.1f}" for flops in (passes, shared)),
                     *(f"{100 * flops / passes:.1f}%" for flops in (shared, unshared))])  # fmt: skip
    section = text.split("## Optimizer and schedule")[1].split("\n## ")[0]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", section, re.M)]
    assert found[2 : 2 + len(rows)] == rows, rows
