"""Mixtures against a slow implementation that follows DESIGN section 5 and the paper's Eq. 6-9 word by word."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from demix.errors import DemixError
from demix.evaluate.mix import METHODS, cached_log_prior, mix
from demix.evaluate.posterior import log_weights


def normalised(logs: list[float]) -> list[float]:
    top = max(logs)
    total = top + math.log(math.fsum(math.exp(value - top) for value in logs))
    return [value - total for value in logs]


def slow_block(
    block: list[list[float]], log_prior: list[float], weights, top_k
) -> tuple[list[float], list, list[float]]:
    """One block, token by token: log p of each token, the weights used, and the log posterior after the last."""
    experts = len(log_prior)
    window = {"history": len(block), "released": 1}.get(weights, weights)
    log_p, used = [], []
    for t in range(len(block) + 1):
        seen = block[max(0, t - window) : t]
        logs = [log_prior[j] + math.fsum(row[j] for row in seen) for j in range(experts)]
        if t == 0 and weights == "released":
            logs = [0.0] * experts
        log_g = normalised(logs)
        if t == len(block):
            return log_p, used, log_g
        if top_k is not None:
            keep = sorted(range(experts), key=lambda j: (-log_g[j], j))[:top_k]
            log_g = normalised([log_g[j] if j in keep else -math.inf for j in range(experts)])
        used.append([math.exp(value) for value in log_g])
        log_p.append(logsumexp([log_g[j] + block[t][j] for j in range(experts)]))
    raise AssertionError


def slow_priors(blocks: list, weights, decay: float) -> list[list[float]]:
    """The updating prior (log) at the start of each block and after the last one."""
    experts = len(blocks[0][0])
    posteriors: list[list[float]] = []
    priors = []
    for b in range(len(blocks) + 1):
        if b == 0:
            prior = [-math.log(experts)] * experts
        else:
            prior = normalised(
                [
                    logsumexp([(b - before) * math.log(decay) + posteriors[before][j] for before in range(b)])
                    for j in range(experts)
                ]
            )
        priors.append(prior)
        if b < len(blocks):
            posteriors.append(slow_block(blocks[b], prior, weights, None)[2])
    return priors


def slow_mix(blocks: list, method: str, weights, decay: float, log_prior, top_k) -> list[list[float]]:
    experts = len(blocks[0][0])
    uniform = [-math.log(experts)] * experts
    if method == "average":
        return [[logsumexp([-math.log(experts) + value for value in row]) for row in block] for block in blocks]
    priors = {
        "uniform": lambda: [uniform] * len(blocks),
        "updating": lambda: slow_priors(blocks, weights, decay),
        "cached": lambda: [log_prior] * len(blocks),
    }[method]()
    return [slow_block(block, prior, weights, top_k)[0] for block, prior in zip(blocks, priors, strict=False)]


@st.composite
def tables(draw):
    """Random score tables, some with gaps between experts of over 700 nats a block; the last block may be short."""
    experts = draw(st.integers(1, 5))
    length = draw(st.integers(1, 7))
    full, last = draw(st.integers(0, 5)), draw(st.integers(1, length))
    scale = draw(st.sampled_from([0.1, 3.0, 400.0]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = -generator.exponential(scale, (full * length + last, experts))
    padded = np.zeros(((full + 1) * length, experts))
    padded[: len(rows)] = rows
    mask = np.arange(len(padded)) < len(rows)
    return padded.reshape(full + 1, length, experts), mask.reshape(full + 1, length)


def as_blocks(scores: np.ndarray, mask: np.ndarray) -> list:
    return [
        [row.tolist() for row, real in zip(block, kept, strict=True) if real]
        for block, kept in zip(scores, mask, strict=True)
    ]


rules = st.one_of(st.sampled_from(["history", "released"]), st.integers(1, 8))


@settings(max_examples=200, deadline=None)
@given(tables(), st.sampled_from(METHODS), rules, st.floats(0.05, 1.0), st.integers(0, 2**32 - 1), st.data())
def test_mixtures_equal_the_slow_reference(table, method, weights, decay, seed, data) -> None:
    scores, mask = table
    experts = scores.shape[-1]
    top_k = data.draw(st.one_of(st.none(), st.integers(1, experts))) if method != "average" else None
    log_prior = np.log(np.random.default_rng(seed).dirichlet(np.ones(experts)))
    mixed = mix(scores, mask, method, weights, decay=decay, log_prior=log_prior, top_k=top_k)
    slow = slow_mix(as_blocks(scores, mask), method, weights, decay, log_prior.tolist(), top_k)
    assert mixed.shape == mask.shape
    np.testing.assert_allclose(mixed[mask], np.concatenate(slow), rtol=1e-9, atol=1e-9)
    assert (mixed[~mask] == 0).all()


@settings(max_examples=100, deadline=None)
@given(tables(), rules, st.floats(0.05, 1.0), st.integers(1, 6))
def test_cached_prior_is_the_updating_prior_after_the_dev_blocks(table, weights, decay, blocks) -> None:
    scores, mask = table
    found = cached_log_prior(scores, mask, weights, decay=decay, blocks=blocks)
    slow = slow_priors(as_blocks(scores, mask)[:blocks], weights, decay)[-1]
    np.testing.assert_allclose(found, slow, rtol=1e-8, atol=1e-8)
    assert np.exp(found).sum() == pytest.approx(1.0, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(tables(), st.one_of(st.none(), st.integers(1, 8)), st.booleans(), st.integers(0, 2**32 - 1))
def test_weights_sum_to_one(table, window, uniform_start, seed) -> None:
    scores, _ = table
    log_priors = np.log(np.random.default_rng(seed).dirichlet(np.ones(scores.shape[-1]), len(scores)))
    log_g = log_weights(scores, log_priors, window, uniform_start)
    np.testing.assert_allclose(np.exp(log_g).sum(-1), 1.0, atol=1e-12)
    expected = np.broadcast_to(-np.log(scores.shape[-1]), log_priors.shape) if uniform_start else log_priors
    np.testing.assert_allclose(log_g[:, 0], expected, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(tables(), st.sampled_from(METHODS), rules)
def test_a_mixture_of_one_expert_is_that_expert(table, method, weights) -> None:
    scores, mask = table
    mixed = mix(scores[..., :1], mask, method, weights, log_prior=np.zeros(1))
    np.testing.assert_allclose(mixed, scores[..., 0], atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(tables(), st.integers(0, 2**32 - 1))
def test_a_block_telescopes_under_history(table, seed) -> None:
    """With a fixed prior the sum of log p over a block is logsumexp(log prior + sum of scores)."""
    scores, mask = table
    log_prior = np.log(np.random.default_rng(seed).dirichlet(np.ones(scores.shape[-1])))
    mixed = mix(scores, mask, "cached", "history", log_prior=log_prior)
    np.testing.assert_allclose(mixed.sum(1), logsumexp(log_prior + scores.sum(1), axis=-1), rtol=1e-9, atol=1e-9)


def test_unknown_rules_are_refused() -> None:
    scores, mask = np.zeros((1, 2, 2)), np.ones((1, 2), dtype=bool)
    for wrong in ("last", 0, -1):
        with pytest.raises(DemixError, match="weights"):
            mix(scores, mask, "uniform", wrong)
    with pytest.raises(DemixError, match="method"):
        mix(scores, mask, "median")
    with pytest.raises(DemixError, match="prior"):
        mix(scores, mask, "cached")
