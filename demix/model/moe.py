"""Feedforwards with experts: DEMix layers, in which the domain chooses the expert, and token-routed MoE layers.

Axes: E experts, B sequences, T positions, D width, F inner units, k choices of a token, N rows. Weights are stored in
fp32 (or fp64) and cast to the type of the activations for each matrix product.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from demix.config.architecture import Architecture

# The number of rows of one expert in one product without gradients. Their inner states fit into a core's cache.
ROWS_AT_ONCE = 512
_APPROXIMATE = {"gelu": "none", "gelu_new": "tanh"}


class RouterLoss(NamedTuple):
    """The loss and counts of a layer with a trained router in a training pass.

    `losses` are nats [1, B], one number per sequence, already multiplied by the weight of the loss. `counts`
    [4 + E] float64 are the sums over all tokens that `router_metrics` reads.
    """

    losses: Tensor
    counts: Tensor


def feedforward(architecture: Architecture, layer: int, experts: int) -> "Experts":
    """The feedforward of layer number `layer` (from 0). It maps (x [E or 1, B, T, D], auxiliary) to [E, B, T, D].

    `auxiliary` is a list to which the feedforward may append losses (`GPT.forward`).
    """
    if architecture.routed and architecture.routed.in_block(layer):
        return MoELayer(architecture)
    return DEMixLayer(architecture, (experts,))


class Experts(nn.Module):
    """Feedforwards whose weights are stacked: `up` [E, F, D] and `down` [E, D, F], with biases [E, F] and [E, D].

    A gated feedforward has an `up` of [E, 2F, D], the rows of the units that go through the activation first.
    """

    def __init__(self, architecture: Architecture, axes: tuple[int, ...]):
        """`axes` are the sizes of the first axes of the weights, whose product is E."""
        super().__init__()
        self.activation, self.gated = architecture.activation, architecture.gated
        width, inner, biased = architecture.width, architecture.inner_width, architecture.biases == "all"
        rows = inner * (architecture.maps - 1)
        # This is the order in files.
        self.up = nn.Parameter(torch.empty(*axes, rows, width))
        self.up_bias = nn.Parameter(torch.empty(*axes, rows)) if biased else None
        self.down = nn.Parameter(torch.empty(*axes, width, inner))
        self.down_bias = nn.Parameter(torch.empty(*axes, width)) if biased else None

    def by_rows(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """The outputs [N, D] for rows `x` [N, D] in the order of their experts; `ends` as in `_expert_linear`."""
        inner = self._activated(_expert_linear(x, *_stack(self.up, self.up_bias), ends))
        mapped: Tensor = _expert_linear(inner, *_stack(self.down, self.down_bias), ends)
        return mapped

    def _activated(self, inner: Tensor) -> Tensor:
        """The input of `down` [..., F] from the output of `up`, `inner` [..., F], or [..., 2F] if the layer is gated.

        In a gated layer, the activation of the first F units multiplies the others. Without gradients `inner` may be
        overwritten.
        """
        first, others = inner.chunk(2, -1) if self.gated else (inner, None)
        in_place = not torch.is_grad_enabled()
        if self.activation in _APPROXIMATE:
            gelu = torch.ops.aten.gelu_ if in_place else F.gelu
            first = gelu(first, approximate=_APPROXIMATE[self.activation])
        elif self.activation == "silu":
            first = F.silu(first, inplace=in_place)
        else:
            first = F.relu(first, inplace=in_place)
            if self.activation == "relu2":
                first = first.square_() if in_place else first.square()
        if others is None:
            return first
        return first.mul_(others) if in_place else first * others


class DEMixLayer(Experts):
    """One feedforward per expert (paper, section 3.2). The first axis of the input chooses the expert (Eq. 3)."""

    def forward(self, x: Tensor, auxiliary: list[RouterLoss] | None = None) -> Tensor:
        """Map `x` [E, B, T, D] to [E, B, T, D]. If `x` is [1, B, T, D], every expert gets the same `x`.

        The layer adds nothing to `auxiliary`: the domain chooses the expert, so there is no router to train.
        """
        E, (_, B, T, D) = len(self.up), x.shape
        if not torch.is_grad_enabled():
            return self._without_gradients(x.flatten(1, 2)).view(E, B, T, D)
        return self.by_rows(x.expand(E, B, T, D).reshape(E * B * T, D)).view(E, B, T, D)

    def _without_gradients(self, x: Tensor) -> Tensor:
        """Map `x` [E or 1, N, D] to [E, N, D], some rows of one expert at a time, whose inner states stay in the cache.

        Allocating the inner states of all experts would take as long as filling them.
        """
        E, (_, N, D) = len(self.up), x.shape
        output, rows = x.new_empty(E, N, D), ROWS_AT_ONCE if x.device.type == "cpu" else max(1, N)
        space = x.new_empty(min(rows, N), self.up.shape[1])
        for e in range(E):
            up, down = (weight[e].to(x.dtype).T for weight in (self.up, self.down))
            biases = [None if bias is None else bias[e].to(x.dtype) for bias in (self.up_bias, self.down_bias)]
            for first in range(0, N, rows):
                some = x[e if len(x) > 1 else 0, first : first + rows]
                inner = self._activated(_write_linear(some, up, biases[0], space[: len(some)]))
                _write_linear(inner, down, biases[1], output[e, first : first + rows])
        return output


class MoELayer(Experts):
    """Feedforwards among which a router chooses `top_k` for each token.

    The layer works as in Switch (Fedus et al. 2022) and GShard's top-2 (Lepikhin et al. 2021). The weights of all
    experts are stacked after the axis of the model's one expert: `up` [1, E, F, D], `down` [1, E, D, F],
    `router` [1, E, D].
    """

    def __init__(self, architecture: Architecture):
        routed = architecture.routed
        assert routed is not None
        super().__init__(architecture, (1, routed.experts))
        self.routed, self.sums_to_one = routed, routed.top_k > 1 and routed.renormalise
        self.router = nn.Parameter(torch.empty(1, routed.experts, architecture.width))

    def forward(self, x: Tensor, auxiliary: list[RouterLoss] | None = None) -> Tensor:
        """Map `x` [1, B, T, D] to [1, B, T, D]; 0 for a token that no expert processes.

        With `auxiliary` this is a training pass: experts have a capacity, and the load-balancing loss is added to the
        list. Otherwise there is no capacity, because with a capacity the score of a token could depend on later tokens:
        whether its second choice is processed depends on their first choices.
        """
        _, B, T, D = x.shape
        scores, gates, chosen = self.choices(x.squeeze(0))
        if auxiliary is not None:
            kept = within_capacity(chosen, self.routed.experts, self.routed.places(T))
            auxiliary.append(_router_loss(scores, chosen, kept, self.routed.balance))
            gates, chosen = gates * kept, torch.where(kept, chosen, self.routed.experts)
        if self.sums_to_one:
            total = gates.sum(-1, keepdim=True)
            gates = gates / total.masked_fill(total == 0, 1)
        return self._mixed(x.reshape(B * T, D), gates.flatten(0, 1), chosen.flatten(0, 1)).view(1, B, T, D)

    def choose(self, top_k: int) -> None:
        """Let each token use `top_k` experts from now on. The gates of a token sum to 1 if they did before."""
        self.routed = self.routed.replace(top_k=top_k)

    def choices(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The scores [B, T, E] of the experts for states `x` [B, T, D], and the scores and numbers of the chosen ones.

        Scores and numbers of the chosen experts are [B, T, k], from the largest score on.
        """
        exact = torch.promote_types(x.dtype, torch.float32)
        # Switch, Eq. 1.
        scores = F.linear(x.to(exact), self.router.squeeze(0).to(exact)).softmax(-1)
        gates, chosen = scores.topk(self.routed.top_k, dim=-1)
        return scores, gates, chosen

    def _mixed(self, x: Tensor, gates: Tensor, numbers: Tensor) -> Tensor:
        """The sum of each token's experts by their gates [N, k], for tokens `x` [N, D] and experts' numbers [N, k].

        A choice with the number E is dropped.
        """
        experts, (_, k), rows = self.routed.experts, numbers.shape, numbers.flatten()
        # Dropped choices are sorted after those of the last expert.
        order = rows.argsort(stable=True)
        place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        ends = F.one_hot(rows, experts + 1)[:, :experts].sum(0).cumsum(0)
        gathered: Callable[[Tensor, Tensor, Tensor, int], Tensor] = _Rows.apply
        out = gathered(self.by_rows(gathered(x, order, place, k), ends), place, order, 1)
        return (out.view(-1, k, x.shape[-1]) * gates[..., None].to(x.dtype)).sum(1)


