"""Training an expert beside the frozen feedforwards of a parent (FlexOlmo, Shi et al. 2025, arXiv 2507.07024)."""

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from demix.data.shards import TokenShard, blocks
from demix.model.gpt import GPT
from demix.model.merge_routed import BLOCKS, moments
from demix.train.state import State

# A row of a router is a mean state times this, over the square root of the width.
ROW = 10.0


def hold(model: GPT, first: State, learns: Callable[[str], bool]) -> None:
    """Leave parameters of `model` to be trained whose names `learns` takes; others stay as in the state `first`."""
    begun = model.stacked(first.shared, first.experts)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(begun[f"parameter/{name}"])
            parameter.requires_grad_(learns(name))


def anchored(model: GPT, first: State, public: Mapping[str, TokenShard]) -> State:
    """Leave the second feedforward of each layer of `model` and its row of the router to be trained.

    `model` has one expert of a domain, and two feedforwards in every layer, both those of a parent in the state
    `first`. The first of the two, the anchor, stays as it is, as long as no weight decays. Rows of routers begin with
    mean states: of the domain's text, and of that of all domains of `public` for the anchor. The anchor's is taken from
    both rows, which changes no gate, and leaves the anchor the row 0 in all pairs. Returns `first` with these rows.
    """
    (domain,) = model.experts
    hold(model, first, lambda name: ".feedforward." in name)
    means = {name: _mean_states(model, shard) for name, shard in public.items()}
    rows = ROW / math.sqrt(model.architecture.width) * (means[domain] - torch.stack([*means.values()]).mean(0))
    own = dict(first.experts[domain])
    for number, row in enumerate(rows):
        own[f"parameter/blocks.{number}.feedforward.router"] = torch.stack([torch.zeros_like(row), row]).float()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(_of_second)  # type: ignore[no-untyped-call]
    return dataclasses.replace(first, experts={domain: own})


def _mean_states(model: GPT, shard: TokenShard) -> Tensor:
    """The mean normed input of each feedforward over the first blocks of `shard`: float64 [layers, D]."""
    length = model.architecture.context
    _, sums = moments(model, shard, BLOCKS)
    return sums / int(blocks(shard, length, BLOCKS * length)[2].sum())


def _of_second(gradient: Tensor) -> Tensor:
    """The gradient [1, 2, ...] of two experts without that of the first."""
    return torch.stack([torch.zeros_like(gradient[:, 0]), gradient[:, 1]], dim=1)
