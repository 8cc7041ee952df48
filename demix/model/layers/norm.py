"""Layer normalisation in the type of the activations."""

import torch.nn.functional as F
from torch import Tensor, nn


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Layer normalisation of `x` [..., D], computed in the type of `x`."""
    return F.layer_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps)