def _stack(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A weight [E, out, in] and a bias [E, out] of E experts, whose axis may be two in the parameters."""
    return weight.flatten(0, -3), None if bias is None else bias.flatten(0, -2)


class _Rows(torch.autograd.Function):
    """Row index[n] // k of `x` [N, D] for each n: [N·k, D]. `index` is a permutation of N·k and `inverse` its inverse.

    Autograd would add the gradients of equal rows one after the other; here they are gathered and summed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x.index_select(0, index // k if k > 1 else index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        rows = incoming.index_select(0, inverse)
        return rows.view(-1, ctx.k, rows.shape[-1]).sum(1) if ctx.k > 1 else rows, None, None, None


def _operator(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the decorated function of tensors, which changes none of its inputs, the operator `demix::<name>`.

    The compiler treats it as a unit, because it cannot compile a loop over segments of unknown length, and would copy a
    tensor whenever a part of it is written. `fake` returns empty tensors of the shapes and types that the function
    returns. `torch.library.custom_op` does the same, but imports torch's compiler at the first call, which delays the
    start of each training by over a second.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        called = f"demix::{name}"
        torch.library.define(called, torch.library.infer_schema(function, mutates_args=()))
        torch.library.impl(called, "default")(function)
        torch.library.register_fake(called, fake)
        operator: Callable[..., Any] = getattr(torch.ops.demix, name).default
        return operator

    return register


def _empty_output(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor | None) -> Tensor:
    return x.new_empty(len(x), weight.shape[1])


@_operator("expert_linear", _empty_output)
def _expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor | None) -> Tensor:
    """The rows of `x` [N, in] by their experts' `weight` [E, out, in] and `bias` [E, out] or none: [N, out].

    Rows of expert e end at ends[e]; if `ends` is None, all experts have equally many rows. Rows after those of the last
    expert are dropped, and their output is 0. The code loops over experts, because on a CPU torch.bmm is slower from
    128 rows per expert on. Each expert's output and gradients are written to their place in one tensor. Its weight is
    cast when it is used, so that there is never a cast copy of all weights.
    """
    if ends is not None and _in_one_product(x, weight):
        out = F.grouped_mm(x, weight.to(x.dtype).transpose(1, 2), offs=ends.to(torch.int32))
        expert = _expert_of_rows(ends, len(x))
        if bias is not None:
            out += bias.to(x.dtype)[expert.clamp(max=len(weight) - 1)]
        # The product does not write dropped rows, which would contain old memory.
        return out.masked_fill_((expert == len(weight))[:, None], 0)
    out = x.new_empty(len(x), weight.shape[1])
    for e, (start, end) in enumerate(pairwise(_bounds(ends, x, weight))):
        # What is computed too much belongs to later experts, who overwrite it.
        more = start + _usual_rows(end - start, x)
        to_type = None if bias is None else bias[e].to(x.dtype)
        _write_linear(x[start:more], weight[e].to(x.dtype).T, to_type, out[start:more])
    out[end:] = 0
    return out


def _empty_gradients(incoming: Tensor, x: Tensor, weight: Tensor, ends: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), weight.new_empty(weight.shape[:2])


@_operator("expert_linear_backward", _empty_gradients)
def _expert_linear_backward(
    incoming: Tensor, x: Tensor, weight: Tensor, ends: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `_expert_linear` for `x`, `weight` and a bias; dropped rows have none and contribute none."""
    incoming = incoming.contiguous()
    if ends is not None and _in_one_product(x, weight):
        offs, expert = ends.to(torch.int32), _expert_of_rows(ends, len(x))
        for_x = F.grouped_mm(incoming, weight.to(x.dtype), offs=offs).masked_fill_((expert == len(weight))[:, None], 0)
        for_weight = F.grouped_mm(incoming.T, x, offs=offs)
        # On some GPUs the product does not write the gradient of an expert without rows (pytorch issue 172439).
        for_weight.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)
        # A matrix product always sums in the same order; index_add on a GPU does not.
        for_bias = F.one_hot(expert, len(weight) + 1)[:, :-1].T.to(x.dtype) @ incoming
        return for_x, for_weight.to(weight.dtype), for_bias.to(weight.dtype)
    for_x, for_weight = torch.empty_like(x), torch.empty_like(weight)
    for_bias = weight.new_empty(weight.shape[:2])
    for e, (start, end) in enumerate(pairwise(_bounds(ends, x, weight))):
        more, part = start + _usual_rows(end - start, x), incoming[start:end]
        torch.mm(incoming[start:more], weight[e].to(x.dtype), out=for_x[start:more])
        if weight.dtype == x.dtype:
            torch.mm(part.T, x[start:end], out=for_weight[e])
        else:
            zeros = (0, 0, 0, min(more, len(x)) - end)
            for_weight[e] = F.pad(part, zeros).T @ F.pad(x[start:end], zeros)
        torch.sum(part, 0, dtype=weight.dtype, out=for_bias[e])
    for_x[end:] = 0
    return for_x, for_weight, for_bias


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    x, weight, bias, ends = inputs
    ctx.save_for_backward(x, weight, ends)
    ctx.biased = bias is not None


def _gradients(ctx: Any, incoming: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
    for_x, for_weight, for_bias = _expert_linear_backward(incoming, *ctx.saved_tensors)
    return for_x, for_weight, for_bias if ctx.biased else None, None


torch.library.register_autograd("demix::expert_linear", _gradients, setup_context=_keep)


def _write_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Write the linear map of `x` [N, in] by `weight` [in, out] and `bias` [out] to `out` [N, out]; returns `out`."""
    return torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)


def _bounds(ends: Tensor | None, x: Tensor, weight: Tensor) -> list[int]:
    """The first row of each expert, and the end of the last expert's rows [E + 1]."""
    if ends is None:
        return [len(x) // len(weight) * e for e in range(len(weight) + 1)]
    return [0, *ends.tolist()]


def _in_one_product(x: Tensor, weight: Tensor) -> bool:
    """Whether `F.grouped_mm` multiplies all segments at once: on a GPU, for bf16 with rows of a multiple of 16 bytes.

    On a CPU it needs 5 to 35% longer than one product for each segment (fp32 and bf16, widths 128 to 768, 1,024 to
    4,096 rows, 8 experts).
    """
    whole = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    return x.device.type != "cpu" and x.dtype == torch.bfloat16 and whole


def _usual_rows(rows: int, x: Tensor) -> int:
    """The number of rows to multiply for a segment of `rows`: on a CPU in half precision the next multiple of 32.

    oneDNN makes a kernel for every new number of rows, which needs as long as the product of 256 rows by [256, 1024].
    """
    return rows if x.device.type != "cpu" or x.element_size() > 2 else -(-rows // 32) * 32


def _expert_of_rows(ends: Tensor, rows: int) -> Tensor:
    """The expert's number of each row [rows]; E for dropped ones."""
    return torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True)


def within_capacity(chosen: Tensor, experts: int, places: int) -> Tensor:
    """Which choices are processed if each expert has `places` per sequence: bool like `chosen` [B, T, k].

    First choices of all tokens have priority over second ones, and earlier positions over later ones (GShard, Algorithm
    1).
    """
    B, T, k = chosen.shape
    in_order = chosen.transpose(1, 2).reshape(B, k * T)
    before = F.one_hot(in_order, experts).cumsum(1).gather(2, in_order[..., None])[..., 0]
    return (before <= places).view(B, k, T).transpose(1, 2)


def balance_losses(scores: Tensor, first: Tensor) -> Tensor:
    """E·Σ f_e·P_e [B] of `scores` [B, T, E] and the `first` choices [B, T] (Switch, Eq. 4 to 6, by sequence).

    f is the share of tokens whose first choice is e, P the mean score. The minimum is 1, if both are equal for all.
    """
    experts = scores.shape[-1]
    shares = F.one_hot(first, experts).to(scores.dtype).mean(1)
    return experts * (shares * scores.mean(1)).sum(-1)


def router_metrics(counts: list[float]) -> dict[str, float]:
    """The metrics of routers, from the sum of the `counts` of all token-routed layers and sequences of a step.

    `router_dropped` is the share of choices that no expert processed, `router_entropy` the mean entropy of a token's
    scores in nats, `router_balance` the mean load-balancing loss before its weight, `router_load/<e>` the share of
    choices, processed or dropped, of expert e.
    """
    tokens, entropy, balance, dropped, *loads = counts
    chosen = sum(loads)
    named = {f"router_load/{expert}": load / chosen for expert, load in enumerate(loads)}
    metrics = {
        "router_dropped": dropped / chosen,
        "router_entropy": entropy / tokens,
        "router_balance": balance / tokens,
    }
    return metrics | named


def _router_loss(scores: Tensor, chosen: Tensor, kept: Tensor, weight: float) -> RouterLoss:
    losses, still = balance_losses(scores, chosen[..., 0]), scores.detach().double()
    entropy = -torch.xlogy(still, still).sum()
    tokens = torch.full_like(entropy, kept.shape[0] * kept.shape[1])
    balance, dropped = losses.detach().double().sum() * kept.shape[1], (~kept).sum().double()
    loads = F.one_hot(chosen, scores.shape[-1]).sum((0, 1, 2)).double()
    return RouterLoss(weight * losses[None], torch.cat([torch.stack([tokens, entropy, balance, dropped]), loads]))
