"""The optimizers of a training: which parameters each updates, on which rank, and at which learning rate."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

from demix.config.architecture import Architecture
from demix.config.counts import stacked_maps
from demix.run.placement import owners_of
from demix.train.schedule import Optimization
from demix.train.state import Row

# The weights of linear maps in layers. A router is not such a map: it has one row per expert.
_MATRICES = ("attention.qkv.weight", "attention.out.weight", "feedforward.up", "feedforward.down")
# The coefficients of Muon's iteration a·X + b·XXᵀX + c·(XXᵀ)²X, which moves singular values from 0-1 to 0.7-1.2.
A, B, C = 3.4445, -4.7750, 2.0315
# The maximum number of iterations on squares without the matrix; each multiplies the error of a square near 0 by 12.
BY_SQUARES = 5
# Muon's constants (Jordan et al. 2024): the decay of the mean of gradients, and the number of Newton-Schulz iterations.
MOMENTUM, ITERATIONS = 0.95, 5
# The paper's constants of AdamW.
PAPER = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-7}
# The scale of the loss is halved when gradients overflow, and doubled after GROW_AFTER updates without overflow.
FIRST_SCALE, LAST_SCALE, GROW_AFTER = 2.0**16, 2.0**-4, 1000

Group = Literal["matrices", "embeddings", "head", "bigrams", "value_embeddings", "rest"]
Kept = dict[str, Tensor]
Ranks = dist.ProcessGroup | None
# The number of rows of each matrix in a parameter that stacks several.
Maps = Mapping[nn.Parameter, tuple[int, ...]]


def group_of(name: str) -> Group:
    """The group of the parameter `name` (`demix.config.training.OptimizerSettings`)."""
    if name.startswith("blocks.") and name.endswith(_MATRICES):
        return "matrices"
    if name == "output_embedding":
        return "head"
    if name.startswith("bigrams.") and name.endswith("table"):
        return "bigrams"
    if name == "value_embedding":
        return "value_embeddings"
    return "embeddings" if name.endswith("_embedding") else "rest"


class Optimizers:
    """One optimizer for each group of the named `parameters`, all with the same schedule.

    `holders` lists the other ranks that have a parameter, if any. Of all ranks that have a parameter, only one keeps
    its moments, updates it and sends it to the others: always for a matrix under Muon, and with `shard_optimizer` for
    every parameter. This is stage 1 of ZeRO (Rajbhandari et al. 2020, section 5.1), by whole parameters. `architecture`
    is the model's.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimization: Optimization,
        architecture: Architecture,
        holders: Callable[[str], Ranks] = lambda _: None,
    ):
        updates, decay = optimization.optimizer, optimization.weight_decay
        below = stacked_maps(architecture)
        maps = {one: rows for name, one in parameters.items() for end, rows in below.items() if name.endswith(end)}
        groups: dict[Group, list[nn.Parameter]] = {}
        for name, parameter in parameters.items():
            groups.setdefault(group_of(name) if updates else "rest", []).append(parameter)
        # The groups with their factors of the learning rate.
        self.optimizers: list[tuple[AdamW | Muon, float]] = []
        for group, members in groups.items():
            ratio = 1.0
            if updates and group != "rest":
                ratio = getattr(updates, group) or updates.embeddings
            decayed = decay if updates is None or updates.decay == "all" or group == "matrices" else 0.0
            one: AdamW | Muon = AdamW(members, decayed)
            if updates and updates.kind == "muon" and group == "matrices":
                one = Muon(members, decayed, maps)
            elif updates:
                one = AdamW(members, decayed, beta1=updates.beta1, beta2=updates.beta2, eps=updates.epsilon)
            self.optimizers.append((one, ratio))
        self._of = {parameter: optimizer for optimizer, _ in self.optimizers for parameter in optimizer.parameters}
        self._owners = self._shared_out(
            {
                one: holders(name)
                for name, one in parameters.items()
                if optimization.shard_optimizer or isinstance(self._of[one], Muon)
            }
        )
        self._others = {
            one for group, owners in self._owners.items() for one, owner in owners.items() if owner != group.rank()
        }
        for optimizer, _ in self.optimizers:
            optimizer.parameters = [one for one in optimizer.parameters if one not in self._others]

    def _shared_out(self, holders: Mapping[nn.Parameter, Ranks]) -> dict[dist.ProcessGroup, dict[nn.Parameter, int]]:
        """For each group of ranks, the rank that updates each of its parameters, so that moments are divided evenly.

        All ranks of a group list its parameters in the same order.
        """
        found: dict[dist.ProcessGroup, dict[nn.Parameter, int]] = {}
        for group in {group: None for group in holders.values() if group is not None}:
            members = [parameter for parameter, ranks in holders.items() if ranks is group]
            sizes = [parameter.numel() * len(self._of[parameter].means) for parameter in members]
            found[group] = dict(zip(members, owners_of(sizes, group.size()), strict=True))
        return found

    def step(self, learning_rate: float) -> None:
        """Update every parameter with its gradient, and send it to the other ranks that have it."""
        for optimizer, ratio in self.optimizers:
            optimizer.step(learning_rate * ratio)
        works = [
            dist.broadcast(parameter.data, group=group, group_src=owner, async_op=True)
            for group, owners in self._owners.items()
            for parameter, owner in owners.items()
        ]
        for work in works:
            work.wait()

    def gathered(self) -> dict[nn.Parameter, Kept]:
        """The optimizer state of each parameter, on the rank that writes it. All ranks call this method."""
        state = {parameter: kept for optimizer, _ in self.optimizers for parameter, kept in optimizer.state.items()}
        shared = {parameter for owners in self._owners.values() for parameter in owners}
        found = {parameter: kept for parameter, kept in state.items() if parameter not in shared}
        for group, owners in self._owners.items():
            there = torch.tensor([parameter in state for parameter in owners], dtype=torch.int8)
            there = there.to(next(iter(owners)).device)
            dist.all_reduce(there, group=group)
            for (parameter, owner), known in zip(owners.items(), there.tolist(), strict=True):
                if not known:
                    continue
                kept = state[parameter] if parameter in state else self._of[parameter].begin(parameter)
                for tensor in kept.values():
                    dist.broadcast(tensor, group=group, group_src=owner)
                if group.rank() == 0:
                    found[parameter] = {name: tensor.cpu() for name, tensor in kept.items()}
        return found

    def resume(self, parameter: nn.Parameter, kept: Kept) -> None:
        """Restore the optimizer state of a parameter, on the rank that updates it."""
        if parameter not in self._others:
            self._of[parameter].state[parameter] = {name: tensor.to(parameter.device) for name, tensor in kept.items()}


