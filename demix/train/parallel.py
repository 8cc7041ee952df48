"""Data-parallel training: gradients of shared parameters are summed over all ranks, an expert's over its own ranks.

Sums need no division, because the loss before backward is divided by the tokens of the whole step, over all domains and
ranks (`demix.train.loop`). A single process runs the same code without a process group. The ranks of one domain have
consecutive numbers, so on a cluster most of an expert's communication stays inside a node (paper, section 3.4).
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

from demix.errors import DemixError
from demix.launch.local import end_with_launcher
from demix.model.device import own_device
from demix.run.placement import Placement
from demix.train.together import ending_together

log = logging.getLogger(__name__)

# Bytes of gradients per all-reduce: few enough to start during backward, and enough to make latency negligible.
BUCKET_BYTES = 25 << 20
# The maximum number of squares that a CPU sums in their own type; more would lose digits.
PIECE = 1 << 14
# A rank gives up after it has waited this long for another. The first collective waits for the slowest start.
TIMEOUT = timedelta(minutes=30)
# The type of `Tensor.register_post_accumulate_grad_hook`, which has no annotations in torch.
_Register = Callable[[Callable[[Tensor], None]], object]


@dataclass(frozen=True)
class World:
    """The processes (ranks) that train one model together, seen from one rank.

    `groups` holds the group of all ranks, and the group of the ranks with the same experts as this rank. None stands
    for a group of one rank. `writes_experts` is true on the first of the ranks with the same experts.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None)
    writes_experts: bool = True

    def placed(self, places: Sequence[Placement]) -> "World":
        """This world with the groups that the ranks' placements need. All ranks must call this method."""
        if self.size == 1:
            return self
        own = None
        # Every rank must participate in the creation of every group, in the same order.
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

    def owns(self, number: int) -> bool:
        """Whether this rank does the piece of work with this `number`; the ranks take turns."""
        return number % self.size == self.rank

    def wait(self) -> None:
        """Wait until all ranks have called this method."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def joined() -> Iterator[World]:
    """The world of this process, read from RANK and WORLD_SIZE.

    torchrun, `demix.launch.local` or a batch system sets these variables. Without them the world has one process. Only
    the first rank logs messages below a warning.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = own_device()
    if size == 1:
        yield World(device=device)
        return
    if rank:
        logging.getLogger().setLevel(logging.WARNING)
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if not os.environ.keys() & {"DEMIX_LAUNCHER", "DEMIX_FINGERPRINT"}:
        # If another program has set this variable, this process would wait for ranks that do not exist.
        message = "rank %d of %d waits at %s for the other ranks, at most %d minutes; if none exist, unset WORLD_SIZE"
        log.warning(message, rank, size, place, TIMEOUT.total_seconds() / 60)
    end_with_launcher()
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    except dist.DistError as error:
        cause = f"did not meet the other ranks at {place} ({str(error).splitlines()[0]})"
        cure = "start all ranks, or unset WORLD_SIZE to train without ranks"
        raise DemixError(f"rank {rank} of {size}", cause, cure) from error
    with ending_together(rank, size):
        world = World(rank, size, device)
        yield world
        # A rank that closes its connections while another still reads from them would end the other with an error.
        world.wait()
    # After an error the group is not destroyed, because this rank must exit at once; other ranks may wait for it.
    dist.destroy_process_group()


