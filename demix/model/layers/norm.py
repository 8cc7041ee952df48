"""Norms, in the type of the activations."""

import torch.nn.functional as F
from torch import Tensor, nn

Norm = nn.LayerNorm | nn.RMSNorm


def norm_of(kind: str, width: int, epsilon: float) -> Norm:
    """The norm `kind` of `width` units: layer (Ba et al. 2016) or rms (Zhang and Sennrich 2019)."""
    return nn.RMSNorm(width, epsilon) if kind == "rms" else nn.LayerNorm(width, epsilon)


def normed(x: Tensor, norm: Norm) -> Tensor:
    """The norm of `x` [..., D], computed in the type of `x`."""
    weight = norm.weight.to(x.dtype)
    if isinstance(norm, nn.RMSNorm):
        return F.rms_norm(x, norm.normalized_shape, weight, norm.eps)
    return F.layer_norm(x, norm.normalized_shape, weight, norm.bias.to(x.dtype), norm.eps)
