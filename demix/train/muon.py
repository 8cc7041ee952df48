"""Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"): orthogonalised momentum."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from demix.config.counts import orthogonalising_flops

# Of the iteration a·X + b·XXᵀX + c·(XXᵀ)²X, which brings singular values from 0 to 1 to between 0.7 and 1.2.
A, B, C = 3.4445, -4.7750, 2.0315
# So many of them go by squares without the matrix, as the error of a square near 0 grows twelvefold in each.
BY_SQUARES = 5


class Muon:
    """Updates matrices [..., rows, columns], each of a stack by itself, by their momentum without its singular values.

    An update is as `torch.optim.Muon` has it: Nesterov momentum, orthogonalised, times the square root of rows/columns
    where there are more rows, times the learning rate. `state` holds for each parameter after its first update the mean
    of its gradients, `momentum`. The ranks of `group` have the same parameters and gradients. `maps` has the rows of
    each matrix where several stand one below the other in a parameter.
    """

    means = ("momentum",)

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        weight_decay: float,
        momentum: float,
        iterations: int,
        group: dist.ProcessGroup | None = None,
        maps: Mapping[nn.Parameter, tuple[int, ...]] | None = None,
    ):
        self.parameters, self.weight_decay, self.maps = list(parameters), weight_decay, maps or {}
        self.momentum, self.iterations, self.group = momentum, iterations, group
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    def begin(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What is kept of a parameter before its first update."""
        return {name: torch.zeros_like(parameter, requires_grad=False) for name in self.means}

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update every parameter by its gradient, in whose place its orthogonalised momentum is left."""
        given = [(parameter, parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        for parameter, gradient in given:
            if parameter not in self.state:
                self.state[parameter] = self.begin(parameter)
            mean = self.state[parameter]["momentum"].lerp_(gradient, 1 - self.momentum)
            gradient.lerp_(mean, self.momentum)
        pairs = [pair for parameter, gradient in given for pair in self._matrices(parameter, gradient)]
        self._orthogonalise([update for _, update in pairs])
        for stack, update in pairs:
            scale = max(1.0, stack.shape[-2] / stack.shape[-1]) ** 0.5
            stack.mul_(1 - learning_rate * self.weight_decay).add_(update, alpha=-learning_rate * scale)

    def _matrices(self, parameter: nn.Parameter, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The stacks [matrices, rows, columns] of each of the maps of a parameter, and those of its gradient."""
        rows = [*self.maps.get(parameter, parameter.shape[-2:-1])]
        parts = (torch.split(whole.view(-1, *whole.shape[-2:]), rows, 1) for whole in (parameter, gradient))
        return zip(*parts, strict=True)

    def _orthogonalise(self, stacks: list[Tensor]) -> None:
        """Orthogonalise matrices in place, each on one rank of the group, which sends it to the others."""
        rank, ranks = (self.group.rank(), self.group.size()) if self.group else (0, 1)
        parts = [*shared_out(stacks, ranks)]
        for owner, part in parts:
            if owner == rank:
                part.copy_(orthogonalised(part, self.iterations))
        if not self.group:
            return
        sent = [part.contiguous() for _, part in parts]
        works = [
            dist.broadcast(whole, group=self.group, group_src=owner, async_op=True)
            for (owner, _), whole in zip(parts, sent, strict=True)
        ]
        for (_, part), whole, work in zip(parts, sent, works, strict=True):
            work.wait()
            if whole is not part:
                part.copy_(whole)


def shared_out(stacks: list[Tensor], ranks: int) -> Iterator[tuple[int, Tensor]]:
    """Parts of `stacks` [matrices, rows, columns] in their order, each with the one of `ranks` that orthogonalises it.

    No rank has more work than its share and one matrix.
    """
    costs = [orthogonalising_flops(*stack.shape[1:]) for stack in stacks]
    total, before = sum(cost * len(stack) for cost, stack in zip(costs, stacks, strict=True)), 0
    for cost, stack in zip(costs, stacks, strict=True):
        # The rank in whose share the middle of a matrix's work lies.
        owners = [ranks * (2 * before + (2 * number + 1) * cost) // (2 * total) for number in range(len(stack))]
        before += cost * len(stack)
        for owner, numbers in groupby(range(len(stack)), key=owners.__getitem__):
            first, *more = numbers
            yield owner, stack[first : first + 1 + len(more)]


def orthogonalised(matrices: Tensor, iterations: int) -> Tensor:
    """`matrices` [..., rows, columns] with all singular values near 1, by so many Newton-Schulz iterations.

    A GPU computes in bf16 what is no float64, as `torch.optim.Muon` does.
    """
    half = matrices.is_cuda and matrices.dtype != torch.float64
    tall = matrices.shape[-2] > matrices.shape[-1]
    stack = matrices.view(-1, *matrices.shape[-2:])
    x: Tensor = (stack.mT if tall else stack).to(torch.bfloat16 if half else matrices.dtype)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    # Fewer operations for a wide matrix, and too few digits for bf16.
    if not half and 2 * x.shape[-1] > 3 * x.shape[-2]:
        for before in range(0, iterations, BY_SQUARES):
            x = _by_squares(x, min(BY_SQUARES, iterations - before))
    else:
        for _ in range(iterations):
            square = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=B, alpha=C), x, beta=A)
    return (x.mT if tall else x).to(matrices.dtype).view(matrices.shape)


def _by_squares(x: Tensor, iterations: int) -> Tensor:
    """`x` [matrices, m, n] after so many iterations, each of which multiplies it by a polynomial of its square.

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
