"""Mixtures of experts by their definitions, a token at a time in numpy, and random score tables.

A text's scores are log p [N, E] of its tokens under each expert. What the tokens before each one say of the experts is
an array [N + 1, E], whose last row is what the whole text says.
"""

import numpy as np
from hypothesis import strategies as st
from scipy.special import log_softmax, logsumexp

from demix.config.evaluation import DECAY
from demix.evaluate.losses import PlannedMixture
from demix.mix.mixtures import FLOORS, Mixture
from demix.mix.rules import WeightsRule, released_rule, weights_rule


def mix(
    scores: np.ndarray,
    mask: np.ndarray,
    method: str,
    weights: str | WeightsRule = "history",
    distances: np.ndarray | None = None,
    *,
    decay: float = DECAY,
    log_prior: np.ndarray | None = None,
    top_k: int | None = None,
) -> np.ndarray:
    """log p [B, T] of a table under the mixture by a method."""
    prior = log_prior if method in ("cached", "fitted") else np.full(scores.shape[-1], -np.log(scores.shape[-1]))
    mixture = Mixture(rule_of(method, weights), prior, decay if method == "updating" else None, top_k)
    return mixture.table(scores, mask, distances)


def rule_of(method: str, weights: str | WeightsRule) -> WeightsRule:
    named = "" if method in ("average", *FLOORS) else weights
    return named if isinstance(named, WeightsRule) else weights_rule(named)


def planned(
    method: str, experts: tuple[str, ...], weights: str = "history", scorer: str = "paper", **more: object
) -> PlannedMixture:
    rule = rule_of(method, weights)
    rule = released_rule(rule) if scorer == "released" and method != "average" else rule
    return PlannedMixture(method, experts, rule, weights, **more)


def window(scores: np.ndarray, size: int | None = None) -> np.ndarray:
    """The scores of the last `size` tokens, by default of all of them, summed."""
    starts = [0 if size is None else max(0, t - size) for t in range(len(scores) + 1)]
    return np.array([scores[start:t].sum(axis=0) for t, start in enumerate(starts)])


def tempered(scores: np.ndarray, beta: float, gamma: float) -> np.ndarray:
    """The scores of all tokens, the last one times beta, the one before it times beta gamma, and so on."""
    # 0 ** 0 is 1.
    return np.array([beta * gamma ** np.arange(t)[::-1] @ scores[:t] for t in range(len(scores) + 1)])


def switching(scores: np.ndarray, log_prior: np.ndarray, alpha: float) -> np.ndarray:
    """A hidden expert writes each token; before the next one it is drawn anew from the prior with probability alpha."""
    with np.errstate(divide="ignore"):
        kept, drawn = np.log1p(-alpha), np.log(alpha)
    log_g = [log_prior]
    for row in scores:
        log_g.append(np.logaddexp(kept + log_softmax(log_g[-1] + row), drawn + log_prior))
    return np.array(log_g) - log_prior


def log_weights(log_prior: np.ndarray, evidence: np.ndarray | float, top_k: int | None = None) -> np.ndarray:
    """log g [..., E], in proportion to prior and evidence, of the k likeliest experts and those as likely as these."""
    log_g = log_softmax(log_prior + evidence, axis=-1)
    if top_k is None:
        return log_g
    least = np.sort(log_g, axis=-1)[..., -top_k, None]
    return log_softmax(np.where(log_g >= least, log_g, -np.inf), axis=-1)


def log_mixture(log_g: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """log p [N] of the tokens under the mixture with the log weights [N, E] or [E]."""
    return logsumexp(log_g + scores, axis=-1)


def block_weights(block: np.ndarray, log_prior: np.ndarray, weights: str, top_k: int | None = None) -> np.ndarray:
    """log g [N + 1, E] before each token of a block and after the last, by `history` or `released`."""
    log_g = log_weights(log_prior, window(block, 1 if weights == "released" else None), top_k)
    if weights == "released":
        log_g[0] = -np.log(len(log_prior))
    return log_g


def updating_priors(
    blocks: list[np.ndarray], weights: str, decay: float, first: np.ndarray | None = None
) -> list[np.ndarray]:
    """log prior [E] at the start of each block and after the last: the posteriors of all before, weighted by age."""
    experts = blocks[0].shape[1]
    priors, posteriors = [np.full(experts, -np.log(experts)) if first is None else first], []
    for number, block in enumerate(blocks, start=1):
        posteriors.append(block_weights(block, priors[-1], weights)[-1])
        ages = number - np.arange(number)[:, None]
        priors.append(log_softmax(logsumexp(ages * np.log(decay) + posteriors, axis=0)))
    return priors


@st.composite
def tables(draw, scales=(0.1, 3.0, 400.0, 5000.0)):
    """Random score tables, some with gaps between experts of over 700 nats a block; the last block may be short."""
    experts = draw(st.integers(1, 5))
    length = draw(st.integers(1, 7))
    full, last = draw(st.integers(0, 5)), draw(st.integers(1, length))
    scale = draw(st.sampled_from(scales))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = -generator.exponential(scale, (full * length + last, experts))
    padded = np.zeros(((full + 1) * length, experts))
    padded[: len(rows)] = rows
    mask = np.arange(len(padded)) < len(rows)
    return padded.reshape(full + 1, length, experts), mask.reshape(full + 1, length)


def as_blocks(scores: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    """The scores [N, E] of each block's tokens."""
    return [block[kept] for block, kept in zip(scores, mask, strict=True)]
