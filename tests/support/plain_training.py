"""A training as a plain loop: autograd on the mean loss, torch's clipping and AdamW, linear warm-up and decay."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Step:
    """What an update tells: the loss, those of the targets, the gradient norm, and what each routed layer adds."""

    loss: float
    losses: Tensor
    norm: float
    routers: list[Any]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1)


def rates(steps: int, highest: float, warmup: float) -> list[float]:
    """The learning rate of each of `steps` updates, of which the share `warmup` warms up."""
    warming = math.ceil(warmup * steps)
    rising = [highest * (step + 1) / warming for step in range(warming)]
    return rising + [highest * (steps - step) / (steps - warming) for step in range(warming, steps)]


def plain_steps(
    model: Any,
    optimizer: torch.optim.AdamW,
    batches: Any,
    rates: dict[int, float],
    clip: float = 1.0,
    logits_of: Callable[[Any], Tensor] | None = None,
) -> Iterator[Step]:
    """Train `model` in place on the batches of the steps that `rates` has, and tell of each.

    A masked batch has losses at its places alone. The losses of weighted targets are divided by `batches.targets`. To
    the loss come those that balance the routers of routed layers. `logits_of` a batch are by default those of a GPT.
    """
    for step, rate in rates.items():
        batch, routers = batches.draw(step), []
        targets = batch.targets
        logits = logits_of(batch) if logits_of else model.logits(model(batch.inputs, auxiliary=routers))
        if batch.places is not None:
            targets = torch.full_like(batch.inputs, -100).scatter(2, batch.places, targets)
        losses = nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
        losses = losses.view(targets.shape)
        loss = losses.sum() / (targets != -100).sum()
        optimizer.zero_grad()
        (loss + sum(each.losses.mean() for each in routers)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        yield Step(loss.item(), losses.detach(), norm.item(), routers)
