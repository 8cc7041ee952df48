"""The DEMix layer and the attention it stands beside.

Axes: E experts, B sequences of one expert, T positions, D width. Weights are kept in fp32 (or fp64) and
cast to the activations' type at the matmul.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`x` [..., in] through `weight` [out, in] and `bias` [out], computed in the type of `x`."""
    return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))


class DEMixLayer(nn.Module):
    """One feedforward per expert, chosen by the first axis of its input (paper, section 3, Eq. 3-5).

    Weights are stacked: `up` [E, 4D, D], `down` [E, D, 4D].
    """

    def __init__(self, experts: int, width: int):
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, 4 * width, width))
        self.up_bias = nn.Parameter(torch.empty(experts, 4 * width))
        self.down = nn.Parameter(torch.empty(experts, width, 4 * width))
        self.down_bias = nn.Parameter(torch.empty(experts, width))

    def forward(self, x: Tensor) -> Tensor:
        """`x` [E, B, T, D] -> [E, B, T, D], with the exact (erf) GELU; one of [1, B, T, D] is given to every expert."""
        sequences = x.expand(self.up.shape[0], -1, -1, -1).unbind(0)
        # Unbound, not indexed: backward then makes one stacked gradient and not one for each expert. And a loop, not
        # bmm, which is slower on CPU from 128 tokens an expert on.
        weights = (w.to(x.dtype).unbind(0) for w in (self.up, self.up_bias, self.down, self.down_bias))
        return torch.stack(
            [
                F.linear(F.gelu(F.linear(tokens, up, up_bias)), down, down_bias)
                for tokens, up, up_bias, down, down_bias in zip(sequences, *weights, strict=True)
            ]
        )


class Attention(nn.Module):
    """Causal multi-head self-attention, shared by all experts."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [E, B, T, D] -> [E, B, T, D]."""
        E, B, T, D = x.shape
        qkv = linear(x, self.qkv.weight, self.qkv.bias).view(E * B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [E*B, H, T, D/H]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return linear(mixed.transpose(1, 2).reshape(E, B, T, D), self.out.weight, self.out.bias)


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """`x` [..., D] normalised, computed in the type of `x`."""
    return F.layer_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps)
