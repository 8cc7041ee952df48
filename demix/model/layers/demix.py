"""The DEMix layer (paper, section 3.2).

Axes: E experts, B sequences of one expert, T positions, D width. Weights are stored in fp32 (or fp64) and cast to the
type of the activations for each matrix product.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demix.model.layers.operators import operator
from demix.model.layers.routed import Auxiliary

# Rows of one expert in one product without gradients. Their inner states fit into the cache of a core.
ROWS_AT_ONCE = 512


class DEMixLayer(nn.Module):
    """One feedforward per expert (paper, section 3.2). The first axis of the input chooses the expert (Eq. 3).

    The weights of all experts are stacked: `up` [E, 4D, D], `down` [E, D, 4D].
    """

    def __init__(self, experts: int, width: int, activation: str = "gelu"):
        super().__init__()
        self.approximate = {"gelu": "none", "gelu_new": "tanh"}[activation]
        self.up = nn.Parameter(torch.empty(experts, 4 * width, width))
        self.up_bias = nn.Parameter(torch.empty(experts, 4 * width))
        self.down = nn.Parameter(torch.empty(experts, width, 4 * width))
        self.down_bias = nn.Parameter(torch.empty(experts, width))

    def forward(self, x: Tensor, auxiliary: list[Auxiliary] | None = None) -> Tensor:
        """Map `x` [E, B, T, D] to [E, B, T, D] with the exact (erf) GELU, or with that by tanh for `gelu_new`.

        Every expert gets an `x` of [1, B, T, D].

        The layer adds nothing to `auxiliary`: the domain chooses the expert, so there is no router to train.
        """
        E, (_, B, T, D) = len(self.up), x.shape
        if not torch.is_grad_enabled():
            return self._without_gradients(x.flatten(1, 2)).view(E, B, T, D)
        inner = _stacked_linear(x.expand(E, B, T, D).reshape(E, B * T, D), self.up, self.up_bias)
        inner = F.gelu(inner, approximate=self.approximate)
        mixed: Tensor = _stacked_linear(inner, self.down, self.down_bias)
        return mixed.view(E, B, T, D)

    def _without_gradients(self, x: Tensor) -> Tensor:
        """Map `x` [E or 1, N, D] to [E, N, D], some rows of one expert at a time, whose inner states stay in the cache.

        To allocate the inner states of all experts takes as long as to fill them.
        """
        E, (_, N, D) = len(self.up), x.shape
        output, rows = x.new_empty(E, N, D), ROWS_AT_ONCE if x.device.type == "cpu" else max(1, N)
        space = x.new_empty(min(rows, N), 4 * D)
        for e in range(E):
            up, down = self.up[e].to(x.dtype).T, self.down[e].to(x.dtype).T
            up_bias, down_bias = self.up_bias[e].to(x.dtype), self.down_bias[e].to(x.dtype)
            for first in range(0, N, rows):
                some = x[e if len(x) > 1 else 0, first : first + rows]
                inner = torch.addmm(up_bias, some, up, out=space[: len(some)])
                torch.ops.aten.gelu_(inner, approximate=self.approximate)
                torch.addmm(down_bias, inner, down, out=output[e, first : first + rows])
        return output


def _empty_output(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:2], weight.shape[1])


# Operators of our own, because the compiler copies a tensor whenever a part of it is written.
@operator("stacked_linear", _empty_output)
def _stacked_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each expert's linear map of `x` [E, N, in] by `weight` [E, out, in] and `bias` [E, out]: [E, N, out].

    The code loops over experts, because bmm is slower on a CPU from 128 tokens per expert. Each expert's output and
    gradients are written to their place in one tensor, where autograd would stack copies. Each expert's weight is cast
    when it is used, so that no cast copy of all weights exists.
    """
    output = x.new_empty(*x.shape[:2], weight.shape[1])
    for e in range(len(x)):
        torch.addmm(bias[e].to(x.dtype), x[e], weight[e].to(x.dtype).T, out=output[e])
    return output


def _empty_gradients(incoming: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight), weight.new_empty(weight.shape[:2])


@operator("stacked_linear_backward", _empty_gradients)
def _stacked_linear_backward(incoming: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `_stacked_linear` for `x`, `weight` and `bias`."""
    for_x, for_weight = x.new_empty(x.shape), torch.empty_like(weight)
    for e in range(len(x)):
        torch.mm(incoming[e], weight[e].to(x.dtype), out=for_x[e])
        if weight.dtype == x.dtype:
            torch.mm(incoming[e].T, x[e], out=for_weight[e])
        else:
            for_weight[e] = incoming[e].T @ x[e]
    return for_x, for_weight, incoming.sum(1, dtype=weight.dtype)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _gradients(ctx: Any, incoming: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = _stacked_linear_backward(incoming, *ctx.saved_tensors)
    return gradients


torch.library.register_autograd("demix::stacked_linear", _gradients, setup_context=_keep)
