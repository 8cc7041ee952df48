"""Mixtures against a slow implementation that follows docs/explanation/mixing.md and Eq. 4-7 word by word."""

import numpy as np
import pandas as pd
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

from demix.config.mixing import METHODS
from demix.mix.mixtures import floor, log_mixtures
from demix.mix.priors import accuracy_log_priors, released_log_priors
from demix.mix.rules import ReleasedScorer, weights_rule
from support.errors import refused
from support.mixing import as_blocks, block_weights, log_mixture, log_weights, mix, tables, updating_priors, window

# What is infinite on purpose warns nobody.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def slow_mix(blocks: list[np.ndarray], method: str, weights, decay: float, log_prior, top_k) -> list[np.ndarray]:
    experts = blocks[0].shape[1]
    uniform = np.full(experts, -np.log(experts))
    if method == "average":
        return [log_mixture(uniform, block) for block in blocks]
    priors = {"uniform": uniform, "cached": log_prior, "fitted": log_prior}
    of_blocks = updating_priors(blocks, weights, decay) if method == "updating" else [priors[method]] * len(blocks)
    return [
        log_mixture(block_weights(block, prior, weights, top_k)[:-1], block)
        for block, prior in zip(blocks, of_blocks, strict=False)
    ]


rules = st.sampled_from(["history", "released"])


@settings(max_examples=200, deadline=None)
@given(tables(), st.sampled_from(METHODS), rules, st.floats(0.05, 1.0), st.integers(0, 2**32 - 1), st.data())
def test_mixtures_equal_the_slow_reference(table, method, weights, decay, seed, data) -> None:
    scores, mask = table
    experts = scores.shape[-1]
    top_k = data.draw(st.one_of(st.none(), st.integers(1, experts))) if method != "average" else None
    # The sharpest priors give up what the text says by more than float64 holds.
    scale = data.draw(st.sampled_from([1.0, 30.0, 1000.0]))
    log_prior = log_softmax(scale * np.random.default_rng(seed).normal(size=experts))
    mixed = mix(scores, mask, method, weights, decay=decay, log_prior=log_prior, top_k=top_k)
    slow = slow_mix(as_blocks(scores, mask), method, weights, decay, log_prior, top_k)
    assert mixed.shape == mask.shape
    np.testing.assert_allclose(mixed[mask], np.concatenate(slow), rtol=1e-9, atol=1e-9)
    assert (mixed[~mask] == 0).all()


