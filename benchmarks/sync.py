"""What synchronizing gradients takes, dense against DEMix by number of ranks, measured to 8.

    python benchmarks/sync.py [--json rows.json]

Steps of real gloo processes, a thread each, of a model of 5.3M parameters (an expert's 2.1M) on 512 tokens a
step. Time against DDP of torch (for DEMix two of it, one in the other); bytes given to all-reduce against those of
the parameters that other ranks have; bytes over the loopback device against what rings move, 2(n-1)/n of a rank's from
each of n ranks.
Gradient norms must agree with DDP's. Ranks beyond the machine's cores share them: compare times of one number of ranks.
About three minutes on two cores.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from common import arguments, row, show
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.nn.parallel import DistributedDataParallel

from demix.config.architecture import Architecture
from demix.config.counts import parameters
from demix.model.gpt import GPT
from demix.run.placement import Placement, place
from demix.train.parallel import GradientSync, World, joined

ARCHITECTURE, VOCAB_SIZE, SEQUENCES = Architecture(layers=4, width=256, heads=4, context=64), 8192, 8
WINDOWS, STEPS = 3, 3
COUNTER = Path("/sys/class/net/lo/statistics/tx_bytes")


@dataclass(frozen=True)
class Case:
    """Steps of one model by `ranks` processes on `domains` (a dense model sees the same data)."""

    kind: str
    domains: int
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.domains} domains, {self.ranks} ranks"

    def places(self) -> tuple[Placement, ...]:
        names = [f"domain{number}" for number in range(self.domains)]
        return place(self.kind, names, SEQUENCES // self.domains, self.ranks)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same experts."""
        return len(self.places()[0].ranks)


@dataclass(frozen=True)
class Measured:
    """Of one step: median seconds of ours and of DDP (if any), bytes that rank 0 gave to all-reduce, over loopback."""

    seconds: float
    peer: float | None
    sent: float
    moved: float


CASES = [Case("dense", 8, ranks) for ranks in (1, 2, 4, 8)] + [
    Case("demix", domains, ranks)
    for domains, ranks in ((2, 1), (8, 1), (2, 2), (8, 2), (2, 4), (4, 4), (8, 4), (2, 8), (4, 8), (8, 8))
]


class Loss(nn.Module):
    """What DDP wraps: the mean loss over the whole step, this rank's part of it."""

    def __init__(self, model: GPT):
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logp = self.model.log_probabilities(self.model(inputs), targets)
        return -logp.sum() / (SEQUENCES * ARCHITECTURE.context)


