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

    `holders` says which ranks have a parameter beside this one, if any. `architecture` is that of the model.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimization: Optimization,
        architecture: Architecture,
        holders: Callable[[str], dist.ProcessGroup | None] = lambda _: None,
    ):
        self.optimizers: list[tuple[AdamW | Muon, float]] = []
        updates, decay = optimization.optimizer, optimization.weight_decay
        if updates is None:
            self.optimizers.append((AdamW(parameters.values(), decay), 1.0))
            return
        below = stacked_maps(architecture)
        maps = {one: rows for name, one in parameters.items() for end, rows in below.items() if name.endswith(end)}
        groups: dict[tuple[Group, dist.ProcessGroup | None], list[nn.Parameter]] = {}
        for name, parameter in parameters.items():
            groups.setdefault((group_of(name), holders(name)), []).append(parameter)
        for (group, ranks), members in groups.items():
            ratio = 1.0 if group == "rest" else getattr(updates, group)
            decayed = decay if updates.decay == "all" or group == "matrices" else 0.0
            if updates.kind == "muon" and group == "matrices":
                muon = Muon(members, decayed, updates.momentum, updates.iterations, ranks, maps)
                self.optimizers.append((muon, ratio))
            else:
                adam = AdamW(members, decayed, (updates.beta1, updates.beta2), updates.epsilon)
                self.optimizers.append((adam, ratio))

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """What the optimizers keep of each parameter."""
        return {parameter: kept for optimizer, _ in self.optimizers for parameter, kept in optimizer.state.items()}

    def resume(self, parameter: nn.Parameter, kept: dict[str, Tensor]) -> None:
        """Go on from what was kept of a parameter."""
        for optimizer, _ in self.optimizers:
            if any(parameter is one for one in optimizer.parameters):
                optimizer.state[parameter] = kept

    def step(self, learning_rate: float) -> None:
        """Update every parameter by its gradient."""
        for optimizer, ratio in self.optimizers:
            optimizer.step(learning_rate * ratio)
