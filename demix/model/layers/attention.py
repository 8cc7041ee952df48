"""Attention, which all experts share, and what it remembers of a text.

Axes: E experts, B sequences of one expert, T positions, D width, H heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demix.config.architecture import Architecture


class KeyValues:
    """What one layer's attention has seen, so that decoding sees each position once.

    `keys` and `values` are [E * B, H, positions, D/H], of which the first `seen` are filled. In the first layer, which
    all experts share, E is 1.
    """

    def __init__(self, positions: int):
        self.positions, self.seen = positions, 0

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far, after those of T new positions [E * B, H, T, D/H]."""
        if self.seen == 0:
            shape = (*keys.shape[:2], self.positions, keys.shape[3])
            self.keys, self.values = keys.new_empty(shape), values.new_empty(shape)
        start, self.seen = self.seen, self.seen + keys.shape[2]
        self.keys[:, :, start : self.seen] = keys
        self.values[:, :, start : self.seen] = values
        return self.keys[:, :, : self.seen], self.values[:, :, : self.seen]


def attention_bias(architecture: Architecture, T: int, past: KeyValues | None, device: torch.device) -> Tensor | None:
    """What each of T new positions may see of those in `past` and of one another: bool [T, seen + T], True for yes.

    None where it goes without saying: T positions from the start of a text, each of which sees those up to its own,
    or one position, which sees all. Every `architecture` is causal and has no other bias.
    """
    before = past.seen if past else 0
    if not before or T == 1:
        return None
    return torch.ones(T, before + T, dtype=torch.bool, device=device).tril(before)


class Attention(nn.Module):
    """Causal multi-head self-attention, shared by all experts."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor | None = None, past: KeyValues | None = None) -> Tensor:
        """`x` [E, B, T, D] -> [E, B, T, D]; with `past` they are the T positions after those, and added to them.

        `bias` is what `attention_bias` gives for them.
        """
        E, B, T, D = x.shape
        qkv = linear(x, self.qkv.weight, self.qkv.bias).view(E * B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [E*B, H, T, D/H]
        # Without a bias: causal from the first position on, or one position that sees all before it.
        causal = bias is None and not (past and past.seen)
        if past:
            k, v = past.extended(k, v)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal)
        return linear(mixed.transpose(1, 2).reshape(E, B, T, D), self.out.weight, self.out.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`x` [..., in] through `weight` [out, in] and `bias` [out], computed in the type of `x`."""
    return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))