@settings(max_examples=100, deadline=None)
@given(tables(), st.booleans(), st.integers(1, 3), st.sampled_from([1.0, 1000.0]), st.integers(0, 2**32 - 1), st.data())
def test_mixtures_with_several_priors_equal_the_formulas(table, uniform_start, priors, scale, seed, data) -> None:
    scores, _ = table
    blocks, _, experts = scores.shape
    top_k = data.draw(st.one_of(st.none(), st.integers(1, experts + 1)))
    log_priors = log_softmax(scale * np.random.default_rng(seed).normal(size=(blocks, priors, experts)), axis=-1)
    evidence = np.array([window(block)[:-1] for block in scores])
    mixed = log_mixtures(scores, log_priors, evidence, uniform_start, top_k)
    for found, priors_of_block, seen, block in zip(mixed, log_priors, evidence, scores, strict=True):
        log_g = np.array([log_weights(prior, seen, top_k and min(top_k, experts)) for prior in priors_of_block])
        if uniform_start:
            log_g[:, 0] = -np.log(experts)
        np.testing.assert_allclose(found, log_mixture(log_g, block), rtol=1e-9, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(tables(), st.sampled_from(["uniform", "updating"]), rules, st.integers(1, 4), st.randoms())
def test_the_order_of_equal_experts_decides_nothing(table, method, weights, top_k, random) -> None:
    """Before the first token of a text all weights are equal, whatever k; copies of an expert are equal throughout."""
    scores, mask = table
    scores = np.concatenate([scores, scores], axis=2)
    order = random.sample(range(scores.shape[2]), scores.shape[2])
    mixed, turned = (mix(some, mask, method, weights, top_k=top_k) for some in (scores, scores[..., order]))
    np.testing.assert_allclose(turned, mixed, rtol=1e-9, atol=1e-9)
    first = np.logaddexp.reduce(scores[0, 0]) - np.log(scores.shape[2])
    assert mixed[0, 0] == pytest.approx(first, rel=1e-9, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(tables(), rules, st.floats(0.05, 1.0), st.integers(1, 6))
def test_cached_prior_is_the_updating_prior_after_the_dev_blocks(table, weights, decay, blocks) -> None:
    scores, mask = table
    found = weights_rule(weights).cached_log_prior(scores, mask, decay=decay, blocks=blocks)
    slow = updating_priors(as_blocks(scores, mask)[:blocks], weights, decay)[-1]
    np.testing.assert_allclose(found, slow, rtol=1e-8, atol=1e-8)
    assert np.exp(found).sum() == pytest.approx(1.0, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(tables(scales=(0.1, 3.0)), rules, st.sampled_from([0.05, 0.7, 1.0]), st.booleans(), st.integers(1, 6))
def test_priors_go_on_after_the_blocks_seen(table, weights, decay, released, seen) -> None:
    scores, mask = table
    rule = ReleasedScorer() if released else weights_rule(weights)
    seen = min(2 * seen if released else seen, len(scores) - 1)
    seen -= seen % 2 if released else 0
    whole = rule.log_priors(scores, mask, decay)
    np.testing.assert_allclose(np.exp(whole).sum(axis=1), 1, atol=1e-12)
    first = rule.log_priors(scores[:seen], mask[:seen], decay)
    rest = rule.log_priors(scores[seen:], mask[seen:], decay, (first[-1], seen))
    np.testing.assert_allclose(np.concatenate([first[:-1], rest]), whole, rtol=1e-9, atol=1e-9)
    if not released:
        several = rule.log_priors(scores, mask, np.array([0.3, decay]))
        np.testing.assert_allclose(several[:, 1], whole, rtol=1e-12)


def published(
    blocks: list[np.ndarray], *, prior: list[float] | None, most: int | None
) -> tuple[list[float], list[float]]:
    """log p of each token by the paper's published code (FACTS section 1, items 1 to 3), and the prior at the end.

    With a `prior` given it is cached; else it is updated after each batch of two blocks, at most `most` and one more.
    """
    log_p, posteriors = [], []
    current = prior
    for number, start in enumerate(range(0, len(blocks), 2)):
        if most is not None and number > most:
            break
        last = []
        for block in blocks[start : start + 2]:
            probabilities = np.exp(block)
            experts = probabilities.shape[1]
            weights = np.full_like(probabilities, 1 / experts)
            weights[1:] = probabilities[:-1] * (1 / experts if current is None else np.array(current))
            weights /= weights.sum(axis=1, keepdims=True)
            log_p += np.log((weights * probabilities).sum(axis=1)).tolist()
            last.append(weights[-1])
        posteriors.append(np.mean(last, axis=0))
        if prior is None:
            current = pd.DataFrame(posteriors).ewm(alpha=0.3, adjust=False).mean().iloc[-1].tolist()
    return log_p, current


@settings(max_examples=100, deadline=None)
@given(tables(scales=(0.1, 3.0)), st.integers(0, 2**32 - 1))
def test_the_released_scorer_is_the_published_code(table, seed) -> None:
    scores, mask = table
    blocks = as_blocks(scores, mask)
    expected, prior = published(blocks, prior=None, most=None)
    rule = ReleasedScorer()
    path = rule.log_priors(scores, mask, 0.7)
    mixed = mix(scores, mask, "cached", rule, log_prior=path[:-1])
    np.testing.assert_allclose(mixed[mask], expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(np.exp(path[-1]), prior, rtol=1e-9, atol=1e-12)
    prior = np.random.default_rng(seed).dirichlet(np.ones(scores.shape[-1]))
    expected, _ = published(blocks, prior=prior.tolist(), most=None)
    mixed = mix(scores, mask, "cached", rule, log_prior=np.log(prior))
    np.testing.assert_allclose(mixed[mask], expected, rtol=1e-9, atol=1e-9)


def test_the_released_prior_of_100_blocks_is_of_202() -> None:
    scores = -np.random.default_rng(3).exponential(2, (210, 5, 4))
    mask = np.ones((210, 5), dtype=bool)
    _, expected = published(as_blocks(scores, mask), prior=None, most=100)
    found = ReleasedScorer().cached_log_prior(scores, mask, decay=0.7, blocks=100)
    np.testing.assert_allclose(np.exp(found), expected, rtol=1e-9)
    other = released_log_priors(scores[:200], mask[:200])[-1]
    assert not np.allclose(np.exp(other), expected, rtol=1e-6)


def test_priors_by_accuracy_are_means_over_the_questions_before() -> None:
    right = np.random.default_rng(2).random((12, 3)) < [0.9, 0.5, 0.2]
    priors = [np.full(3, 1 / 3)]
    for number in range(1, 13):
        np.testing.assert_allclose(np.exp(accuracy_log_priors(right)[number - 1]), np.mean(priors, axis=0), rtol=1e-12)
        priors.append(scipy.special.softmax(right[:number].mean(axis=0)))


@settings(max_examples=100, deadline=None)
@given(tables(), rules, st.floats(0.05, 1.0))
def test_posterior_traces_equal_the_slow_reference(table, weights, decay) -> None:
    scores, mask = table
    blocks = as_blocks(scores, mask)
    slow = [
        np.exp(block_weights(block, prior, weights)[-1])
        for block, prior in zip(blocks, updating_priors(blocks, weights, decay), strict=False)
    ]
    rule = weights_rule(weights)
    trace = rule.posteriors(scores, mask, rule.log_priors(scores, mask, decay)[:-1])
    np.testing.assert_allclose(trace, slow, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(trace.sum(axis=1), 1, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "weights", "subject"),
    [
        ("uniform", "last", "mixing rule last"),
        ("uniform", "32", "mixing rule 32"),
        ("updating", "tempered(0.2,0.98)", "mixing rule Tempered(beta=0.2, gamma=0.98)"),
        ("uniform", "cluster(0.1)", "mixing rule cluster"),
        ("uniform", "tempered", "mixing rule tempered"),
        ("uniform", "tempered(0.2)", "mixing rule tempered(0.2)"),
        ("uniform", "tempered(0.2,1.5)", "mixing rule tempered(0.2,1.5)"),
        ("uniform", "switching(nan)", "mixing rule switching(nan)"),
        ("uniform", "history(1)", "mixing rule history(1)"),
        ("uniform", "cluster(0)", "mixing rule cluster(0)"),
        ("uniform", "cluster+", "mixing rule cluster+"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(method: str, weights: str, subject: str) -> None:
    """Unknown rules, wrong or missing parameters, missing distances, evidence counted twice."""
    with refused(subject):
        mix(np.zeros((1, 2, 2)), np.ones((1, 2), dtype=bool), method, weights)


def test_oracles_know_the_best_expert_of_a_block_or_token() -> None:
    scores = np.log([[[0.1, 0.5], [0.4, 0.2], [0.3, 0.2]], [[0.9, 0.1], [0.1, 0.3], [0.2, 0.1]]])
    np.testing.assert_array_equal(floor(scores, "best_token"), np.log([[0.5, 0.4, 0.3], [0.9, 0.3, 0.2]]))
    np.testing.assert_array_equal(floor(scores, "best_block"), np.log([[0.5, 0.2, 0.2], [0.9, 0.1, 0.2]]))
