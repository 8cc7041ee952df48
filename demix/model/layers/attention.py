"""Attention, which all experts share, and its key-value cache.

Axes: E experts, B sequences of one expert, T positions, D width, H heads of queries, K of keys and of values, U units
of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from demix.config.architecture import Architecture
from demix.model.layers.norm import Norm, norm_of, normed

# Up to so many positions a CPU trains in bf16 by whole matrices of scores. Torch's own kernel, which holds a part of
# them at a time, takes twice as long for 256.
WHOLE_POSITIONS = 512
# Not more scores than these exist at once, 256 MB in each layer with their softmax.
WHOLE_SCORES = 1 << 26
# The cosines and sines that `rotations` returns.
Rotations = tuple[Tensor, Tensor]


class KeyValues:
    """The key-value cache of one layer, so that decoding computes each position once.

    `keys` and `values` are [E * B, K, positions, U]. The first `seen` positions are filled. In the first layer E
    is 1, because all experts have the same inputs there, and `documents` [1, B, seen] has the numbers of the positions'
    documents where attention stays within these.
    """

    def __init__(self, positions: int):
        self.positions, self.seen = positions, 0
        self.documents: Tensor | None = None

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add `keys` and `values` [E * B, K, T, U] of T new positions; returns those of all positions so far."""
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
        other.documents = None if self.documents is None else self.documents[:, sequences]
        return other


def alibi_slopes(heads: int) -> list[float]:
    """The slope m_h of each of n `heads`: 2^(-8h/n), h = 1 ... n (Press et al. 2022, "Train Short, Test Long").

    Where n is no power of two they are those of the power of two below it, then every other slope of twice that power.
    """
    power = 1 << heads.bit_length() - 1
    own, between = ([2 ** (-8 * h / number) for h in range(1, number + 1)] for number in (power, 2 * power))
    return own + between[::2][: heads - power]


def attention_bias(
    architecture: Architecture,
    T: int,
    past: KeyValues | None,
    device: torch.device,
    dtype: torch.dtype,
    documents: Tensor | None = None,
) -> Tensor | None:
    """What is added to the attention scores of T new positions to those in `past` and to the new ones.

    With ALiBi -m_h·(i - j) of `dtype` [1, H, T, seen + T] for position i and an earlier one j, and for a later one
    -inf or, where attention is bidirectional, -m_h·(j - i), to which `asymmetric` adds m_h/2. Otherwise a
    mask: bool [T, seen + T], true where a position attends. None where attention without a mask does the same: for T
    positions at the start of a text, and for a single one, which attends to all.

    `documents` [E or 1, B, seen + T] are the numbers of the documents of all these positions. What is returned is then
    [E or 1, B, H or 1, T, seen + T], and keeps a position from those of other documents. All positions attend to one
    with a number below 0.
    """
    before = past.seen if past else 0
    if documents is not None:
        one = (documents[..., before:, None] == documents[..., None, :]) | (documents < 0).unsqueeze(-2)
        bias = attention_bias(architecture, T, past, device, dtype)
        if bias is None or bias.dtype == torch.bool:
            return one.tril(before).unsqueeze(2)
        return bias.masked_fill(~one.unsqueeze(2), -torch.inf)
    if architecture.position != "alibi":
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


def sinusoids(start: int, T: int, width: int) -> Tensor:
    """The fixed embeddings of T positions from `start`: float64 [T, width] (Vaswani et al. 2017, section 3.5).

    Units 2n and 2n + 1 of position p are the sine and the cosine of p·10000^(-2n/width).
    """
    positions = torch.arange(start, start + T, dtype=torch.float64)
    angles = positions[:, None] * 10_000 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).view(T, width)


def frequencies(architecture: Architecture) -> Tensor:
    """The angles by which rope turns the pairs of units of a head from one position to the next: float64 [pairs].

    theta^(-2n/units) (Su et al. 2021, "RoFormer", Eq. 15), scaled as `RopeScaling` says.
    """
    units = architecture.rotated
    angles = architecture.rope_theta ** (-torch.arange(0, units, 2, dtype=torch.float64) / units)
    scaling = architecture.rope_scaling
    if scaling is None:
        return angles
    slow = angles / scaling.factor
    if scaling.kind == "linear":
        return slow
    turns = scaling.context * angles / (2 * torch.pi)
    kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return (1 - kept) * slow + kept * angles


def rotations(architecture: Architecture, start: int, T: int, x: Tensor) -> Rotations | None:
    """The cosines and sines [T, pairs], of the type of `x`, of T positions from `start`; None without rope."""
    if architecture.position != "rope":
        return None
    at = torch.arange(start, start + T, dtype=torch.float64)
    angles = at[:, None] * frequencies(architecture)
    cos, sin = (part.to(device=x.device, dtype=x.dtype) for part in (angles.cos(), angles.sin()))
    return cos, sin


def rotated(x: Tensor, by: Rotations) -> Tensor:
    """`x` [B, T, heads, U] whose first units are rotated: unit n and unit n + pairs make a pair."""
    cos, sin = (part[:, None] for part in by)
    if torch.compiler.is_compiling():
        return _turned(x, cos, sin)
    turn: Callable[[Tensor, Tensor, Tensor], Tensor] = _Rotation.apply
    return turn(x, cos, sin)


