"""Posteriors over experts, block by block (paper, Eq. 7-9). Arrays in, arrays out; all in log space.

Axes: B blocks, T positions of a block, E experts. `scores` [B, T, E] float64 are log p(token) in nats under
each expert, 0 where `mask` [B, T] is False (the padding of the last block).
"""

import math

import numpy as np
from scipy.special import log_softmax


def log_evidence(scores: np.ndarray, window: int | None) -> np.ndarray:
    """Sum of the scores [B, T, E] of the last `window` tokens of its block before each token (None: of all)."""
    sums = np.cumsum(scores, axis=1)
    before = np.zeros_like(sums)
    before[:, 1:] = sums[:, :-1]
    if window is not None:
        before[:, window + 1 :] -= sums[:, : -window - 1]
    return before


def log_weights(scores: np.ndarray, log_priors: np.ndarray, window: int | None, uniform_start: bool) -> np.ndarray:
    """log g [B, T, E]: the weights used to predict each token, from the tokens before it in its block.

    `log_priors` [B, E] hold at each block's start. `window` is how many of the last tokens count (None: all,
    the paper's Eq. 7-8; 0: the prior alone). With `uniform_start` the first token of a block gets equal weights
    whatever the prior, as in the paper's released code.
    """
    logits = log_priors[:, None, :] + log_evidence(scores, window)
    if uniform_start:
        logits[:, 0, :] = 0.0
    return log_softmax(logits, axis=-1)


def evidence(scores: np.ndarray, mask: np.ndarray, window: int | None) -> np.ndarray:
    """Sum of each block's scores [B, E] over its last `window` tokens (None: over all of them)."""
    if window is None:
        return scores.sum(axis=1)
    lengths = mask.sum(axis=1)
    counted = np.arange(mask.shape[1]) >= (lengths - window)[:, None]
    return (scores * (counted & mask)[..., None]).sum(axis=1)


def updating_log_priors(
    block_evidence: np.ndarray, decay: float | np.ndarray, first: np.ndarray | None = None, seen: int = 0
) -> np.ndarray:
    """log prior [B + 1, E] at the start of each block and after the last one (paper, Eq. 9).

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


def keep_top(log_g: np.ndarray, k: int) -> np.ndarray:
    """`log_g` [..., E] with all but the k largest at each token removed and the rest renormalised.

    Of equal weights the experts that come first are kept.
    """
    order = np.argsort(-log_g, axis=-1, kind="stable")
    kept = np.full_like(log_g, -np.inf)
    top = order[..., :k]
    np.put_along_axis(kept, top, np.take_along_axis(log_g, top, axis=-1), axis=-1)
    return log_softmax(kept, axis=-1)


def _normalised(logs: np.ndarray) -> np.ndarray:
    # Not scipy's log_softmax: on a handful of experts, block after block, its checks take most of the time.
    return logs - np.logaddexp.reduce(logs, axis=-1, keepdims=True)
