"""Priors over experts at the start of each block (paper, section 5.1, Eq. 7), as arrays of logarithms.

Axes: B blocks, T positions of a block, E experts. `scores` [B, T, E] float64 are log p(token) in nats under each
expert. They are 0 where `mask` [B, T] is False, at the padding of the last block.
"""

import math

import numpy as np
from scipy.linalg import solve_triangular
from scipy.optimize import nnls
from scipy.special import softmax
from threadpoolctl import threadpool_limits

# The decay of the released code: its ewm(alpha=0.3) keeps 0.7 of the prior from block to block.
RELEASED_DECAY = 0.7
Decay = float | np.ndarray
# The prior of the first block (None: uniform) and the number of blocks before it. To continue after a chunk of a text,
# use the last row of its priors and the number of all blocks so far.
First = tuple[np.ndarray | None, int]
# The maximum loss of the fitted prior above the optimum, in nats per token.
FITTED = 1e-9
# Half of this times the sum of squares is added to the loss, to choose the prior nearest to equal weights among optima.
_EVEN = FITTED / 10
# The maximum fraction of a token's probability that a step may remove.
_LOST = 0.99
# The rounding error of means over tokens.
_ROUNDING = 1e-12
# The number of tokens whose derivatives are summed at once, to bound memory.
_TOKENS = 8192


def updating_log_priors(block_evidence: np.ndarray, decay: Decay, first: First = (None, 0)) -> np.ndarray:
    """log prior [B + 1, E] at the start of each block and after the last one (paper, Eq. 7).

    Prior b is proportional to the sum over earlier blocks b' of decay^(b - b') times the posterior after block b'. The
    `cached` prior is the last row. With decays [D], the result is [B + 1, D, E].
    """
    (blocks, experts), (start, seen) = block_evidence.shape, first
    decays = np.asarray(decay)[..., None]
    log_priors = np.full((blocks + 1, *decays.shape[:-1], experts), -np.log(experts))
    total = np.full(log_priors.shape[1:], -np.inf)
    if start is not None:
        log_priors[0] = start
        if seen:
            # The weights of the sum over the `seen` blocks add up to decay + decay² + … + decay^seen.
            with np.errstate(invalid="ignore"):
                series = -decays * np.expm1(seen * np.log(decays)) / (1 - decays)
            total = start + np.log(np.where(decays == 1, seen, series))
    for block in range(blocks):
        posterior = _normalised(log_priors[block] + block_evidence[block])
        total = np.log(decays) + np.logaddexp(total, posterior)
        log_priors[block + 1] = _normalised(total)
    return log_priors


def released_log_priors(scores: np.ndarray, mask: np.ndarray, first: First = (None, 0)) -> np.ndarray:
    """log prior [B + 1, E] at the start of each block and after the last one, as in the paper's published code.

    Blocks form batches of two with one prior. The posterior of a block is the weights at its last position, which
    depend only on the prior and the second-to-last token. The posterior of a batch is the mean of its blocks'
    posteriors, and the prior is the `ewm(alpha=0.3, adjust=False)` of the batches' posteriors. An even number of blocks
    must precede `scores`, so that all batches are whole.
    """
    (blocks, _, experts), (start, seen) = scores.shape, first
    log_priors = np.full((blocks + 1, experts), -np.log(experts))
    prior = log_priors[0].copy() if start is None else start
    lengths = mask.sum(axis=1)
    last = scores[np.arange(blocks), np.maximum(lengths - 2, 0)]
    for block in range(0, blocks, 2):
        batch = slice(block, min(block + 2, blocks))
        log_priors[batch] = prior
        posteriors = _normalised(prior + last[batch])
        posteriors[lengths[batch] == 1] = -np.log(experts)
        mean = np.logaddexp.reduce(posteriors, axis=0) - np.log(len(posteriors))
        prior = (
            np.logaddexp(math.log(RELEASED_DECAY) + prior, math.log1p(-RELEASED_DECAY) + mean)
            if seen or block
            else mean
        )
    log_priors[blocks] = prior
    return log_priors