class AdamW:
    """`torch.optim.AdamW` (Loshchilov and Hutter 2019) with fused updates, by default with the constants of `PAPER`.

    torch's class would import torch's compiler, which delays the start of each training by over a second. After a
    parameter's first update, `state` holds `step`, the number of its updates, and the means `exp_avg` and `exp_avg_sq`.
    """

    means = ("exp_avg", "exp_avg_sq")

    def __init__(self, parameters: Iterable[nn.Parameter], weight_decay: float, **others: float):
        self.parameters = list(parameters)
        self.constants: dict[str, Any] = PAPER | {"weight_decay": weight_decay, **others}
        self.state: dict[nn.Parameter, Kept] = {}

    def begin(self, parameter: nn.Parameter) -> Kept:
        """The state of a parameter before its first update."""
        count = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return {"step": count} | {name: torch.zeros_like(parameter, requires_grad=False) for name in self.means}

    def step(self, learning_rate: float) -> None:
        """Update every parameter by its gradient."""
        for parameter in self.parameters:
            if parameter not in self.state:
                self.state[parameter] = self.begin(parameter)
        steps, averages, squares = (
            [self.state[parameter][name] for parameter in self.parameters] for name in ("step", *self.means)
        )
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        with torch.no_grad():
            how: dict[str, Any] = {"lr": learning_rate, "fused": True, "amsgrad": False, "maximize": False}
            adamw([*self.parameters], gradients, averages, squares, [], steps, **how, **self.constants)


