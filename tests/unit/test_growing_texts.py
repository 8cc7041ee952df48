"""Weights on texts that grow, a few tokens at a time, against those of the whole texts by their definitions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

from demix.mix.mixtures import Mixture, Stream
from demix.mix.rules import Cluster, ClusterHistory, History, Released, Switching, Tempered, WeightsRule
from support.mixing import block_weights, log_weights, switching, tempered, updating_priors, window

IN_BLOCKS = (History(), Released(), Cluster(0.3), ClusterHistory(0.3))
IN_STREAMS = (Tempered(0.5, 0.9), Switching(0.1))


def expected_weights(
    rule: WeightsRule, rows: np.ndarray, far: np.ndarray, length: int, prior: np.ndarray, decay: float | None
) -> np.ndarray:
    """log g [N + 1, E] before each token of a text and after the last, whose blocks have `length` tokens."""
    if isinstance(rule, Tempered):
        return log_weights(prior, tempered(rows, rule.beta, rule.gamma))
    if isinstance(rule, Switching):
        return log_weights(prior, switching(rows, prior, rule.alpha))
    blocks = [rows[start : start + length] for start in range(0, len(rows) + 1, length)]
    weights = "released" if isinstance(rule, Released) else "history"
    priors = [prior] * len(blocks) if decay is None else updating_priors(blocks, weights, decay, prior)
    found = []
    for number, block in enumerate(blocks):
        here = far[number * length :][: len(block) + 1]
        if isinstance(rule, Cluster):
            seen = window(block) if isinstance(rule, ClusterHistory) else np.zeros((len(block) + 1, len(prior)))
            log_g = log_weights(priors[number], seen[: len(here)] - here / rule.temperature)
        else:
            log_g = block_weights(block, priors[number], weights)
        # A full block ends at once: what predicts the next token is the prior of the next block.
        found.append(log_g[: length if len(block) == length else len(block) + 1])
    return np.concatenate(found)


@settings(max_examples=150, deadline=None)
@given(
    rule=st.sampled_from(IN_BLOCKS + IN_STREAMS),
    tokens=st.integers(1, 17),
    length=st.integers(1, 5),
    texts=st.integers(1, 3),
    decay=st.sampled_from([None, 0.3, 1.0]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_weights_on_growing_texts_are_those_of_the_whole_texts(rule, tokens, length, texts, decay, seed, data) -> None:
    decay = decay if rule in IN_BLOCKS else None
    experts, chance = 3, np.random.default_rng(seed)
    scores = -chance.exponential(2, (texts, tokens, experts))
    far = chance.uniform(0, 2, (texts, tokens + 1, experts))
    logits = chance.normal(size=experts)
    # Token n of text b has the number 100 b + n + 1, the one before the text 100 b.
    of_texts = [lambda row, b=b: far[b, row.astype(int) - 100 * b] for b in range(texts)]
    read = of_texts if isinstance(rule, Cluster) else ()
    posterior = Stream(Mixture(rule, logits, decay), length, 100 * np.arange(texts), read)
    prior = log_softmax(logits)
    wanted = np.stack([expected_weights(rule, *each, length, prior, decay) for each in zip(scores, far, strict=True)])
    np.testing.assert_allclose(posterior.log_weights, wanted[:, 0], atol=1e-9)
    ids = 100 * np.arange(texts)[:, None] + 1 + np.arange(tokens)
    done = 0
    while done < tokens:
        assert posterior.room == length - done % length
        some = data.draw(st.integers(1, tokens - done))
        part = slice(done, done + some)
        used = posterior.observe(scores[:, part].transpose(2, 0, 1), ids[:, part])
        done += some
        assert used.shape == (texts, some, experts)
        np.testing.assert_allclose(used, wanted[:, part], atol=1e-9)
        np.testing.assert_allclose(posterior.log_weights, wanted[:, done], atol=1e-9)
        assert posterior.seen == done


@settings(max_examples=150, deadline=None)
@given(
    rule=st.sampled_from(IN_BLOCKS + IN_STREAMS),
    tokens=st.integers(1, 40),
    length=st.integers(1, 9),
    decay=st.sampled_from([None, 0.3, 1.0]),
    top_k=st.sampled_from([None, 1, 2]),
    seed=st.integers(0, 1000),
)
def test_a_table_and_a_stream_give_the_same_probabilities(rule, tokens, length, decay, top_k, seed) -> None:
    chance = np.random.default_rng(seed)
    mixture = Mixture(rule, log_softmax(chance.normal(size=3)), decay if rule in IN_BLOCKS else None, top_k)
    both = np.zeros((2, -(-tokens // length) * length, 3))
    both[:, :tokens] = [-chance.exponential(2, (tokens, 3)), chance.uniform(0, 2, (tokens, 3))]
    scores = both[0, :tokens]
    of_text = [lambda row: both[1, np.minimum(row, len(both[1]) - 1)]]
    stream = Stream(mixture, length, np.zeros(1, int), of_text if isinstance(rule, Cluster) else ())
    log_g = stream.observe(scores.T[:, None], 1 + np.arange(tokens)[None])[0]
    table, distances = both.reshape(2, -1, length, 3)
    mask = (np.arange(both.shape[1]) < tokens).reshape(-1, length)
    mixed, weights = mixture.table(table, mask, distances)[mask], mixture.weights(table, mask, distances)[mask]
    np.testing.assert_allclose(np.logaddexp.reduce(log_g + scores, axis=1), mixed, rtol=0, atol=1e-12)
    np.testing.assert_allclose(np.exp(log_g), np.exp(weights), rtol=0, atol=1e-12)


def test_the_rule_is_the_history_of_the_block_and_nothing_is_observed_of_no_token() -> None:
    posterior = Stream(Mixture(History(), np.zeros(2)), 4, np.zeros(1))
    assert posterior.observe(np.zeros((2, 1, 0)), np.zeros((1, 0), int)).shape == (1, 0, 2)
    posterior.observe(np.log([[[0.9, 0.5]], [[0.1, 0.5]]]), np.zeros((1, 2), int))
    assert np.exp(posterior.log_weights) == pytest.approx(np.array([[0.9, 0.1]]))
