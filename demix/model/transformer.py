"""The layers of a transformer: attention, a feedforward and their norms, between an embedding and a head.

Axes: E experts, B sequences of one expert, T positions, D width, H heads of queries, K of keys and of values, U units
of a head. Parameters are stored in fp32 (or fp64) and cast to the type of the activations where they are used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from demix.config.architecture import Architecture
from demix.config.counts import GATE_UNITS
from demix.files import seed_for
from demix.model.moe import RouterLoss, feedforward
from demix.model.positions import CosSin

# What `Dropout.masks` returns.
Masks = tuple[Tensor, float]


class Linear(nn.Linear):
    """A linear map, computed in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class LayerNorm(nn.LayerNorm):
    """The norm of Ba et al. 2016, computed in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class RMSNorm(nn.RMSNorm):
    """The norm of Zhang and Sennrich 2019, computed in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.rms_norm(x, self.normalized_shape, weight, self.eps)
        on_cpu: Callable[[Tensor, Tensor, float], Tensor] = _RMSNorm.apply
        return on_cpu(x, weight, self.eps or torch.finfo(x.dtype).eps)


class _RMSNorm(torch.autograd.Function):
    """x·w / sqrt(mean(x²) + ε) for `x` [..., D] and `weight` [D]. torch has no kernel for it on a CPU.

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
        product = (incoming * x).reshape(-1, x.shape[-1])
        for_weight = scale.to(x.dtype).reshape(1, -1) @ product
        mean = (product @ weight).view(scale.shape) * scale**3 / x.shape[-1]
        for_x = (incoming * weight).mul_(scale.to(x.dtype)).addcmul_(x, mean.to(x.dtype), value=-1)
        return for_x, for_weight[0], None


def norm_of(options: Architecture) -> LayerNorm | RMSNorm:
    """The norm of states [..., D] in an architecture."""
    return (RMSNorm if options.norm == "rms" else LayerNorm)(options.width, options.epsilon)


class HeadNorm(RMSNorm):
    """The RMSNorm of queries or keys [N, T, heads, U], over each head or over all heads, by the norm's width."""

    def forward(self, x: Tensor) -> Tensor:
        (units,) = self.normalized_shape
        return super().forward(x.reshape(*x.shape[:2], x.shape[2:].numel() // units, units)).view_as(x)


class KeyValues:
    """The key-value cache of one layer, so that decoding computes each position only once.

    `keys` and `values` are [E * B, K, positions, U]. The first `seen` positions are filled. In the first layer E
    is 1, because all experts have the same inputs there, unless each has a table of bigrams. `last` [E or 1, B] are the
    last input tokens, in the first layer of a model with bigrams.
    """

    last: Tensor | None = None

    def __init__(self, positions: int):
        self.positions, self.seen = positions, 0

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add `keys` and `values` [E * B, K, T, U] of T new positions; returns both of all positions so far."""
        if self.seen == 0:
            shape = (*keys.shape[:2], self.positions, keys.shape[3])
            self.keys, self.values = keys.new_empty(shape), values.new_empty(shape)
        start, self.seen = self.seen, self.seen + keys.shape[2]
        self.keys[:, :, start : self.seen] = keys
        self.values[:, :, start : self.seen] = values
        return self.keys[:, :, : self.seen], self.values[:, :, : self.seen]

    def of(self, sequences: Tensor, count: int) -> "KeyValues":
        """A copy for R other sequences, each with the past of one of this cache's sequences.

        `sequences` [R] are the numbers of these, below `count` B; a number may occur several times. The copy has room
        for as many positions as this cache.
        """
        other = KeyValues(self.positions)
        other.last = None if self.last is None else self.last[:, sequences]
        filled = (cached[:, :, : self.seen] for cached in (self.keys, self.values))
        other.extended(*(part.view(-1, count, *part.shape[1:])[:, sequences].flatten(0, 1) for part in filled))
        return other


class Attention(nn.Module):
    """Self-attention, shared by all experts; each of the K heads of keys and values serves H / K heads of queries."""

    def __init__(self, options: Architecture):
        super().__init__()
        self.heads, self.key_heads, self.head_dim = options.heads, options.key_value_heads, options.unit
        self.causal = options.objective != "mlm"
        rows = (self.heads + 2 * self.key_heads) * self.head_dim
        self.qkv = Linear(options.width, rows, options.biases != "none")
        self.out = Linear(self.heads * self.head_dim, options.width, options.biases == "all")
        self.q_norm, self.k_norm = (_query_norm(options, heads) for heads in (self.heads, self.key_heads))
        gates = self.key_heads, min(GATE_UNITS, options.width)
        self.value_gate = nn.Parameter(torch.empty(gates)) if options.value_embeddings else None

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        past: KeyValues | None = None,
        cos_sin: CosSin | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """Map `x` [E, B, T, D] to [E, B, T, D]. With `past`, `x` follows the cached positions and is added to them.

        `bias` and `cos_sin` come from `demix.model.positions`, for the same T and for the positions that `past` had
        before. `values` [E or 1, B, T, K·U] are the value embeddings of the tokens.
        """
        E, B, T, _ = x.shape
        qkv = self.qkv(x).view(E * B, T, self.heads + 2 * self.key_heads, self.head_dim)
        q, k, v = torch.split(qkv, [self.heads, self.key_heads, self.key_heads], 2)  # [E*B, T, H or K, U]
        if values is not None and self.value_gate is not None:
            gate = 2 * F.linear(x[..., :GATE_UNITS], self.value_gate.to(x.dtype)).sigmoid()  # [E, B, T, K]
            v = v + (gate[..., None] * values.view(*values.shape[:3], self.key_heads, self.head_dim)).flatten(0, 1)
        q, k = self.q_norm(q), self.k_norm(k)
        if cos_sin is not None:
            q, k = rotated(q, cos_sin), rotated(k, cos_sin)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [E*B, H or K, T, U]
        # Without a bias, a single new position attends to all before it.
        causal = self.causal and bias is None and not (past and past.seen)
        if past:
            k, v = past.extended(k, v)
        if causal and self.key_heads == self.heads and _faster_whole(q):
            mixed = _whole_attention(q, k, v)
        else:
            grouped = self.key_heads < self.heads
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, enable_gqa=grouped)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(E, B, T, self.heads * self.head_dim))
        return out


def _query_norm(options: Architecture, heads: int) -> nn.Module:
    """The norm of queries or keys with this number of heads."""
    together = {"none": 0, "head": 1, "all": heads}[options.query_norm]
    return HeadNorm(together * options.unit, options.epsilon) if together else nn.Identity()


def _faster_whole(q: Tensor) -> bool:
    """Whether `_whole_attention` is faster than torch's attention: a CPU that trains in bf16 needs half the time."""
    trained = torch.is_grad_enabled() and q.device.type == "cpu" and q.dtype == torch.bfloat16
    # From 1,024 positions torch's attention is as fast. 2^26 scores of a layer are 128 MB, which torch never holds.
    return trained and q.shape[2] <= 512 and q.shape[:3].numel() * q.shape[2] <= 1 << 26


def _whole_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of `q`, `k` and `v` [N, H, T, U], by whole matrices of scores, which are rounded to the type."""
    future = q.new_full((q.shape[2],) * 2, -torch.inf).triu(1)
    scores = torch.baddbmm(future, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=q.shape[3] ** -0.5)  # [N*H, T, T]
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view_as(q)


def rotated(x: Tensor, by: CosSin) -> Tensor:
    """`x` [N, T, heads, U] whose first units are rotated: unit n and unit n + pairs make a pair."""
    cos, sin = (part[:, None] for part in by)  # [T, 1, pairs]
    pairs = cos.shape[-1]
    first, second, rest = torch.split(x, [pairs, pairs, x.shape[-1] - 2 * pairs], -1)
    turned = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    return torch.cat([*turned, rest], -1)


@dataclass(frozen=True)
class Dropout:
    """Drops the fraction `rate` of the units that attention and feedforward of each layer add to the residual stream.

    Units are dropped independently at each position, at the same places as in OPT (`OPTDecoderLayer` of transformers):
    after the last map of attention and of the feedforward. Attention weights and embeddings have no dropout. `seeds`, E
    lists of B numbers, has one random seed per sequence of a training pass. The masks of a sequence depend only on its
    seed and the layer, not on a rank, another sequence or an earlier pass.
    """

    rate: float
    seeds: Sequence[Sequence[int]]

    def masks(self, layer: int, x: Tensor) -> Masks:
        """The units that layer `layer` keeps of attention and of the feedforward, bool [2, E, B, T, D], for `x`
        [E, B, T, D].

        Also returns the factor 1 / (1 - rate) of the kept units, so that means do not change.
        """
        kept = torch.empty(2, *x.shape, dtype=torch.bool, device=x.device)
        for e, seeds in enumerate(self.seeds):
            for b, seed in enumerate(seeds):
                generator = torch.Generator(x.device).manual_seed(seed_for(seed, layer))
                drawn = torch.rand(2, *x.shape[2:], generator=generator, device=x.device)
                torch.ge(drawn, self.rate, out=kept[:, e, b])
        return kept, 1 / (1 - self.rate)


def apply_dropout(x: Tensor, masks: Masks | None, place: int) -> Tensor:
    """`x` [E, B, T, D] with the mask of `place` (0: attention, 1: the feedforward), or unchanged without masks."""
    if masks is None:
        return x
    kept, factor = masks
    return x * kept[place] * factor


class Block(nn.Module):
    """A transformer layer: attention and a feedforward, each with a norm and a residual connection."""

    def __init__(self, architecture: Architecture, layer: int, experts: int):
        super().__init__()
        self.parallel = architecture.residual == "parallel"
        self.attention_norm = norm_of(architecture)
        self.attention = Attention(architecture)
        self.feedforward_norm = norm_of(architecture)
        self.feedforward = feedforward(architecture, layer, experts)
        self._norms = tuple(_slots(architecture, norm) for norm in (self.attention_norm, self.feedforward_norm))

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        past: KeyValues | None = None,
        auxiliary: list[RouterLoss] | None = None,
        cos_sin: CosSin | None = None,
        values: Tensor | None = None,
        masks: Masks | None = None,
    ) -> Tensor:
        """Map `x` [E or 1, B, T, D] to [E, B, T, D].

        `bias` and `cos_sin` come from `demix.model.positions`, `masks` from `Dropout.masks`, and `values` are as in
        `Attention.forward`; the others are as in `GPT.forward`.
        """
        (before, after, post), (before_2, after_2, post_2) = self._norms
        attended = after(self.attention(before(x), bias, past, cos_sin, values))
        h = post(x + apply_dropout(attended, masks, 0))  # [E or 1, B, T, D]
        mapped = after_2(self.feedforward(before_2(x if self.parallel else h), auxiliary))
        out: Tensor = post_2(h + apply_dropout(mapped, masks, 1))  # [E, B, T, D]
        return out


def _slots(architecture: Architecture, norm: nn.Module) -> tuple[nn.Module, ...]:
    """The maps of a sublayer's input, its output and the residual sum: one of them is `norm`, the others identities.

    Pre-norm (`before`: GPT-2, Llama), after the sublayer (`after`: OLMo 2), post-norm (`post`: BERT).
    """
    return tuple(norm if architecture.norm_place == place else nn.Identity() for place in ("before", "after", "post"))


class Transformer(nn.Module):
    """The layers of a model and the norm after them, without embedding and head."""

    def __init__(self, architecture: Architecture, experts: int):
        super().__init__()
        # The training loop sets this. The backward pass then recomputes a layer's activations, which saves memory.
        self.checkpoint_activations = False
        self.blocks = nn.ModuleList(Block(architecture, layer, experts) for layer in range(architecture.layers))
        self.final_norm = nn.Identity() if architecture.norm_place == "post" else norm_of(architecture)

    def through_blocks(
        self,
        x: Tensor,
        bias: Tensor | None,
        cos_sin: CosSin | None,
        past: list[KeyValues] | None,
        auxiliary: list[RouterLoss] | None,
        dropout: Dropout | None,
        added: tuple[Tensor, Tensor] | None = None,
        values: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Map the embeddings `x` [E or 1, B, T, D] to final states [E, B, T, D], with arguments as in `Block.forward`.

        All layers share one `bias` and one `cos_sin`: they have seen the same positions before. `added` are states
        [E or 1, B, T, D] that are added before each block, and their factors [layers]. `values` has the value
        embeddings for each layer.
        """
        for layer, block in enumerate(self.blocks):
            value = values[layer] if values else None
            x = x if added is None else x + added[1][layer] * added[0]
            # With one list for all layers, a compiled layer would be compiled again for each length of the list.
            own: list[RouterLoss] | None = None if auxiliary is None else []
            given = bias, past[layer] if past else None, own, cos_sin, value
            if not torch.is_grad_enabled():
                # Evaluation has many shapes, and a compiled layer would be compiled again for each.
                x = block.forward(x, *given)
            elif self.checkpoint_activations:
                x = checkpoint(_in_training, block, layer, dropout, x, *given, use_reentrant=False)
            else:
                x = _in_training(block, layer, dropout, x, *given)
            if auxiliary is not None and own:
                auxiliary += own
        normed: Tensor = self.final_norm(x)
        return normed

    def compile_blocks(self) -> None:
        """Compile each layer separately for training, so that more layers do not lengthen compilation."""
        for block in self.blocks:
            block.compile(dynamic=False)


def _in_training(block: nn.Module, layer: int, dropout: Dropout | None, x: Tensor, *given: Any) -> Tensor:
    """The output of layer number `layer` for `x` and further arguments `given`, in a training pass.

    A recomputed pass draws the same masks again.
    """
    mapped: Tensor = block(x, *given, None if dropout is None else dropout.masks(layer, x))
    return mapped
