"""The DEMix layer and the attention it stands beside.

Axes: E experts, B sequences of one expert, T positions, D width. Weights are kept in fp32 (or fp64) and
cast to the activations' type at the matmul.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


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
        E, (_, B, T, D) = len(self.up), x.shape
        inner = F.gelu(_ExpertLinear.apply(x.expand(E, B, T, D).reshape(E, B * T, D), self.up, self.up_bias))
        return _ExpertLinear.apply(inner, self.down, self.down_bias).view(E, B, T, D)


class _ExpertLinear(torch.autograd.Function):
    """`x` [E, N, in] through `weight` [E, out, in] and `bias` [E, out], an expert after the other: [E, N, out].

    A loop, not bmm, which is slower on CPU from 128 tokens an expert on. Each expert's output and gradients are written
    to their place, which autograd would stack, and its weight is cast as it is used.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        output = x.new_empty(*x.shape[:2], weight.shape[1])
        for e in range(len(x)):
            torch.addmm(bias[e].to(x.dtype), x[e], weight[e].to(x.dtype).T, out=output[e])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        for_x, for_weight = x.new_empty(x.shape), torch.empty_like(weight)
        for e in range(len(x)):
            torch.mm(incoming[e], weight[e].to(x.dtype), out=for_x[e])
            if weight.dtype == x.dtype:
                torch.mm(incoming[e].T, x[e], out=for_weight[e])
            else:
                for_weight[e] = incoming[e].T @ x[e]
        return for_x, for_weight, incoming.sum(1, dtype=weight.dtype)


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


class Attention(nn.Module):
    """Causal multi-head self-attention, shared by all experts."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, past: KeyValues | None = None) -> Tensor:
        """`x` [E, B, T, D] -> [E, B, T, D]; with `past` they are the T positions after those, and added to them."""
        E, B, T, D = x.shape
        qkv = linear(x, self.qkv.weight, self.qkv.bias).view(E * B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [E*B, H, T, D/H]
        before, mask = past.seen if past else 0, None
        if past:
            k, v = past.extended(k, v)
        if before and T > 1:
            mask = torch.ones(T, before + T, dtype=torch.bool, device=x.device).tril(before)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=before == 0)
        return linear(mixed.transpose(1, 2).reshape(E, B, T, D), self.out.weight, self.out.bias)


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """`x` [..., D] normalised, computed in the type of `x`."""
    return F.layer_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps)
