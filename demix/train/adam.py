"""AdamW (Loshchilov and Hutter 2019), as torch computes it."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw


class AdamW:
    """`torch.optim.AdamW` with fused updates, by default with the constants of the paper's training.

    The class of torch imports torch's compiler, which takes over a second of the start of each training. `state` holds
    for each parameter after its first update `step`, the number of its updates, and the means `exp_avg` and
    `exp_avg_sq`.
    """

    means = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-7,
    ):
        self.parameters, self.weight_decay = list(parameters), weight_decay
        self.betas, self.epsilon = betas, epsilon
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    def begin(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What is kept of a parameter before its first update."""
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
            adamw(
                [*self.parameters], gradients, averages, squares, [], steps, fused=True, amsgrad=False,
                beta1=self.betas[0], beta2=self.betas[1], lr=learning_rate, weight_decay=self.weight_decay,
                eps=self.epsilon, maximize=False,
            )  # fmt: skip
