"""Attention, which all experts share, and its key-value cache.

Axes: E experts, B sequences of one expert, T positions, D width, H heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demix.config.architecture import Architecture


class KeyValues:
    """The key-value cache of one layer, so that decoding computes each position once.

    `keys` and `values` are [E * B, H, positions, D/H]. The first `seen` positions are filled. In the first layer E
    is 1, because all experts have the same inputs there.
    """

    def __init__(self, positions: int):
        self.positions, self.seen = positions, 0

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add `keys` and `values` [E * B, H, T, D/H] of T new positions; returns those of all positions so far."""
        if self.seen == 0:
            shape = (*keys.shape[:2], self.positions, keys.shape[3])
            self.keys, self.values = keys.new_empty(shape), values.new_empty(shape)
        start, self.seen = self.seen, self.seen + keys.shape[2]
        self.keys[:, :, start : self.seen] = keys
        self.values[:, :, start : self.seen] = values
        return self.keys[:, :, : self.seen], self.values[:, :, : self.seen]

    def repeated(self, times: int, more: int) -> "KeyValues":
        """A copy in which each sequence stands `times` times, one after the other, with room for `more` positions."""
        copy = KeyValues(self.seen + more)
        keys, values = (part[:, :, : self.seen].repeat_interleave(times, 0) for part in (self.keys, self.values))
        copy.extended(keys, values)
        return copy


def attention_bias(architecture: Architecture, T: int, past: KeyValues | None, device: torch.device) -> Tensor | None:
    """Which positions each of T new positions attends to, in `past` and among the new ones: bool [T, seen + T].

    None where no mask is needed: for T positions at the start of a text, plain causal attention is enough, and a single
    position attends to all positions. Every `architecture` is causal and has no other bias.
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
        """Map `x` [E, B, T, D] to [E, B, T, D]. With `past`, `x` follows the cached positions and is added to them.

        `bias` comes from `attention_bias` for the same T and `past`.
        """
        E, B, T, D = x.shape
        qkv = linear(x, self.qkv.weight, self.qkv.bias).view(E * B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [E*B, H, T, D/H]
        # Without a bias, attention is causal, except for one new position, which attends to all before it.
        causal = bias is None and not (past and past.seen)
        if past:
            k, v = past.extended(k, v)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal)
        return linear(mixed.transpose(1, 2).reshape(E, B, T, D), self.out.weight, self.out.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The linear map of `x` [..., in] by `weight` [out, in] and `bias` [out], computed in the type of `x`."""
    return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))
