"""AdamW (Loshchilov and Hutter 2019), as torch computes it."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw


class AdamW:
    """`torch.optim.AdamW` with fused updates and the constants of the paper's training, β = (0.9, 0.95) and ε = 1e-7.

    The class of torch imports torch's compiler, which takes over a second of the start of each training. `state` holds
    for each parameter after its first update `step`, the number of its updates, and the means `exp_avg` and
    `exp_avg_sq`. Weight decay reaches norms and biases too, as in the paper's fairseq.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], weight_decay: float):
        self.parameters, self.weight_decay = list(parameters), weight_decay
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    def step(self, learning_rate: float) -> None:
        """Update every parameter by its gradient."""
        for parameter in self.parameters:
            if parameter not in self.state:
                count = torch.zeros((), dtype=torch.float32, device=parameter.device)
                means = {name: torch.zeros_like(parameter, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] = {"step": count} | means
        steps, averages, squares = (
            [self.state[parameter][name] for parameter in self.parameters] for name in ("step", "exp_avg", "exp_avg_sq")
        )
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        with torch.no_grad():
            adamw(
                [*self.parameters], gradients, averages, squares, [], steps, fused=True, amsgrad=False, beta1=0.9,
                beta2=0.95, lr=learning_rate, weight_decay=self.weight_decay, eps=1e-7, maximize=False,
            )  # fmt: skip
