"""Choosing the parent of a novel domain's expert from the score tables of dev splits (paper, section 6)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from demix.evaluate.score_tables import read_scores
from demix.mix.priors import cached_log_prior, fitted_log_prior


def choose_parent(scores: Path, domain: str, experts: Sequence[str], *, blocks: int, decay: float) -> dict[str, Any]:
    """The expert to copy for `domain`: the highest cached posterior (`history`) on its dev split (paper, section 6).

    Returns parent, its posterior, and for comparison the expert of lowest dev loss, with all posteriors and
    losses (nats per token) by expert. `scores` is scores/<model>; `blocks` of dev and `decay` (lambda) make the
    posterior. For a masked model, which has no such posterior, the fitted prior of these blocks takes its place.
    """
    table = read_scores(scores / f"{domain}.dev", experts)
    if table.folds:
        prior = np.exp(fitted_log_prior(table.scores[:blocks], table.mask[:blocks]))
    else:
        prior = np.exp(cached_log_prior(table.scores, table.mask, "history", decay=decay, blocks=blocks))
    losses = -table.scores.sum(axis=(0, 1)) / table.tokens
    return {
        "parent": experts[int(prior.argmax())],
        "parent_prior": float(prior.max()),
        "priors": dict(zip(experts, prior.tolist(), strict=True)),
        "lowest_dev_loss_expert": experts[int(losses.argmin())],
        "dev_losses": dict(zip(experts, losses.tolist(), strict=True)),
    }


def own_dev_losses(scores: Path, experts: Sequence[str], blocks: int) -> dict[str, float]:
    """Nats per token of each expert on the first `blocks` dev blocks of its own domain, from scores/<model>."""
    losses = {}
    for name in experts:
        table = read_scores(scores / f"{name}.dev", (name,))
        losses[name] = float(-table.scores[:blocks].sum() / table.mask[:blocks].sum())
    return losses
