"""Posteriors over experts, block by block (paper, Eq. 7-9). Arrays in, arrays out; all in log space.

Axes: B blocks, T positions of a block, E experts. `scores` [B, T, E] float64 are log p(token) in nats under
each expert, 0 where `mask` [B, T] is False (the padding of the last block).
"""

import numpy as np
from scipy.special import log_softmax


def log_weights(scores: np.ndarray, log_priors: np.ndarray, window: int | None, uniform_start: bool) -> np.ndarray:
    """log g [B, T, E]: the weights used to predict each token, from the tokens before it in its block.

    `log_priors` [B, E] hold at each block's start. `window` is how many of the last tokens count (None: all,
    the paper's Eq. 7-8). With `uniform_start` the first token of a block gets equal weights whatever the
    prior, as in the paper's released code.
    """
    sums = np.cumsum(scores, axis=1)
    before = np.zeros_like(sums)  # sum of the scores of the tokens that count, at each position
    before[:, 1:] = sums[:, :-1]
    if window is not None:
        before[:, window + 1 :] -= sums[:, : -window - 1]
    logits = log_priors[:, None, :] + before
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


def updating_log_priors(block_evidence: np.ndarray, decay: float) -> np.ndarray:
    """log prior [B + 1, E] at the start of each block and after the last one (paper, Eq. 9).

    The first is uniform; prior b is proportional to the sum over earlier blocks b' of decay^(b - b') times the
    posterior after block b'. The last row is what `cached` keeps.
    """
    blocks, experts = block_evidence.shape
    log_priors = np.full((blocks + 1, experts), -np.log(experts))
    total = np.full(experts, -np.inf)
    for block in range(blocks):
        posterior = log_softmax(log_priors[block] + block_evidence[block])
        total = np.log(decay) + np.logaddexp(total, posterior)
        log_priors[block + 1] = log_softmax(total)
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