class Muon:
    """Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks").

    It updates matrices [..., rows, columns], each in a stack separately, like `torch.optim.Muon`: by the orthogonalised
    Nesterov momentum, times the square root of rows/columns if there are more rows, times the learning rate. After a
    parameter's first update, `state` holds the mean of its gradients, `momentum`.
    """

    means = ("momentum",)

    def __init__(self, parameters: Iterable[nn.Parameter], weight_decay: float, maps: Maps):
        self.parameters, self.weight_decay, self.maps = list(parameters), weight_decay, maps
        self.state: dict[nn.Parameter, Kept] = {}

    def begin(self, parameter: nn.Parameter) -> Kept:
        """The state of a parameter before its first update."""
        return {name: torch.zeros_like(parameter, requires_grad=False) for name in self.means}

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update every parameter with its gradient, which is overwritten by the orthogonalised momentum."""
        for parameter in self.parameters:
            if (gradient := parameter.grad) is None:
                continue
            if parameter not in self.state:
                self.state[parameter] = self.begin(parameter)
            mean = self.state[parameter]["momentum"].lerp_(gradient, 1 - MOMENTUM)
            gradient.lerp_(mean, MOMENTUM)
            for stack, update in self._matrices(parameter, gradient):
                scale = max(1.0, stack.shape[-2] / stack.shape[-1]) ** 0.5
                update.copy_(orthogonalised(update, ITERATIONS))
                stack.mul_(1 - learning_rate * self.weight_decay).add_(update, alpha=-learning_rate * scale)

    def _matrices(self, parameter: nn.Parameter, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each map in a parameter, its stack [matrices, rows, columns], and the stack of its gradient."""
        rows = [*self.maps.get(parameter, parameter.shape[-2:-1])]
        parts = (torch.split(whole.view(-1, *whole.shape[-2:]), rows, 1) for whole in (parameter, gradient))
        return zip(*parts, strict=True)


def orthogonalised(matrices: Tensor, iterations: int) -> Tensor:
    """`matrices` [..., rows, columns] with all singular values near 1, after `iterations` Newton-Schulz iterations.

    Like `torch.optim.Muon`, a GPU uses bf16, except for float64.
    """
    half = matrices.is_cuda and matrices.dtype != torch.float64
    tall = matrices.shape[-2] > matrices.shape[-1]
    stack = matrices.view(-1, *matrices.shape[-2:])
    x: Tensor = (stack.mT if tall else stack).to(torch.bfloat16 if half else matrices.dtype)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    # This needs fewer operations for a wide matrix, but more digits than bf16 has.
    if not half and 2 * x.shape[-1] > 3 * x.shape[-2]:
        for before in range(0, iterations, BY_SQUARES):
            x = _by_squares(x, min(BY_SQUARES, iterations - before))
    else:
        for _ in range(iterations):
            square = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=B, alpha=C), x, beta=A)
    return (x.mT if tall else x).to(matrices.dtype).view(matrices.shape)


def _by_squares(x: Tensor, iterations: int) -> Tensor:
    """`x` [matrices, m, n] after `iterations`, each of which multiplies it by a polynomial of its square.

    X becomes P·X and XXᵀ becomes P·XXᵀ·P for P = a + b·XXᵀ + c·(XXᵀ)², so that X itself is multiplied once.
    """
    square, product = x @ x.mT, None
    for left in range(iterations)[::-1]:
        factor = torch.baddbmm(square, square, square, beta=B, alpha=C)
        factor.diagonal(dim1=-2, dim2=-1).add_(A)
        product = factor if product is None else factor @ product
        if left:
            square = factor @ square @ factor
    return x if product is None else product @ x


class LossScale:
    """The factor of the loss in training with numbers of type `dtype`: 1, except in fp16, whose small gradients vanish.

    `unscathed` counts the updates since the factor changed. Metrics contain the factor after each update, so no other
    state is needed.
    """

    def __init__(self, dtype: torch.dtype):
        self.dynamic = dtype == torch.float16
        self.factor, self.unscathed = FIRST_SCALE if self.dynamic else 1.0, 0

    @property
    def metrics(self) -> Row:
        """The values of the scale in a row of metrics."""
        return {"loss_scale": self.factor} if self.dynamic else {}

    def resume(self, rows: Iterable[Row]) -> None:
        """Restore the scale from the `rows` of earlier updates."""
        for factor in (row["loss_scale"] for row in rows if "loss_scale" in row):
            self.unscathed = self.unscathed + 1 if factor == self.factor else 0
            self.factor = factor

    def grow(self) -> None:
        """Record an update without overflow."""
        self.unscathed += 1
        if self.dynamic and self.unscathed == GROW_AFTER:
            self.factor, self.unscathed = self.factor * 2.0, 0

    def shrink(self) -> tuple[str, str] | None:
        """Record gradients that are not finite. Returns cause and cure if a smaller scale would not help."""
        if not self.dynamic:
            return "the gradient is not finite", "lower the learning rate"
        self.factor, self.unscathed = self.factor * 0.5, 0
        if self.factor < LAST_SCALE:
            return "fp16 overflows at every scale of the loss", "use bf16 or fp32, or a lower learning rate"
        return None
