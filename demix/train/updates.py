"""The optimizers of a training: which parameters each updates, and at which learning rate."""

from collections.abc import Callable, Mapping
from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn

from demix.config.architecture import Architecture
from demix.config.counts import stacked_maps
from demix.train.adam import AdamW
from demix.train.muon import Muon
from demix.train.schedule import Optimization
from demix.train.sharded import Owners

# The weights of linear maps in blocks. A router is no such map: it has a row for each expert.
_MATRICES = ("attention.qkv.weight", "attention.out.weight", "feedforward.up", "feedforward.down")
Group = Literal["matrices", "embeddings", "head", "rest"]


def group_of(name: str) -> Group:
    """The group of the parameter `name` (`demix.config.training.Updates`)."""
    if name.startswith("blocks.") and name.endswith(_MATRICES):
        return "matrices"
    if name == "output_embedding":
        return "head"
    return "embeddings" if name.endswith("_embedding") else "rest"


class Optimizers:
    """One optimizer for each group of the named `parameters`, all with the same schedule.

    `holders` says which ranks have a parameter beside this one, if any. With `shard_optimizer` one of these ranks
    updates it. `architecture` is that of the model.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimization: Optimization,
        architecture: Architecture,
        holders: Callable[[str], dist.ProcessGroup | None] = lambda _: None,
    ):
        updates, decay = optimization.optimizer, optimization.weight_decay
        below = stacked_maps(architecture)
        maps = {one: rows for name, one in parameters.items() for end, rows in below.items() if name.endswith(end)}
        groups: dict[tuple[Group, dist.ProcessGroup | None], list[nn.Parameter]] = {}
        for name, parameter in parameters.items():
            key = ("rest", None) if updates is None else (group_of(name), holders(name))
            groups.setdefault(key, []).append(parameter)
        sharded = optimization.shard_optimizer
        self.optimizers: list[tuple[AdamW | Muon, float]] = []
        for (group, ranks), members in groups.items():
            ratio = getattr(updates, group) if updates and group != "rest" else 1.0
            if updates is None:
                self.optimizers.append((AdamW(members, decay), ratio))
                continue
            decayed = decay if updates.decay == "all" or group == "matrices" else 0.0
            if updates.kind == "muon" and group == "matrices":
                # One rank updates a sharded matrix, and sends the matrix.
                together = None if sharded else ranks
                muon = Muon(members, decayed, updates.momentum, updates.iterations, together, maps)
                self.optimizers.append((muon, ratio))
            else:
                adam = AdamW(members, decayed, (updates.beta1, updates.beta2), updates.epsilon)
                self.optimizers.append((adam, ratio))
        self._of = {parameter: optimizer for optimizer, _ in self.optimizers for parameter in optimizer.parameters}
        with_it = {parameter: holders(name) if sharded else None for name, parameter in parameters.items()}
        self.owners = Owners(with_it, {one: one.numel() * len(self._of[one].means) for one in with_it})
        for optimizer, _ in self.optimizers:
            optimizer.parameters = [one for one in optimizer.parameters if self.owners.updates(one)]

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """What the optimizers of this rank keep of each parameter."""
        return {parameter: kept for optimizer, _ in self.optimizers for parameter, kept in optimizer.state.items()}

    def gathered(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """What all ranks keep of each parameter, on the rank that writes it. All ranks call this method."""
        return dict(self.owners.gathered(self.state, lambda parameter: self._of[parameter].begin(parameter)))

    def resume(self, parameter: nn.Parameter, kept: dict[str, Tensor]) -> None:
        """Go on from what was kept of a parameter, on the rank that updates it."""
        if self.owners.updates(parameter):
            self._of[parameter].state[parameter] = {name: tensor.to(parameter.device) for name, tensor in kept.items()}

    def step(self, learning_rate: float) -> None:
        """Update every parameter by its gradient."""
        for optimizer, ratio in self.optimizers:
            optimizer.step(learning_rate * ratio)
        self.owners.share()
