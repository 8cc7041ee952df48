"""Which process trains what, and how gradients meet: shared parameters over all ranks, an expert's over its own.

One process is a world of one: the same code, without a process group. Ranks of one domain follow one another, so
that on a cluster most of an expert's traffic stays inside a node.
"""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from demix.config.placement import Placement
from demix.launch.local import watched
from demix.model.device import own_device

# Bytes of gradients sent at a time: few enough to begin during backward, enough to make latency small.
BUCKET_BYTES = 25 << 20
# A rank that waits longer than this for another gives up. The first collective waits for the slowest start.
TIMEOUT = timedelta(minutes=30)
# The type of `Tensor.register_post_accumulate_grad_hook`, which torch leaves without annotations.
_Register = Callable[[Callable[[Tensor], None]], RemovableHandle]


@dataclass(frozen=True)
class World:
    """The processes that train one model together, as one of them sees them.

    `groups`: that of all ranks and that of the ranks that hold the same experts as this one; None where it is one
    rank. `writes_experts`: whether this rank is the first of those that hold the same experts.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None)
    writes_experts: bool = True

    def placed(self, places: Sequence[Placement]) -> "World":
        """This world with the groups of the ranks' placements. All ranks must call it."""
        if self.size == 1:
            return self
        own = None
        # Every rank takes part in the making of every group, in one order.
        for ranks in sorted({place.ranks for place in places}):
            group = dist.group.WORLD
            if len(ranks) < self.size:
                group = dist.new_group(list(ranks), timeout=TIMEOUT) if len(ranks) > 1 else None
            if self.rank in ranks:
                own = group
        first = places[self.rank].ranks[0] == self.rank
        return dataclasses.replace(self, groups=(dist.group.WORLD, own), writes_experts=first)

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums of `values` over all ranks, in float64."""
        if self.size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers)
        return numbers.tolist()

    def first(self, values: Sequence[float]) -> list[float]:
        """Rank 0's `values`, on every rank, so that all decide alike."""
        if self.size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.broadcast(numbers, 0)
        return numbers.tolist()

    def wait(self) -> None:
        """Go on when all ranks have come here."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def joined() -> Iterator[World]:
    """This process's world, of RANK and WORLD_SIZE as torchrun, `demix.launch.local` or a batch system set them.

    Without them, or where there is but one, a world of one process. Ranks but the first say warnings only.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = own_device()
    if size == 1:
        yield World(device=device)
        return
    if rank:
        logging.getLogger().setLevel(logging.WARNING)
    with watched():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
        yield World(rank, size, device)
        # Not after an error: the others may wait for this rank, and it must leave at once.
        dist.destroy_process_group()


class _Bucket:
    """Gradients of some parameters, one after the other in a flat tensor that is sent as a whole.

    `counts`: whether this rank adds them to the norm, in which each parameter counts once.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None, counts: bool):
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        self.group, self.counts, self.size, self.left = group, counts, len(parameters), 0
        place = 0
        for parameter in parameters:
            parameter.grad = self.flat[place : place + parameter.numel()].view_as(parameter)
            place += parameter.numel()


class GradientSync:
    """Sums gradients over the ranks that share a parameter, while backward still computes others.

    Gradients are views into flat buckets: sending copies nothing, and `.grad` must never be set to None. Buckets go in
    one fixed order, so that all ranks agree. `sent` counts the bytes given to all-reduce since the start.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], is_expert: Callable[[str], bool], world: World):
        self.world, self.sent = world, 0
        self.buckets: list[_Bucket] = []
        self._pending: list[dist.Work] = []
        self._next, self._armed = 0, False
        self._handles: list[RemovableHandle] = []
        # Backward comes to the last layers first.
        for expert, group in enumerate(world.groups):
            for some in _bucketed([p for name, p in parameters.items() if is_expert(name) == expert][::-1]):
                bucket = _Bucket(some, group, world.writes_experts if expert else world.rank == 0)
                self.buckets.append(bucket)
                for parameter in some:
                    register: _Register = parameter.register_post_accumulate_grad_hook
                    self._handles.append(register(self._hook(bucket)))

    def zero(self) -> None:
        """Set all gradients to zero."""
        for bucket in self.buckets:
            bucket.flat.zero_()

    def begin(self) -> None:
        """Send buckets as the next backward fills them: call it before the last one of a step."""
        self._armed, self._next = True, 0
        for bucket in self.buckets:
            bucket.left = bucket.size

    def finish(self) -> None:
        """Wait until every gradient is the sum over its ranks."""
        for bucket in self.buckets[self._next :]:
            self._send(bucket)
        for work in self._pending:
            work.wait()
        self._pending.clear()
        self._armed = False

    def clip(self, most: float, scale: float = 1.0) -> float:
        """Divide gradients by `scale`, then scale them to a global L2 norm of at most `most`; returns the norm.

        The norm is one for all ranks and each expert counts once in it, however many ranks hold it. Where it is not
        finite gradients are left as they are.
        """
        square = sum(_square(bucket.flat) for bucket in self.buckets if bucket.counts)
        norm: float = self.world.sum([square])[0] ** 0.5 / scale
        if norm == norm and norm != float("inf"):
            factor = min(1.0, most / (norm + 1e-6)) / scale
            if factor != 1.0:
                for bucket in self.buckets:
                    bucket.flat.mul_(factor)
        return norm

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def filled(_: Tensor) -> None:
            if not self._armed:
                return
            bucket.left -= 1
            while self._next < len(self.buckets) and self.buckets[self._next].left == 0:
                self._send(self.buckets[self._next])
                self._next += 1

        return filled

    def _send(self, bucket: _Bucket) -> None:
        if bucket.group is not None:
            self._pending.append(dist.all_reduce(bucket.flat, group=bucket.group, async_op=True))
            self.sent += bucket.flat.numel() * bucket.flat.element_size()


def _square(flat: Tensor) -> float:
    """The sum of squares in float64: there may be a billion of them."""
    # In pieces on CPU, since the whole is copied to float64 and then leaves the caches.
    pieces = torch.split(flat, 1 << 16) if flat.device.type == "cpu" else (flat,)
    return float(torch.stack([piece.norm(dtype=torch.float64) for piece in pieces]).square().sum())


def _bucketed(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    some: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        some.append(parameter)
        size += parameter.numel() * parameter.element_size()
        if size >= BUCKET_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def synced_bytes(shared: int, experts: int, world: int, replicas: int, element: int = 4) -> int:
    """Bytes that one rank gives to all-reduce in a step: its gradients of `shared` parameters where there is another
    rank, and those of its `experts`' parameters where another rank holds the same experts.

    A ring then moves 2(n-1)/n times as many out of each of n ranks.
    """
    return element * (shared * (world > 1) + experts * (replicas > 1))