class Peer:
    """DDP in the place of `GradientSync`: of shared parameters over all ranks, around it one of experts over theirs."""

    def __init__(self, loss: Loss, world: World):
        self.world, self.sent, own = world, 0, world.groups[1]
        names = [name for name, _ in loss.named_parameters()]
        split = own is not world.groups[0]
        ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        if split:
            ignore(loss, [name for name in names if loss.model.owned(name)])
        self.module: nn.Module = DistributedDataParallel(loss, gradient_as_bucket_view=True)
        if split and own is not None:
            ignore(self.module, [f"module.{name}" for name in names if not loss.model.owned(name)])
            self.module = DistributedDataParallel(self.module, process_group=own, gradient_as_bucket_view=True)
        self.parts = [
            [p for n, p in loss.named_parameters() if loss.model.owned(n) == expert] for expert in (False, True)
        ]
        # DDP gives means over ranks where a sum is wanted.
        self.factors = [group.size() if group else 1 for group in world.groups]
        self.counts = [world.rank == 0, world.writes_experts]

    def zero(self) -> None:
        self.module.zero_grad(set_to_none=False)

    def begin(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def clip(self, most: float) -> float:
        gradients = [[p.grad for p in part] for part in self.parts]
        square = 0.0
        for some, factor, counts in zip(gradients, self.factors, self.counts, strict=True):
            if counts:
                norms = torch.stack(torch._foreach_norm(some)).double()
                square += float((norms**2).sum()) * factor**2
        norm = self.world.sum([square])[0] ** 0.5
        for some, factor in zip(gradients, self.factors, strict=True):
            torch._foreach_mul_(some, factor * min(1.0, most / (norm + 1e-6)))
        return norm


def stepper(
    case: Case, world: World, placement: Placement, sync_by: type
) -> tuple[Callable[[], float], GradientSync | Peer]:
    """A training step of this rank, which returns the gradient's norm, and what synchronizes it."""
    experts = tuple(f"domain{d}" for d in placement.experts) if case.kind == "demix" else ("dense",)
    loss = Loss(GPT(ARCHITECTURE, VOCAB_SIZE, experts).initialise(1))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB_SIZE, (SEQUENCES, ARCHITECTURE.context + 1), generator=generator)
    tokens = tokens.view(case.domains if case.kind == "demix" else 1, -1, ARCHITECTURE.context + 1)
    tokens = tokens[list(placement.experts), placement.first : placement.last]
    if sync_by is Peer:
        sync = Peer(loss, world)
        forward = sync.module
    else:
        sync, forward = GradientSync(dict(loss.named_parameters()), loss.model.owned, world), loss
    optimizer = torch.optim.AdamW(loss.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        sync.zero()
        value = forward(tokens[..., :-1], tokens[..., 1:])
        sync.begin()
        value.backward()
        sync.finish()
        norm = sync.clip(0.1)
        optimizer.step()
        return norm

    return step, sync


def measure(case: Case) -> Measured:
    """Called by every rank of the case, in its environment."""
    torch.set_num_threads(1)
    with joined() as world:
        places = case.places()
        world, placement = world.placed(places), places[world.rank]
        sides = [stepper(case, world, placement, kind) for kind in (GradientSync, Peer)[: min(2, case.ranks)]]
        norms = [step() for step, _ in sides]
        assert max(norms) - min(norms) < 1e-4 * min(norms), f"{case}: gradient norms {norms}"
        times: list[list[float]] = [[] for _ in sides]
        moved, sync = [], sides[0][1]
        # In turn, whatever else the machine does meanwhile; the first steps do not count.
        for window in range(WINDOWS + 1):
            for (step, _), seconds in zip(sides, times, strict=True):
                world.wait()
                before = int(COUNTER.read_text())
                for _ in range(STEPS):
                    begun = time.monotonic()
                    step()
                    if window:
                        seconds.append(time.monotonic() - begun)
                world.wait()
                if seconds is times[0]:
                    moved.append((int(COUNTER.read_text()) - before) / STEPS)
        ours, *peer = map(statistics.median, times)
        # Whatever else uses the device only adds to it.
        return Measured(ours, peer[0] if peer else None, sync.sent, min(moved))


def work(rank: int, cases: list[Case], ports: list[int], results: multiprocessing.Queue) -> None:
    """One rank of each case that has it, one case after the other."""
    for case, port in zip(cases, ports, strict=True):
        if rank < case.ranks:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(case.ranks), "MASTER_ADDR": "127.0.0.1"}
            os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            measured = measure(case)
            if rank == 0:
                results.put((case, measured))


def measure_all(cases: list[Case]) -> dict[Case, Measured]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["demix.train.parallel", "demix.model.gpt"])
    results, found = context.Queue(), {}
    # One number of ranks at a time: those that wait for a meeting would take time from those that are measured.
    for size in sorted({case.ranks for case in cases}):
        some = [case for case in cases if case.ranks == size]
        stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in some]
        arguments = (some, [store.port for store in stores], results)
        ranks = [context.Process(target=work, args=(rank, *arguments)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        found |= dict(results.get(timeout=300) for _ in some)
        for rank in ranks:
            rank.join()
    return found


def measured_rows(found: dict[Case, Measured]) -> list[dict]:
    shared, expert = parameters(ARCHITECTURE, VOCAB_SIZE)
    times, given, moved = [], [], []
    for case in CASES:
        ours = found[case]
        times.append(row(f"step, {case.name}", 1000 * ours.seconds, ours.peer and 1000 * ours.peer, "ms"))
        if case.ranks == 1:
            continue
        held = len(case.places()[0].experts) * expert
        formula = 4 * (shared + held * (case.replicas > 1))
        given.append(row(f"bytes a rank gives, {case.name}", ours.sent / 1e6, formula / 1e6, "MB"))
        # An expert's ring has 2(n-1)/n of its bytes from each of n: 2(n-1) times its bytes.
        experts = case.domains if case.kind == "demix" else 1
        ring = 4 * (shared * 2 * (case.ranks - 1) + expert * experts * 2 * (case.replicas - 1))
        moved.append(row(f"bytes over loopback, {case.name}", ours.moved / 1e6, ring / 1e6, "MB"))
    for ranks in (2, 4, 8):
        dense, demix = found[Case("dense", 8, ranks)], found[Case("demix", ranks, ranks)]
        pair = (SEQUENCES * ARCHITECTURE.context / one.seconds for one in (demix, dense))
        times.append(row(f"DEMix of {ranks} domains against dense, {ranks} ranks", *pair, "tokens/s"))
    return times + given + moved


if __name__ == "__main__":
    given = arguments(__doc__)
    show(measured_rows(measure_all(CASES)), given.json)