class _Bucket:
    """The gradients of several parameters in one flat tensor, which is sent to the ranks of `group` as a whole.

    With `counts` this rank adds the bucket to the gradient norm, so that each parameter is counted once.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup, counts: bool):
        self.parameters, self.group, self.counts, self.left = parameters, group, counts, 0
        self.flat = parameters[0].new_empty(sum(p.numel() for p in parameters))
        self.parts = [
            part.view_as(p)
            for p, part in zip(parameters, torch.split(self.flat, [p.numel() for p in parameters]), strict=True)
        ]


class GradientSync:
    """Sums gradients over the ranks that share a parameter, while the backward pass still computes other gradients.

    After the first backward pass of a step, gradients that other ranks need are views into flat buckets. All ranks send
    the buckets in the same fixed order. Gradients of parameters that only this rank has stay where they were written.
    `sent` counts the bytes given to all-reduce in this step.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], is_expert: Callable[[str], bool], world: World):
        self.world, self.sent = world, 0
        self.buckets: list[_Bucket] = []
        self._parameters = list(parameters.values())
        self._unshared: list[nn.Parameter] = []
        self._pending: list[dist.Work] = []
        self._next, self._armed = 0, False
        # Backward reaches the last layers first, so their gradients go into the first buckets.
        for expert, group in enumerate(world.groups):
            chosen = [p for name, p in parameters.items() if is_expert(name) == expert]
            if group is None:
                self._unshared += chosen
                continue
            for members in _bucketed(chosen[::-1]):
                bucket = _Bucket(members, group, world.writes_experts if expert else world.rank == 0)
                self.buckets.append(bucket)
                for parameter, part in zip(members, bucket.parts, strict=True):
                    register: _Register = parameter.register_post_accumulate_grad_hook
                    register(self._hook(bucket, part))

    def zero(self) -> None:
        """Begin a step without gradients: the next backward pass writes them, which is faster than adding to zeros."""
        self.sent = 0
        for parameter in self._parameters:
            parameter.grad = None

    def begin(self) -> None:
        """Send each bucket as soon as the next backward fills it. Call this before the last backward of a step."""
        self._armed, self._next = True, 0
        for bucket in self.buckets:
            bucket.left = len(bucket.parameters)

    def finish(self) -> None:
        """Send the remaining buckets, and wait until every gradient is the sum over its ranks."""
        # If a parameter has no gradient, the loss does not depend on it.
        for parameter in self._unshared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in self.buckets[self._next :]:
            for parameter, part in zip(bucket.parameters, bucket.parts, strict=True):
                if parameter.grad is None:
                    parameter.grad = part.zero_()
            self._send(bucket)
        for work in self._pending:
            work.wait()
        self._pending.clear()
        self._armed = False

    def clip(self, most: float, scale: float = 1.0) -> float:
        """Divide gradients by `scale`, then clip them to a global L2 norm of at most `most`.

        Returns the norm before clipping, equal on all ranks. In the norm, each expert counts once, even if several
        ranks hold it. If the norm is not finite, the gradients do not change.
        """
        unshared = [parameter.grad for parameter in self._unshared if parameter.grad is not None]
        counted = [bucket.flat for bucket in self.buckets if bucket.counts]
        square = _square([*counted, *(gradient.flatten() for gradient in unshared)])
        norm: float = self.world.sum([square])[0] ** 0.5 / scale
        if norm == norm and norm != float("inf"):
            factor = min(1.0, most / (norm + 1e-6)) / scale
            if factor != 1.0:
                for gradient in [*(bucket.flat for bucket in self.buckets), *unshared]:
                    gradient.mul_(factor)
        return norm

    def _hook(self, bucket: _Bucket, part: Tensor) -> Callable[[Tensor], None]:
        def filled(parameter: Tensor) -> None:
            if parameter.grad is not None and parameter.grad is not part:
                parameter.grad = part.copy_(parameter.grad)
            if not self._armed:
                return
            bucket.left -= 1
            while self._next < len(self.buckets) and self.buckets[self._next].left == 0:
                self._send(self.buckets[self._next])
                self._next += 1

        return filled

    def _send(self, bucket: _Bucket) -> None:
        self._pending.append(dist.all_reduce(bucket.flat, group=bucket.group, async_op=True))
        self.sent += bucket.flat.numel() * bucket.flat.element_size()


def _square(gradients: list[Tensor]) -> float:
    """The sum of squares of all elements, in float64 because there may be a billion of them."""
    if not gradients:
        return 0.0
    # A CPU sums a tensor's squares sequentially, and in fp32 four times as fast as in float64.
    if gradients[0].device.type == "cpu":
        gradients = [piece for gradient in gradients for piece in torch.split(gradient, PIECE)]
    return float(torch.stack(torch._foreach_norm(gradients)).double().square().sum())


def _bucketed(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    members: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        members.append(parameter)
        size += parameter.numel() * parameter.element_size()
        if size >= BUCKET_BYTES:
            yield members
            members, size = [], 0
    if members:
        yield members
