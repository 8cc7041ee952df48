"""Norms, in the type of the activations."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Norm = nn.LayerNorm | nn.RMSNorm


def norm_of(kind: str, width: int, epsilon: float) -> Norm:
    """The norm `kind` of `width` units: layer (Ba et al. 2016) or rms (Zhang and Sennrich 2019)."""
    return nn.RMSNorm(width, epsilon) if kind == "rms" else nn.LayerNorm(width, epsilon)


def normed(x: Tensor, norm: Norm) -> Tensor:
    """The norm of `x` [..., D], computed in the type of `x`."""
    weight = norm.weight.to(x.dtype)
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x, norm.normalized_shape, weight, norm.bias.to(x.dtype), norm.eps)
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.rms_norm(x, norm.normalized_shape, weight, norm.eps)
    on_cpu: Callable[[Tensor, Tensor, float], Tensor] = _RMSNorm.apply
    return on_cpu(x, weight, norm.eps or torch.finfo(x.dtype).eps)


class _RMSNorm(torch.autograd.Function):
    """x·w / sqrt(mean(x²) + ε) for `x` [..., D] and `weight` [D], which torch has no kernel for on a CPU.

    The mean is exact to fp32. With y = x·s, s = 1/sqrt(mean(x²) + ε) and incoming g the gradients are
    s·(g·w - y·mean(g·w·y)) for x and the sum of g·y for w.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=exact)
        scale = (length.square() / x.shape[-1] + epsilon).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        normed: Tensor = (x * scale.to(x.dtype)).mul_(weight)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        product = (incoming * x).view(-1, x.shape[-1])
        for_weight = scale.to(x.dtype).view(1, -1) @ product
        mean = (product @ weight).view(scale.shape) * scale**3 / x.shape[-1]
        for_x = (incoming * weight).mul_(scale.to(x.dtype)).addcmul_(x, mean.to(x.dtype), value=-1)
        return for_x, for_weight[0], None
