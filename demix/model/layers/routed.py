"""A feedforward whose experts the tokens choose: Switch (Fedus et al. 2022) and GShard's top-2 (Lepikhin et al. 2021).

Axes: B sequences, T positions, D width, E experts of the layer, k choices of a token, N tokens.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demix.config.architecture import Routed


class Auxiliary(NamedTuple):
    """What a layer that trains a router leaves in a training pass.

    `losses` are nats [1, B], one number per sequence, already multiplied by the weight of the loss. `counts`
    [4 + E] float64 are the sums over all tokens that `router_metrics` reads.
    """

    losses: Tensor
    counts: Tensor | None = None


class RoutedLayer(nn.Module):
    """Feedforwards of which a router chooses `top_k` for each token.

    The weights of all experts are stacked below the axis of the model's one expert: `up` [1, E, 4D, D], `down`
    [1, E, D, 4D], `router` [1, E, D].
    """

    def __init__(self, routed: Routed, width: int, activation: str = "gelu"):
        super().__init__()
        self.routed, experts = routed, routed.experts
        self.approximate = {"gelu": "none", "gelu_new": "tanh"}[activation]
        self.router = nn.Parameter(torch.empty(1, experts, width))
        self.up = nn.Parameter(torch.empty(1, experts, 4 * width, width))
        self.up_bias = nn.Parameter(torch.empty(1, experts, 4 * width))
        self.down = nn.Parameter(torch.empty(1, experts, width, 4 * width))
        self.down_bias = nn.Parameter(torch.empty(1, experts, width))

    def forward(self, x: Tensor, auxiliary: list[Auxiliary] | None = None) -> Tensor:
        """Map `x` [1, B, T, D] to [1, B, T, D]; 0 for a token of which no expert takes a choice.

        With `auxiliary` this is a training pass: experts have a capacity, and the loss of balance is added to the list.
        Without it no expert has one. A capacity would let later tokens change whether an earlier one's second choice
        finds a place, and so its score.
        """
        _, B, T, D = x.shape
        scores, gates, chosen = self.choices(x[0])
        if auxiliary is not None:
            kept = within_capacity(chosen, self.routed.experts, self.routed.places(T))
            auxiliary.append(_auxiliary(scores, chosen, kept, self.routed.balance))
            gates = gates * kept
        if self.routed.top_k > 1:
            total = gates.sum(-1, keepdim=True)
            gates = gates / total.masked_fill(total == 0, 1)
        taken = kept.flatten() if auxiliary is not None else None
        return self._experts(x.reshape(B * T, D), gates.flatten(), chosen.flatten(), taken).view(1, B, T, D)

    def choices(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The scores [B, T, E] of the experts for states `x` [B, T, D], and of the chosen ones scores and numbers.

        The latter are [B, T, k], the largest score first.
        """
        scores = router_scores(x, self.router[0], self.routed.cosine)
        gates, chosen = scores.topk(self.routed.top_k, dim=-1)
        return scores, gates, chosen

    def _experts(self, x: Tensor, gates: Tensor, chosen: Tensor, taken: Tensor | None) -> Tensor:
        """The sum of each token's experts by their gates [N, D], for tokens `x` [N, D] and choices [N·k]."""
        experts, k = self.routed.experts, self.routed.top_k
        # Dropped choices are sorted behind those of the last expert.
        numbers = chosen if taken is None else torch.where(taken, chosen, experts)
        ends = torch.bincount(numbers, minlength=experts)[:experts].cumsum(0)
        order = numbers.argsort(stable=True)[: int(ends[-1])]
        tokens, expert = order // k, numbers[order]
        inner = _by_expert(x[tokens], self.up[0], ends) + self.up_bias[0].to(x.dtype)[expert]
        inner = F.gelu(inner, approximate=self.approximate)
        out = _by_expert(inner, self.down[0], ends) + self.down_bias[0].to(x.dtype)[expert]
        return torch.zeros_like(x).index_add(0, tokens, out * gates[order, None].to(x.dtype))


def router_scores(x: Tensor, router: Tensor, cosine: bool = False) -> Tensor:
    """softmax(router·x) [..., E], at least fp32, of states `x` [..., D] and a router [E, D] (Switch, Eq. 1).

    With `cosine` the states are divided by their lengths first.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    states = F.normalize(x.to(exact), dim=-1) if cosine else x.to(exact)
    return F.linear(states, router.to(exact)).softmax(-1)


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
    loads = torch.bincount(chosen.flatten(), minlength=scores.shape[-1]).double()
    return Auxiliary(weight * losses[None], torch.cat([torch.stack([tokens, entropy, balance, dropped]), loads]))


def _by_expert(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The rows of `x` [N, in] by the weights [E, out, in] of their experts: [N, out]. Rows of expert e end at ends[e].

    One grouped product where torch has it: not in fp64, and for rows of whole 16 bytes. Elsewhere each expert's rows
    are multiplied alone.
    """
    weight = weight.to(x.dtype)
    if x.dtype == torch.float64 or any(size * x.element_size() % 16 for size in weight.shape[1:]):
        rows = torch.split(x, ends.diff(prepend=ends.new_zeros(1)).tolist())
        return torch.cat([part @ of_expert.T for part, of_expert in zip(rows, weight, strict=True)])
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends.to(torch.int32))
