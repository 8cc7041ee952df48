"""The DEMix layer (paper, section 3.2).

Axes: E experts, B sequences of one expert, T positions, D width. Weights are stored in fp32 (or fp64) and cast to the
type of the activations for each matrix product.
"""

from typing import Any

import torch
from torch import Tensor, nn

from demix.model.layers.feedforward import activated, feedforward_parameters, mapped
from demix.model.layers.operators import operator
from demix.model.layers.routed import Auxiliary

# Rows of one expert in one product without gradients. Their inner states fit into the cache of a core.
ROWS_AT_ONCE = 512


class DEMixLayer(nn.Module):
    """One feedforward per expert (paper, section 3.2). The first axis of the input chooses the expert (Eq. 3).

    The weights of all experts are stacked: `up` [E, F, D] and `down` [E, D, F] for F `inner` units, 4D by default. A
    `gated` feedforward has an `up` of [E, 2F, D], the rows of the units that the activation takes first.
    """

    up: nn.Parameter
    up_bias: nn.Parameter | None
    down: nn.Parameter
    down_bias: nn.Parameter | None

    def __init__(
        self,
        experts: int,
        width: int,
        activation: str = "gelu",
        *,
        inner: int | None = None,
        gated: bool = False,
        biased: bool = True,
    ):
        super().__init__()
        self.activation, self.gated, inner = activation, gated, inner or 4 * width
        for name, parameter in feedforward_parameters((experts,), width, inner, gated, biased).items():
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor, auxiliary: list[Auxiliary] | None = None) -> Tensor:
        """Map `x` [E, B, T, D] to [E, B, T, D]. Every expert gets an `x` of [1, B, T, D].

        The layer adds nothing to `auxiliary`: the domain chooses the expert, so there is no router to train.
        """
        E, (_, B, T, D) = len(self.up), x.shape
        if not torch.is_grad_enabled():
            return self._without_gradients(x.flatten(1, 2)).view(E, B, T, D)
        inner = _stacked_linear(x.expand(E, B, T, D).reshape(E, B * T, D), self.up, self.up_bias)
        inner = activated(inner, self.activation, self.gated)
        mixed: Tensor = _stacked_linear(inner, self.down, self.down_bias)
        return mixed.view(E, B, T, D)

    def _without_gradients(self, x: Tensor) -> Tensor:
        """Map `x` [E or 1, N, D] to [E, N, D], some rows of one expert at a time, whose inner states stay in the cache.

        To allocate the inner states of all experts takes as long as to fill them.
        """
        E, (_, N, D) = len(self.up), x.shape
        output, rows = x.new_empty(E, N, D), ROWS_AT_ONCE if x.device.type == "cpu" else max(1, N)
        space = x.new_empty(min(rows, N), self.up.shape[1])
        for e in range(E):
            up, down = (weight[e].to(x.dtype).T for weight in (self.up, self.down))
            biases = [None if bias is None else bias[e].to(x.dtype) for bias in (self.up_bias, self.down_bias)]
            for first in range(0, N, rows):
                some = x[e if len(x) > 1 else 0, first : first + rows]
                inner = activated(mapped(some, up, biases[0], space[: len(some)]), self.activation, self.gated)
                mapped(inner, down, biases[1], output[e, first : first + rows])
        return output


def _empty_output(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:2], weight.shape[1])


# Operators of our own, because the compiler copies a tensor whenever a part of it is written.
@operator("stacked_linear", _empty_output)
def _stacked_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Each expert's linear map of `x` [E, N, in] by `weight` [E, out, in] and `bias` [E, out] or none: [E, N, out].

    The code loops over experts, because bmm is slower on a CPU from 128 tokens per expert. Each expert's output and
    gradients are written to their place in one tensor, where autograd would stack copies. Each expert's weight is cast
    when it is used, so that no cast copy of all weights exists.
    """
    output = x.new_empty(*x.shape[:2], weight.shape[1])
    for e in range(len(x)):
        mapped(x[e], weight[e].to(x.dtype).T, None if bias is None else bias[e].to(x.dtype), output[e])
    return output


def _empty_gradients(incoming: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight), weight.new_empty(weight.shape[:2])


@operator("stacked_linear_backward", _empty_gradients)
def _stacked_linear_backward(incoming: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `_stacked_linear` for `x`, `weight` and a bias."""
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
    ctx.biased = inputs[2] is not None


def _gradients(ctx: Any, incoming: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    for_x, for_weight, for_bias = _stacked_linear_backward(incoming, *ctx.saved_tensors)
    return for_x, for_weight, for_bias if ctx.biased else None


torch.library.register_autograd("demix::stacked_linear", _gradients, setup_context=_keep)
