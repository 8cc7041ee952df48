"""What feedforwards have in common: their parameters, their linear maps, and the activation between these."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_APPROXIMATE = {"gelu": "none", "gelu_new": "tanh"}


def activated(inner: Tensor, activation: str, gated: bool) -> Tensor:
    """What the last map of a feedforward reads [..., F] of what its first maps give, `inner` [..., F].

    Where the feedforward is `gated`, `inner` is [..., 2F]: F units whose activation multiplies the F others. Without
    gradients `inner` may be overwritten.
    """
    first, others = inner.chunk(2, -1) if gated else (inner, None)
    in_place = not torch.is_grad_enabled()
    if activation in _APPROXIMATE:
        gelu = torch.ops.aten.gelu_ if in_place else F.gelu
        first = gelu(first, approximate=_APPROXIMATE[activation])
    elif activation == "silu":
        first = F.silu(first, inplace=in_place)
    else:
        first = F.relu(first, inplace=in_place)
        if activation == "relu2":
            first = first.square_() if in_place else first.square()
    if others is None:
        return first
    return first.mul_(others) if in_place else first * others


def feedforward_parameters(
    axes: tuple[int, ...], width: int, inner: int, gated: bool, biased: bool
) -> dict[str, nn.Parameter | None]:
    """The parameters of a stack of feedforwards with these first `axes`, by name; None for a bias that is not there.

    The names come in the order of `up`, `up_bias`, `down`, `down_bias`, which files keep.
    """
    rows = inner * (2 if gated else 1)
    shapes = {"up": (rows, width), "up_bias": (rows,), "down": (width, inner), "down_bias": (width,)}
    return {
        name: nn.Parameter(torch.empty(*axes, *shape)) if biased or not name.endswith("bias") else None
        for name, shape in shapes.items()
    }


def mapped(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Write the linear map of `x` [N, in] by `weight` [in, out] and `bias` [out] to `out` [N, out]; returns `out`."""
    return torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)