class _Rotation(torch.autograd.Function):
    """`_turned`, whose gradient is turned back; autograd would keep and add up four parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned_without_cat(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned_without_cat(incoming, cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = cos.shape[-1]
    first, second, rest = torch.split(x, [pairs, pairs, x.shape[-1] - 2 * pairs], -1)
    turned = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    return torch.cat([*turned, rest], -1)


def _turned_without_cat(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same bits as `_turned` without its `cat`, a fifth of its time on a CPU; no autograd through it."""
    pairs, turned = cos.shape[-1], torch.empty_like(x, memory_format=torch.contiguous_format)
    first, second, rest = torch.split(x, [pairs, pairs, x.shape[-1] - 2 * pairs], -1)
    parts = torch.split(turned, [pairs, pairs, rest.shape[-1]], -1)
    torch.mul(first, cos, out=parts[0]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=parts[1]).addcmul_(first, sin)
    parts[2].copy_(rest)
    return turned


class Attention(nn.Module):
    """Self-attention, shared by all experts. Unless `causal`, each position attends to all of its block.

    Each of the `key_heads` heads of keys and values serves as many of the `heads` of queries (Ainslie et al. 2023,
    "GQA"). `biases` and `query_norm` are as in `demix.config.architecture.Options`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool = True,
        *,
        key_heads: int | None = None,
        unit: int | None = None,
        biases: str = "all",
        query_norm: str = "none",
        epsilon: float = 1e-5,
    ):
        super().__init__()
        self.heads, self.key_heads, self.unit = heads, key_heads or heads, unit or width // heads
        self.causal = causal
        self.qkv = nn.Linear(width, (heads + 2 * self.key_heads) * self.unit, biases != "none")
        self.out = nn.Linear(heads * self.unit, width, biases == "all")
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        if query_norm != "none":
            together = (1, 1) if query_norm == "head" else (heads, self.key_heads)
            self.q_norm, self.k_norm = (norm_of("rms", number * self.unit, epsilon) for number in together)

    def forward(
        self, x: Tensor, bias: Tensor | None = None, past: KeyValues | None = None, turns: Rotations | None = None
    ) -> Tensor:
        """Map `x` [E, B, T, D] to [E, B, T, D]. With `past`, `x` follows the cached positions and is added to them.

        `bias` comes from `attention_bias` for the same T and what was in `past` before, and `turns` from `rotations`.
        """
        E, B, T, _ = x.shape
        if bias is not None and bias.dim() == 5:
            bias = bias.expand(E, *bias.shape[1:]).flatten(0, 1)
        qkv = linear(x, self.qkv.weight, self.qkv.bias).view(E * B, T, self.heads + 2 * self.key_heads, self.unit)
        qk, v = torch.split(qkv, [self.heads + self.key_heads, self.key_heads], 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = torch.split(qk, [self.heads, self.key_heads], 2)
            qk = torch.cat([_heads_normed(q, self.q_norm), _heads_normed(k, self.k_norm)], 2)
        if turns is not None:
            qk = rotated(qk, turns)
        q, k = torch.split(qk, [self.heads, self.key_heads], 2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [E*B, H, T, U], and K heads of k and v
        # Without a bias, a new position that stands alone attends to all before it.
        causal = self.causal and bias is None and not (past and past.seen)
        if past:
            k, v = past.extended(k, v)
        trained = torch.is_grad_enabled() and x.device.type == "cpu" and x.dtype == torch.bfloat16
        if trained and T <= WHOLE_POSITIONS and E * B * self.heads * T * T <= WHOLE_SCORES:
            k, v = (part.repeat_interleave(self.heads // self.key_heads, 1) for part in (k, v))
            mixed = attend(q, k, v, bias, causal)
        else:
            grouped = self.key_heads < self.heads
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, enable_gqa=grouped)
        return linear(mixed.transpose(1, 2).reshape(E, B, T, self.heads * self.unit), self.out.weight, self.out.bias)


def _heads_normed(x: Tensor, norm: Norm) -> Tensor:
    """The norm of `x` [B, T, heads, U], over each head or over all heads, as the norm is wide."""
    return normed(x if norm.normalized_shape == x.shape[-1:] else x.flatten(2), norm).view_as(x)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    """What `F.scaled_dot_product_attention` returns for `q`, `k`, `v` [B, H, T, D], by products of whole matrices.

    `causal` is only for a `bias` of None. Scores are rounded to the type of `q`, and so are the weights of positions.
    """
    B, H, T, D = q.shape
    if bias is None:
        bias = q.new_full((T, T), -torch.inf).triu(1) if causal else q.new_zeros(T, T)
    else:
        if bias.dtype == torch.bool:
            bias = q.new_zeros(bias.shape).masked_fill_(~bias, -torch.inf)
        bias = bias.expand(B, H, T, T).flatten(0, 1)
    scores = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=D**-0.5)
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view(B, H, T, D)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear map of `x` [..., in] by `weight` [out, in] and `bias` [out], computed in the type of `x`."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
