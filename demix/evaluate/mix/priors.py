"""Priors over experts at the start of each block (paper, section 5.1, Eq. 7), as arrays of logarithms.

Axes: B blocks, T positions of a block, E experts. `scores` [B, T, E] float64 are log p(token) in nats under each
expert. They are 0 where `mask` [B, T] is False, at the padding of the last block.
"""

import math

import numpy as np

from demix.evaluate.mix.logs import log_softmax
from demix.evaluate.mix.rules import WeightsRule, weights_rule

# The decay of the released code: its ewm(alpha=0.3) keeps 0.7 of the prior from block to block.
RELEASED_DECAY = 0.7
# How many nats per token the fitted prior may miss of the best.
FITTED = 1e-6
# A fitted weight that goes on falling with every step is none.
_NONE = 1e-200
# The step length of an extrapolation that gains nothing over two plain steps.
_NEAR_ONE = 1.001


def updating_log_priors(
    block_evidence: np.ndarray, decay: float | np.ndarray, first: np.ndarray | None = None, seen: int = 0
) -> np.ndarray:
    """log prior [B + 1, E] at the start of each block and after the last one (paper, Eq. 7).

    The first prior is uniform. Prior b is proportional to the sum over earlier blocks b' of decay^(b - b') times the
    posterior after block b'. The `cached` prior is the last row. With decays [D], the result is [B + 1, D, E]. To
    continue after `seen` blocks, pass the last row of their result as `first`.
    """
    blocks, experts = block_evidence.shape
    decays = np.asarray(decay, dtype=np.float64)[..., None]
    log_priors = np.full((blocks + 1, *decays.shape[:-1], experts), -np.log(experts))
    total = np.full(log_priors.shape[1:], -np.inf)
    if first is not None and seen:
        log_priors[0] = first
        # The weights of the sum over the `seen` blocks add up to decay + decay² + … + decay^seen.
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
    """log prior [B + 1, E] at the start of each block and after the last one, as in the paper's published code.

    Blocks form batches of two with one prior. The posterior of a block is the weights at its last position, which
    depend on the prior and the second-to-last token alone. The posterior of a batch is the mean of its blocks'
    posteriors, and the prior is the `ewm(alpha=0.3, adjust=False)` of the batches' posteriors. To continue after `seen`
    blocks, an even number, pass the last row of their result as `first`.
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
    weights: str | int | WeightsRule,
    decay: float | np.ndarray,
    scorer: str = "paper",
    first: np.ndarray | None = None,
    seen: int = 0,
) -> np.ndarray:
    """The updating log prior [B + 1, E] at the start of each block and after the last one.

    `decay`, `first` and `seen` are as in `updating_log_priors`. The `released` scorer has its own decay and weights.
    """
    if scorer == "released":
        return released_log_priors(scores, mask, first, seen)
    return updating_log_priors(weights_rule(weights).block_evidence(scores, mask), decay, first, seen)


def cached_log_prior(
    scores: np.ndarray,
    mask: np.ndarray,
    weights: str | int | WeightsRule,
    *,
    decay: float,
    blocks: int,
    scorer: str = "paper",
) -> np.ndarray:
    """The cached log prior [E]: the updating prior after the first `blocks` blocks of a domain's dev split."""
    used = blocks_used(blocks, scorer)
    log_prior: np.ndarray = log_prior_path(scores[:used], mask[:used], weights, decay, scorer)[-1]
    return log_prior


def fitted_log_prior(scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The fitted log prior [E]: the static weights under which the mixture gives a domain's dev split the lowest loss.

    Expectation maximisation from equal weights ends where the mean over tokens of p_j / p_mixture is at most 1 + 1e-6
    for each expert j. The mean loss is then within 1e-6 nats of the least, because the loss is convex in the weights.
    Two steps at a time are extrapolated (SQUAREM, Varadhan and Roland 2008); where that raises the loss, the two steps
    alone count.
    """
    rows = scores[mask]
    likelihood = np.exp(rows - rows.max(axis=1, keepdims=True))

    def step(prior: np.ndarray, mixture: np.ndarray) -> tuple[np.ndarray, float]:
        ratios = (1 / mixture) @ likelihood / len(likelihood)
        after: np.ndarray = prior * ratios
        return after / after.sum(), ratios.max()

    prior = safe = np.full(rows.shape[1], 1 / rows.shape[1])
    least = np.inf
    while True:
        mixture = likelihood @ prior
        loss = -np.log(mixture).mean()
        if loss > least:
            prior, least = safe, np.inf
            continue
        once, excess = step(prior, mixture)
        if excess <= 1 + FITTED:
            with np.errstate(divide="ignore"):
                log_prior: np.ndarray = np.log(np.where(prior > _NONE, prior, 0))
            return log_prior
        safe, _ = step(once, likelihood @ once)
        least, prior = loss, _extrapolated(prior, once, safe)


def _extrapolated(prior: np.ndarray, once: np.ndarray, twice: np.ndarray) -> np.ndarray:
    """The weights [E] that two steps of a fixed-point iteration point to (SQUAREM's third step length)."""
    change = once - prior
    curvature = twice - once - change
    length = float(np.linalg.norm(change)) / max(float(np.linalg.norm(curvature)), _NONE)
    # A length of 1 is the two steps themselves. No weight may end below a tenth of theirs, because one that is 0 stays.
    while length > _NEAR_ONE:
        ahead = prior + 2 * length * change + length**2 * curvature
        if (ahead >= twice / 10).all():
            normalised: np.ndarray = ahead / ahead.sum()
            return normalised
        length = (length + 1) / 2
    return twice


def blocks_used(blocks: int, scorer: str = "paper") -> int:
    """The number of dev blocks that make a cached prior of `blocks`; the released code uses `blocks` + 1 pairs."""
    return 2 * (blocks + 1) if scorer == "released" else blocks


def posterior_trace(
    scores: np.ndarray, mask: np.ndarray, weights: str | int | WeightsRule, log_priors: np.ndarray
) -> np.ndarray:
    """The posterior [B, E] after each block, from the log priors [B, E] at its start (paper, Eq. 5-6)."""
    logs = log_priors + weights_rule(weights).block_evidence(scores, mask)
    posterior: np.ndarray = np.exp(log_softmax(logs))
    return posterior


def _normalised(logs: np.ndarray) -> np.ndarray:
    # With few experts this is faster than `log_softmax`, and it is called for each block.
    return logs - np.logaddexp.reduce(logs, axis=-1, keepdims=True)
