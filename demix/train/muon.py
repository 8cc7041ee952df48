"""Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"): orthogonalised momentum."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

# Of the iteration a·X + b·XXᵀX + c·(XXᵀ)²X, which brings singular values from 0 to 1 to between 0.7 and 1.2.
A, B, C = 3.4445, -4.7750, 2.0315


class Muon:
    """Updates matrices [..., rows, columns], each of a stack by itself, by their momentum without its singular values.

    An update is as `torch.optim.Muon` has it: Nesterov momentum, orthogonalised, times the square root of rows/columns
    where there are more rows, times the learning rate. `state` holds for each parameter after its first update the mean
    of its gradients, `momentum`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], weight_decay: float, momentum: float, iterations: int):
        self.parameters, self.weight_decay = list(parameters), weight_decay
        self.momentum, self.iterations = momentum, iterations
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update every parameter by its gradient."""
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if parameter not in self.state:
                self.state[parameter] = {"momentum": torch.zeros_like(parameter, requires_grad=False)}
            mean = self.state[parameter]["momentum"].lerp_(gradient, 1 - self.momentum)
            update = orthogonalised(gradient.lerp(mean, self.momentum), self.iterations)
            scale = max(1.0, parameter.shape[-2] / parameter.shape[-1]) ** 0.5
            parameter.mul_(1 - learning_rate * self.weight_decay).add_(update, alpha=-learning_rate * scale)


def orthogonalised(matrices: Tensor, iterations: int) -> Tensor:
    """`matrices` [..., rows, columns] with all singular values near 1, by so many Newton-Schulz iterations.

    A GPU computes in bf16 what is no float64, as `torch.optim.Muon` does.
    """
    half = matrices.is_cuda and matrices.dtype != torch.float64
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = (matrices.mT if tall else matrices).to(torch.bfloat16 if half else matrices.dtype)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(iterations):
        square = x @ x.mT
        x = A * x + (B * square + C * square @ square) @ x
    return (x.mT if tall else x).to(matrices.dtype)
