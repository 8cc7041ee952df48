"""A feedforward whose experts the tokens choose: Switch (Fedus et al. 2022) and GShard's top-2 (Lepikhin et al. 2021).

Axes: B sequences, T positions, D width, E experts of the layer, k choices of a token, N tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from demix.config.architecture import Routed
from demix.model.layers.feedforward import activated, feedforward_parameters, mapped
from demix.model.layers.operators import operator


class Auxiliary(NamedTuple):
    """What a layer that trains a router leaves in a training pass.

    `losses` are nats [1, B], one number per sequence, already multiplied by the weight of the loss. `counts`
    [4 + E] float64 are the sums over all tokens that `router_metrics` reads.
    """

    losses: Tensor
    counts: Tensor | None = None


class RoutedLayer(nn.Module):
    """Feedforwards of which a router chooses `top_k` for each token.

    The weights of all experts are stacked below the axis of the model's one expert: `up` [1, E, F, D], `down`
    [1, E, D, F], `router` [1, E, D]. F, `gated` and `biased` are as in a `DEMixLayer`.
    """

    up: nn.Parameter
    up_bias: nn.Parameter | None
    down: nn.Parameter
    down_bias: nn.Parameter | None

    def __init__(
        self,
        routed: Routed,
        width: int,
        activation: str = "gelu",
        *,
        inner: int | None = None,
        gated: bool = False,
        biased: bool = True,
    ):
        super().__init__()
        self.routed, experts = routed, routed.experts
        self.sums_to_one = routed.top_k > 1 and routed.renormalise
        self.activation, self.gated, inner = activation, gated, inner or 4 * width
        self.router = nn.Parameter(torch.empty(1, experts, width))
        for name, parameter in feedforward_parameters((1, experts), width, inner, gated, biased).items():
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor, auxiliary: list[Auxiliary] | None = None) -> Tensor:
        """Map `x` [1, B, T, D] to [1, B, T, D]; 0 for a token of which no expert takes a choice.

        With `auxiliary` this is a training pass: experts have a capacity, and the loss of balance is added to the list.
        Without it no expert has one. A capacity would let later tokens change whether an earlier one's second choice
        finds a place, and so its score.
        """
        _, B, T, D = x.shape
        scores, gates, chosen = self.choices(x.squeeze(0))
        if auxiliary is not None:
            kept = within_capacity(chosen, self.routed.experts, self.routed.places(T))
            auxiliary.append(_auxiliary(scores, chosen, kept, self.routed.balance))
            gates, chosen = gates * kept, torch.where(kept, chosen, self.routed.experts)
        if self.sums_to_one:
            total = gates.sum(-1, keepdim=True)
            gates = gates / total.masked_fill(total == 0, 1)
        return self._experts(x.reshape(B * T, D), gates.flatten(0, 1), chosen.flatten(0, 1)).view(1, B, T, D)

    def choose(self, top_k: int) -> None:
        """Let tokens choose `top_k` experts from now on. The gates of a token sum to 1 where they did before."""
        self.routed = replace(self.routed, top_k=top_k)

    def choices(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The scores [B, T, E] of the experts for states `x` [B, T, D], and of the chosen ones scores and numbers.

        The latter are [B, T, k], the largest score first.
        """
        scores = router_scores(x, self.router.squeeze(0))
        gates, chosen = scores.topk(self.routed.top_k, dim=-1)
        return scores, gates, chosen

    def _experts(self, x: Tensor, gates: Tensor, numbers: Tensor) -> Tensor:
        """The sum of each token's experts by their gates [N, k], for tokens `x` [N, D] and experts' numbers [N, k].

        A choice with the number E is dropped.
        """
        experts, (_, k), rows = self.routed.experts, numbers.shape, numbers.flatten()
        # Dropped choices are sorted behind those of the last expert.
        order = rows.argsort(stable=True)
        place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        ends = F.one_hot(rows, experts + 1)[:, :experts].sum(0).cumsum(0)
        taken: Callable[[Tensor, Tensor, Tensor, int], Tensor] = _Rows.apply
        up_bias, down_bias = (None if bias is None else bias.squeeze(0) for bias in (self.up_bias, self.down_bias))
        inner = _expert_linear(taken(x, order, place, k), self.up.squeeze(0), up_bias, ends)
        inner = activated(inner, self.activation, self.gated)
        out = taken(_expert_linear(inner, self.down.squeeze(0), down_bias, ends), place, order, 1)
        return (out.view(-1, k, x.shape[-1]) * gates[..., None].to(x.dtype)).sum(1)


