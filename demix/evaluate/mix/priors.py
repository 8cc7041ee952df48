"""Priors over experts at the start of each block (paper, Eq. 7). Arrays in, arrays out; all in log space.

Axes: B blocks, T positions of a block, E experts. `scores` [B, T, E] float64 are log p(token) in nats under
each expert, 0 where `mask` [B, T] is False (the padding of the last block).
"""

import math

import numpy as np
from scipy.special import logsumexp

from demix.evaluate.mix.rules import weights_rule

# What the released code's ewm(alpha=0.3) keeps from block to block.
RELEASED_DECAY = 0.7


def updating_log_priors(
    block_evidence: np.ndarray, decay: float | np.ndarray, first: np.ndarray | None = None, seen: int = 0
) -> np.ndarray:
    """log prior [B + 1, E] at the start of each block and after the last one (paper, Eq. 7).

    The first is uniform; prior b is proportional to the sum over earlier blocks b' of decay^(b - b') times the
    posterior after block b'. The last row is what `cached` keeps. With decays [D] there are D of each prior
    ([B + 1, D, E]). To go on after `seen` blocks, give the last row of those as `first`.
    """
    blocks, experts = block_evidence.shape
    decays = np.asarray(decay, dtype=np.float64)[..., None]
    log_priors = np.full((blocks + 1, *decays.shape[:-1], experts), -np.log(experts))
    total = np.full(log_priors.shape[1:], -np.inf)
    if first is not None and seen:
        log_priors[0] = first
        # That sum's weights together: decay + decay² + … + decay^seen.
        with np.errstate(divide="ignore", invalid="ignore"):
            series = -decays * np.expm1(seen * np.log(decays)) / (1 - decays)
        total = first + np.log(np.where(decays == 1, seen, series))
    for block in range(blocks):
        posterior = _normalised(log_priors[block] + block_evidence[block])
        total = np.log(decays) + np.logaddexp(total, posterior)
        log_priors[block + 1] = _normalised(total)
    return log_priors


def released_log_priors(
    scores: np.ndarray, mask: np.ndarray, first: np.ndarray | None = None, seen: int = 0
) -> np.ndarray:
    """log prior [B + 1, E] at each block's start and after the last one, as the paper's published code has it.

    Blocks come in batches of two with one prior. A block's posterior is the weights of its last position, which know
    the token before that; a batch's is their mean, and the prior is `ewm(alpha=0.3, adjust=False)` of these. To go
    on after `seen` blocks, an even number, give the last row of those as `first`.
    """
    blocks, _, experts = scores.shape
    log_priors = np.full((blocks + 1, experts), -np.log(experts))
    prior = log_priors[0].copy() if first is None else first
    lengths = mask.sum(axis=1)
    last = scores[np.arange(blocks), np.maximum(lengths - 2, 0)]
    for block in range(0, blocks, 2):
        batch = slice(block, min(block + 2, blocks))
        log_priors[batch] = prior
        posteriors = _normalised(prior + last[batch])
        posteriors[lengths[batch] == 1] = -np.log(experts)
        mean = np.logaddexp.reduce(posteriors, axis=0) - np.log(len(posteriors))
        prior = np.logaddexp(math.log(0.7) + prior, math.log(0.3) + mean) if seen or block else mean
    log_priors[blocks] = prior
    return log_priors


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
    return updating_log_priors(weights_rule(weights).block_evidence(scores, mask), decay, first, seen)


def cached_log_prior(
    scores: np.ndarray, mask: np.ndarray, weights: str | int, *, decay: float, blocks: int, scorer: str = "paper"
) -> np.ndarray:
    """log prior [E] after the first `blocks` blocks of a domain's dev split (the paper: 100)."""
    used = blocks_used(blocks, scorer)
    log_prior: np.ndarray = log_prior_path(scores[:used], mask[:used], weights, decay, scorer)[-1]
    return log_prior


def blocks_used(blocks: int, scorer: str = "paper") -> int:
    """The dev blocks that make a prior when `blocks` are asked for: the released code's "100" are 101 pairs."""
    return 2 * (blocks + 1) if scorer == "released" else blocks


def posterior_trace(scores: np.ndarray, mask: np.ndarray, weights: str | int, log_priors: np.ndarray) -> np.ndarray:
    """The posterior [B, E] after each block, of the log priors [B, E] at its start (paper, Eq. 5-6)."""
    logs = log_priors + weights_rule(weights).block_evidence(scores, mask)
    posterior: np.ndarray = np.exp(logs - logsumexp(logs, axis=1, keepdims=True))
    return posterior


def _normalised(logs: np.ndarray) -> np.ndarray:
    # Not scipy's log_softmax: on a handful of experts, block after block, its checks take most of the time.
    return logs - np.logaddexp.reduce(logs, axis=-1, keepdims=True)
