"""Mixing experts: arithmetic on score tables (DESIGN section 5), no forward pass and no torch."""

import numpy as np
from scipy.special import logsumexp

from demix.config.systems import METHODS
from demix.errors import DemixError
from demix.evaluate.mix.posterior import (
    evidence,
    keep_top,
    log_evidence,
    log_weights,
    released_log_priors,
    updating_log_priors,
)

SCORERS = ("paper", "released")
# What the released code's ewm(alpha=0.3) keeps from block to block.
RELEASED_DECAY = 0.7
# Sums of products of weights below this have lost digits, or all.
_SMALL = 1e-290


def weights_rule(weights: str | int) -> tuple[int | None, bool]:
    """(window, uniform start) of a weights rule: `history`, `released` or a window in tokens."""
    if weights == "history":
        return None, False
    if weights == "released":
        return 1, True
    if isinstance(weights, int) and weights > 0:
        return weights, False
    raise DemixError(f"evaluation.weights {weights!r}", "is not known", "use history, released or a positive window")


def mix(
    scores: np.ndarray,
    mask: np.ndarray,
    method: str,
    weights: str | int = "history",
    *,
    decay: float = 0.3,
    log_prior: np.ndarray | None = None,
    top_k: int | None = None,
    scorer: str = "paper",
) -> np.ndarray:
    """log p [B, T] in nats of each token under the mixture of experts (paper, Eq. 6).

    `scores` [B, T, E] and `mask` [B, T] as in `demix.evaluate.mix.posterior`; padded positions come out 0. `method`
    is `average` (equal weights, no posterior), or a posterior with the prior `uniform`, `updating` (with
    `decay`) or `cached` (`log_prior` [E], from `cached_log_prior`). With the scorer `released` weights and updating
    prior are those of the paper's published code.
    """
    blocks, _, experts = scores.shape
    window, uniform_start = mixing_rule(method, weights, scorer)
    log_priors = np.full((blocks, experts), -np.log(experts))
    if method == "cached":
        if log_prior is None:
            raise DemixError("method cached", "was given no prior", "compute one with cached_log_prior")
        log_priors[:] = log_prior
    elif method == "updating":
        log_priors = log_prior_path(scores, mask, weights, decay, scorer)[:-1]
    mixed = log_mixtures(scores, log_priors[:, None], window, uniform_start, top_k)[:, 0]
    return np.where(mask, mixed, 0.0)


def mixing_rule(method: str, weights: str | int, scorer: str = "paper") -> tuple[int | None, bool]:
    """`weights_rule` of a method and a scorer; the prior alone (a window of 0) for `average`."""
    if method not in METHODS:
        raise DemixError(f"method {method}", "is not known", f"use one of {', '.join(METHODS)}")
    if scorer not in SCORERS:
        raise DemixError(f"scorer {scorer}", "is not known", f"use one of {', '.join(SCORERS)}")
    rule = weights_rule("released" if scorer == "released" else weights)
    return (0, False) if method == "average" else rule


def log_mixtures(
    scores: np.ndarray, log_priors: np.ndarray, window: int | None, uniform_start: bool, top_k: int | None = None
) -> np.ndarray:
    """log p [B, K, T] of each token under K mixtures with the priors `log_priors` [B, K, E], by one weights rule.

    As `log_weights`, `keep_top` and logsumexp give it, to the last few digits, but with one exponential for all
    priors: sums of products of factors scaled by the largest. Where all of these are below 1e-290 (prior and evidence
    disagree by 667 nats and more) the logarithms themselves are used.
    """
    by_expert = scores.transpose(0, 2, 1)
    highest = by_expert.max(axis=1, keepdims=True)
    likelihood = np.exp(by_expert - highest)
    logits = log_evidence(scores, window).transpose(0, 2, 1)
    support = np.exp(logits - logits.max(axis=1, keepdims=True))
    priors = np.exp(log_priors)
    if top_k is None or top_k >= scores.shape[2]:
        top_k = None
        chosen, total = priors @ (support * likelihood), priors @ support
    else:
        chosen, total = (np.empty((*priors.shape[:2], scores.shape[1])) for _ in range(2))
        for number in range(priors.shape[1]):
            kept = _largest(priors[:, number, :, None] * support, top_k)
            total[:, number] = kept.sum(axis=1)
            chosen[:, number] = np.einsum("bet,bet->bt", kept, likelihood)
    if uniform_start:
        first = likelihood[:, :top_k, 0]
        chosen[:, :, 0], total[:, :, 0] = first.sum(axis=1, keepdims=True), first.shape[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        mixed = np.log(chosen / total) + highest
    lost = (chosen < _SMALL).any(axis=2)
    for number in np.flatnonzero(lost.any(axis=0)):
        blocks = lost[:, number]
        log_g = log_weights(scores[blocks], log_priors[blocks, number], window, uniform_start)
        log_g = log_g if top_k is None else keep_top(log_g, top_k)
        mixed[blocks, number] = logsumexp(log_g + scores[blocks], axis=-1)
    return mixed


def log_prior_path(
    scores: np.ndarray,
    mask: np.ndarray,
    weights: str | int,
    decay: float | np.ndarray,
    scorer: str = "paper",
    first: np.ndarray | None = None,
    seen: int = 0,
) -> np.ndarray:
    """log prior [B + 1, E] at each block's start and after the last, updating; goes on after `seen` blocks.

    See `updating_log_priors` for several decays; the `released` scorer has its own, and no use for `weights`.
    """
    if scorer == "released":
        return released_log_priors(scores, mask, first, seen)
    window, _ = weights_rule(weights)
    return updating_log_priors(evidence(scores, mask, window), decay, first, seen)


def cached_log_prior(
    scores: np.ndarray, mask: np.ndarray, weights: str | int, *, decay: float, blocks: int, scorer: str = "paper"
) -> np.ndarray:
    """log prior [E] after the first `blocks` blocks of a domain's dev split (the paper: 100)."""
    used = blocks_used(blocks, scorer)
    return log_prior_path(scores[:used], mask[:used], weights, decay, scorer)[-1]


def blocks_used(blocks: int, scorer: str = "paper") -> int:
    """The dev blocks that make a prior when `blocks` are asked for: the released code's "100" are 101 pairs."""
    return 2 * (blocks + 1) if scorer == "released" else blocks


def posterior_trace(scores: np.ndarray, mask: np.ndarray, weights: str | int, log_priors: np.ndarray) -> np.ndarray:
    """The posterior [B, E] after each block, of the priors [B, E] at its start."""
    window, _ = weights_rule(weights)
    logs = log_priors + evidence(scores, mask, window)
    return np.exp(logs - logsumexp(logs, axis=1, keepdims=True))


def _largest(weights: np.ndarray, k: int) -> np.ndarray:
    """`weights` [B, E, T] with 0 in place of all but the k largest at each token; of equal ones the first are kept."""
    rows = np.ascontiguousarray(weights.transpose(0, 2, 1))
    least = np.partition(rows, -k, axis=-1)[..., -k, None]
    kept = rows >= least
    tied = kept.sum(axis=-1) > k
    if tied.any():
        order = np.argsort(-rows[tied], axis=-1, kind="stable")
        kept[tied] = np.argsort(order, axis=-1) < k
    return np.where(kept, rows, 0.0).transpose(0, 2, 1)