class _Rows(torch.autograd.Function):
    """Row index[n] // k of `x` [N, D] for each n: [N·k, D]. `index` is a permutation of N·k and `inverse` its inverse.

    Autograd would add up the gradients of equal rows one after the other; here they are gathered and summed.
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


def _empty_output(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[1])


# Operators of our own, because the compiler takes no loop over segments whose lengths it cannot know.
@operator("expert_linear", _empty_output)
def _expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """The rows of `x` [N, in] by their experts' `weight` [E, out, in] and `bias` [E, out] or none: [N, out].

    Rows of expert e end at ends[e]. Behind those of the last expert stand dropped rows, whose output is 0.
    """
    if _in_one_product(x, weight):
        out = F.grouped_mm(x, weight.to(x.dtype).transpose(1, 2), offs=ends.to(torch.int32))
        expert = _expert_of_rows(ends, len(x))
        if bias is not None:
            out += bias.to(x.dtype)[expert.clamp(max=len(weight) - 1)]
        # The product leaves what was in memory in the dropped rows.
        return out.masked_fill_((expert == len(weight))[:, None], 0)
    out = x.new_empty(len(x), weight.shape[1])
    for e, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        # What is computed too much belongs to later experts, who overwrite it.
        more = start + _usual_length(end - start, x)
        mapped(x[start:more], weight[e].to(x.dtype).T, None if bias is None else bias[e].to(x.dtype), out[start:more])
    out[end:] = 0
    return out


def _empty_gradients(incoming: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), weight.new_empty(weight.shape[:2])


@operator("expert_linear_backward", _empty_gradients)
def _expert_linear_backward(incoming: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `_expert_linear` for `x`, `weight` and a bias. Dropped rows have and give none."""
    incoming = incoming.contiguous()
    if _in_one_product(x, weight):
        offs, expert = ends.to(torch.int32), _expert_of_rows(ends, len(x))
        for_x = F.grouped_mm(incoming, weight.to(x.dtype), offs=offs).masked_fill_((expert == len(weight))[:, None], 0)
        for_weight = F.grouped_mm(incoming.T, x, offs=offs)
        # On some GPUs the product leaves what was in memory for an expert without rows (pytorch issue 172439).
        for_weight.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)
        # A matrix product adds up in the same order every time, index_add on a GPU does not.
        for_bias = F.one_hot(expert, len(weight) + 1)[:, :-1].T.to(x.dtype) @ incoming
        return for_x, for_weight.to(weight.dtype), for_bias.to(weight.dtype)
    for_x, for_weight = torch.empty_like(x), torch.empty_like(weight)
    for_bias = weight.new_empty(weight.shape[:2])
    for e, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        more, part = start + _usual_length(end - start, x), incoming[start:end]
        torch.mm(incoming[start:more], weight[e].to(x.dtype), out=for_x[start:more])
        if weight.dtype == x.dtype:
            torch.mm(part.T, x[start:end], out=for_weight[e])
        else:
            zeros = (0, 0, 0, _usual_length(end - start, x) - (end - start))
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


def _in_one_product(x: Tensor, weight: Tensor) -> bool:
    """Whether `F.grouped_mm` multiplies all segments at once: on a GPU, of bf16 in rows of whole 16 bytes.

    On a CPU it takes 5 to 35% longer than one product for each segment (fp32 and bf16, widths 128 to 768, 1,024 to
    4,096 rows, 8 experts).
    """
    whole = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    return x.device.type != "cpu" and x.dtype == torch.bfloat16 and whole


def _usual_length(rows: int, x: Tensor) -> int:
    """The number of rows to multiply for a segment of `rows`: on a CPU in half precision the next multiple of 32.

    oneDNN makes a kernel for every new number of rows, which takes as long as the product of 256 rows by [256, 1024].
    """
    return -(-rows // 32) * 32 if x.device.type == "cpu" and x.element_size() == 2 else rows


def _expert_of_rows(ends: Tensor, rows: int) -> Tensor:
    """The expert's number of each row [rows]; E for dropped ones."""
    return torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True)


def router_scores(x: Tensor, router: Tensor) -> Tensor:
    """softmax(router·x) [..., E], at least fp32, of states `x` [..., D] and a router [E, D] (Switch, Eq. 1)."""
    exact = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(exact), router.to(exact)).softmax(-1)


def within_capacity(chosen: Tensor, experts: int, places: int) -> Tensor:
    """Which choices an expert takes that has `places` for the tokens of a sequence: bool like `chosen` [B, T, k].

    The first choices of all tokens come before all second ones, and earlier positions before later ones (GShard,
    Algorithm 1).
    """
    B, T, k = chosen.shape
    in_order = chosen.transpose(1, 2).reshape(B, k * T)
    before = F.one_hot(in_order, experts).cumsum(1).gather(2, in_order[..., None])[..., 0]
    return (before <= places).view(B, k, T).transpose(1, 2)


def balance_losses(scores: Tensor, first: Tensor) -> Tensor:
    """E·Σ f_e·P_e [B] of `scores` [B, T, E] and the `first` choices [B, T] (Switch, Eq. 4 to 6, by sequence).

    f is the share of tokens whose first choice is e, P the mean score. The least is 1, where both are equal for all.
    """
    experts = scores.shape[-1]
    shares = F.one_hot(first, experts).to(scores.dtype).mean(1)
    return experts * (shares * scores.mean(1)).sum(-1)


def router_metrics(counts: list[float]) -> dict[str, float]:
    """The metrics of routers from the sum of the `counts` of all routed layers and sequences of a step.

    `router_dropped` is the share of choices that no expert took, `router_entropy` the mean entropy of a token's scores
    in nats, `router_balance` the mean loss of balance before its weight, `router_load/<e>` the share of choices, taken
    or dropped, that fell on expert e.
    """
    tokens, entropy, balance, dropped, *loads = counts
    chosen = sum(loads)
    named = {f"router_load/{expert}": load / chosen for expert, load in enumerate(loads)}
    told = {"router_dropped": dropped / chosen, "router_entropy": entropy / tokens, "router_balance": balance / tokens}
    return told | named


def _auxiliary(scores: Tensor, chosen: Tensor, kept: Tensor, weight: float) -> Auxiliary:
    losses, still = balance_losses(scores, chosen[..., 0]), scores.detach().double()
    entropy = -torch.xlogy(still, still).sum()
    tokens = torch.full_like(entropy, kept.shape[0] * kept.shape[1])
    balance, dropped = losses.detach().double().sum() * kept.shape[1], (~kept).sum().double()
    loads = F.one_hot(chosen, scores.shape[-1]).sum((0, 1, 2)).double()
    return Auxiliary(weight * losses[None], torch.cat([torch.stack([tokens, entropy, balance, dropped]), loads]))