def fitted_log_prior(scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The fitted log prior [E]: the constant weights of the mixture with the lowest loss on a domain's dev split.

    The mean loss is convex in the weights π. At its minimum the mean over tokens of p_j / p_mixture is 1 for each
    expert j with a positive weight, and at most 1 for each other expert, whose weight is exactly 0. If there are
    several optima, as for two experts with the same scores, the one nearest to equal weights is chosen. It is found by
    sequential quadratic programming (Kim, Carbonetto, Stephens and Anitescu 2020) within 1e-9 nats of the minimum.
    Raises RuntimeError if the steps do not reach it.
    """
    rows = scores[mask]
    likelihood = np.exp(rows - rows.max(axis=1, keepdims=True))
    # With several threads, the last bits of products would differ.
    with threadpool_limits(limits=1, user_api="blas"):
        prior = _least_loss(likelihood)
    with np.errstate(divide="ignore"):
        log_prior: np.ndarray = np.log(prior)
    return log_prior


def _least_loss(likelihood: np.ndarray) -> np.ndarray:
    """The fitted prior [E] of the tokens' `likelihood` [N, E], the largest of each token 1."""
    experts = likelihood.shape[1]
    prior = np.full(experts, 1 / experts)
    while True:
        mixture = likelihood @ prior
        slope, curvature = _derivatives(likelihood, mixture)
        slope += _EVEN * prior
        # The second term keeps the matrix of equal experts from being singular to rounding.
        curvature += np.diag(_EVEN + _ROUNDING * np.diag(curvature))
        if np.abs(np.minimum(prior, slope)).max() <= _ROUNDING:
            break
        step = _least_quadratic(curvature, slope - curvature @ prior) - prior
        change = likelihood @ step / mixture
        length = min(1.0, _LOST / max(-change.min(), _LOST))
        while length > _ROUNDING and _gain(length, prior, step, change) < -length * (slope @ step) / 100:
            length /= 2
        if length <= _ROUNDING:
            break
        prior = np.maximum(prior + length * step, 0)
    prior /= prior.sum()
    missed = -_derivatives(likelihood, likelihood @ prior)[0].min()
    if not missed <= FITTED:
        raise RuntimeError(f"the fitted prior misses the least loss by up to {missed} nats per token")
    return prior


def _derivatives(likelihood: np.ndarray, mixture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradient [E] and Hessian [E, E] in the weights of: mean over tokens of -log(mixture), plus the weights' sum."""
    tokens, experts = likelihood.shape
    ratios, products = np.zeros(experts), np.zeros((experts, experts))
    for start in range(0, tokens, _TOKENS):
        part = likelihood[start : start + _TOKENS] / mixture[start : start + _TOKENS, None]
        ratios += part.sum(axis=0)
        products += part.T @ part
    return 1 - ratios / tokens, products / tokens


def _gain(length: float, prior: np.ndarray, step: np.ndarray, change: np.ndarray) -> float:
    """The decrease of the objective by a fraction `length` of a step, which changes probabilities by `change` [N]."""
    even = _EVEN * (prior @ step + length * (step @ step) / 2)
    return float(np.log1p(length * change).mean() - length * (step.sum() + even))


def _least_quadratic(curvature: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """The non-negative weights [E] that minimise ½·weights·curvature·weights + slope·weights.

    With curvature = root·rootᵀ the sum is half of |rootᵀ·weights + root⁻¹·slope|², less a constant.
    """
    root = np.linalg.cholesky(curvature)
    weights: np.ndarray
    weights, _ = nnls(root.T, -solve_triangular(root, slope, lower=True))
    return weights


def accuracy_log_priors(right: np.ndarray) -> np.ndarray:
    """log prior [N, E] at each of N questions; `right` [N, E] says which of them each expert answers right.

    The prior is equal at first. Then it is the mean of equal weights and, for each earlier question, of the softmax of
    the experts' accuracies on the questions up to that one (Gururangan et al. 2023, section 5.1).
    """
    questions, experts = right.shape
    counts = np.arange(1, questions + 1)[:, None]
    shares = softmax(np.cumsum(right, axis=0) / counts, axis=-1)
    sums = np.cumsum(np.concatenate([np.full((1, experts), 1 / experts), shares]), axis=0)
    log_priors: np.ndarray = np.log(sums[:-1] / counts)
    return log_priors


def _normalised(logs: np.ndarray) -> np.ndarray:
    return logs - np.logaddexp.reduce(logs, axis=-1, keepdims=True)
