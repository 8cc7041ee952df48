"""Attention, which all experts share, and its key-value cache.

Axes: E experts, B sequences of one expert, T positions, D width, H heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demix.config.architecture import Architecture

# Up to so many positions a CPU trains in bf16 by whole matrices of scores. Torch's own kernel, which holds a part of
# them at a time, takes twice as long for 256.
WHOLE_POSITIONS = 512
# Not more scores than these exist at once, 256 MB in each layer with their softmax.
WHOLE_SCORES = 1 << 26


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

    def of(self, sequences: Tensor, count: int, positions: int | None = None) -> "KeyValues":
        """A copy for other sequences, each with the past of one of these: `sequences` [R] are numbers below `count` B.

        A sequence may be there several times. The copy has room for `positions`, by default for as many as this one.
        """
        other = KeyValues(positions or self.positions)
        filled = (cached[:, :, : self.seen] for cached in (self.keys, self.values))
        other.extended(*(part.view(-1, count, *part.shape[1:])[:, sequences].flatten(0, 1) for part in filled))
        return other


def alibi_slopes(heads: int) -> list[float]:
    """The slope m_h of each of n `heads`: 2^(-8h/n), h = 1 ... n (Press et al. 2022, "Train Short, Test Long").

    Where n is no power of two they are those of the power of two below it, then every other slope of twice that power.
    """
    power = 1 << heads.bit_length() - 1
    own, between = ([2 ** (-8 * h / number) for h in range(1, number + 1)] for number in (power, 2 * power))
    return own + between[::2][: heads - power]


def attention_bias(
    architecture: Architecture, T: int, past: KeyValues | None, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """What is added to the attention scores of T new positions to those in `past` and to the new ones.

    With ALiBi -m_h·(i - j) of `dtype` [1, H, T, seen + T] for position i and an earlier one j, and for a later one
    -inf or, where attention is bidirectional, -m_h·(j - i), to which `asymmetric` adds m_h/2. With learned positions a
    mask: bool [T, seen + T], true where a position attends. None where attention without a mask does the same: for T
    positions at the start of a text, and for a single one, which attends to all.
    """
    before = past.seen if past else 0
    if architecture.position == "learned":
        if not before or T == 1:
            return None
        return torch.ones(T, before + T, dtype=torch.bool, device=device).tril(before)
    exact = torch.promote_types(dtype, torch.float32)
    at = torch.arange(before + T, dtype=exact, device=device)
    distances = at - at[before:, None]  # [T, seen + T], at most 0 for what is seen
    if architecture.attention == "bidirectional":
        nearer = 0.5 if architecture.alibi == "asymmetric" else 0.0
        distances = torch.where(distances > 0, nearer - distances, distances)
    else:
        distances = distances.masked_fill(distances > 0, -torch.inf)
    slopes = torch.tensor(alibi_slopes(architecture.heads), dtype=exact, device=device)
    return (slopes[:, None, None] * distances).to(dtype)[None]


class Attention(nn.Module):
    """Multi-head self-attention, shared by all experts. Unless `causal`, each position attends to all of its block."""

    def __init__(self, width: int, heads: int, causal: bool = True):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor | None = None, past: KeyValues | None = None) -> Tensor:
        """Map `x` [E, B, T, D] to [E, B, T, D]. With `past`, `x` follows the cached positions and is added to them.

        `bias` comes from `attention_bias` for the same T and what was in `past` before.
        """
        E, B, T, D = x.shape
        qkv = linear(x, self.qkv.weight, self.qkv.bias).view(E * B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [E*B, H, T, D/H]
        # Without a bias, a new position that stands alone attends to all before it.
        causal = self.causal and bias is None and not (past and past.seen)
        if past:
            k, v = past.extended(k, v)
        trained = torch.is_grad_enabled() and x.device.type == "cpu" and x.dtype == torch.bfloat16
        if trained and T <= WHOLE_POSITIONS and E * B * self.heads * T * T <= WHOLE_SCORES:
            mixed = attend(q, k, v, bias, causal)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal)
        return linear(mixed.transpose(1, 2).reshape(E, B, T, D), self.out.weight, self.out.bias)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    """What `F.scaled_dot_product_attention` returns for `q`, `k`, `v` [B, H, T, D], by products of whole matrices.

    `causal` is only for a `bias` of None. Scores are rounded to the type of `q`, and so are the weights of positions.
    """
    B, H, T, D = q.shape
    if bias is None:
        bias = q.new_full((T, T), -torch.inf).triu(1) if causal else q.new_zeros(T, T)
    else:
        bias = bias.expand(B, H, T, T).flatten(0, 1)
    scores = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=D**-0.5)
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view(B, H, T, D)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The linear map of `x` [..., in] by `weight` [out, in] and `bias` [out], computed in the type of `x`."""
    return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))
