"""Optimizers' moments, each parameter's on one of the ranks that have it.

This is stage 1 of ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", section 5.1), by whole parameters.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from demix.run.placement import owners_of

Kept = dict[str, Tensor]


class Owners:
    """Which rank of those that have a parameter updates it, and alone keeps its moments.

    `groups` has for each parameter the ranks that have it, None where this rank alone does. `sizes` are those of what
    is kept of each parameter. All ranks of a group name its parameters in the same order.
    """

    def __init__(self, groups: Mapping[nn.Parameter, dist.ProcessGroup | None], sizes: Mapping[nn.Parameter, int]):
        self.groups: dict[dist.ProcessGroup, dict[nn.Parameter, int]] = {}
        for group in {group: None for group in groups.values() if group is not None}:
            members = [parameter for parameter, ranks in groups.items() if ranks is group]
            owners = owners_of([sizes[parameter] for parameter in members], group.size())
            self.groups[group] = dict(zip(members, owners, strict=True))
        self._others = {
            parameter for group, owners in self.groups.items() for parameter, owner in owners.items()
            if owner != group.rank()
        }  # fmt: skip

    def updates(self, parameter: nn.Parameter) -> bool:
        """Whether this rank updates a parameter."""
        return parameter not in self._others

    def share(self) -> None:
        """Send each parameter from the rank that updated it to the others that have it."""
        works = [
            dist.broadcast(parameter.data, group=group, group_src=owner, async_op=True)
            for group, owners in self.groups.items()
            for parameter, owner in owners.items()
        ]
        for work in works:
            work.wait()

    def gathered(
        self, state: Mapping[nn.Parameter, Kept], begin: Callable[[nn.Parameter], Kept]
    ) -> Iterator[tuple[nn.Parameter, Kept]]:
        """What is kept of each parameter, on the first rank of its group, in the memory of its CPU.

        `state` is what this rank keeps. `begin` gives tensors as they are kept of a parameter, of any values. All ranks
        call this method.
        """
        shared = {parameter for owners in self.groups.values() for parameter in owners}
        yield from ((parameter, kept) for parameter, kept in state.items() if parameter not in shared)
        for group, owners in self.groups.items():
            there = torch.tensor([parameter in state for parameter in owners], dtype=torch.int8)
            there = there.to(next(iter(owners)).device)
            dist.all_reduce(there, group=group)
            for (parameter, owner), known in zip(owners.items(), there.tolist(), strict=True):
                if not known:
                    continue
                kept = state[parameter] if parameter in state else begin(parameter)
                for tensor in kept.values():
                    dist.broadcast(tensor, group=group, group_src=owner)
                if group.rank() == 0:
                    yield parameter, {name: tensor.cpu() for name, tensor in kept.items()}
