"""Bootstrap intervals: resampled sums, their bounds, and pieces of one document that are drawn together."""

import numpy as np
import pytest
from scipy.stats import bootstrap

from demix.evaluate.intervals import (
    STRETCHES,
    block_tokens,
    bounds,
    clustered,
    resampled,
    resampled_blocks,
    resampled_sums,
    stretch_tokens,
)


def test_intervals_are_those_of_scipy() -> None:
    generator = np.random.default_rng(11)
    tokens = generator.integers(20, 400, 60).astype(np.float64)
    nll = tokens * generator.normal(5, 0.3, 60)
    other = nll + tokens * generator.normal(0.05, 0.05, 60)
    resampled = resampled_sums(np.stack([tokens, nll, other]), seed=1, resamples=20_000)

    def perplexity(nll: np.ndarray, tokens: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.exp(nll.sum(axis=axis) / tokens.sum(axis=axis))

    def difference(one: np.ndarray, two: np.ndarray, tokens: np.ndarray, axis: int = -1) -> np.ndarray:
        return (two.sum(axis=axis) - one.sum(axis=axis)) / tokens.sum(axis=axis)

    how = {"paired": True, "vectorized": True, "method": "percentile", "n_resamples": 20_000}
    theirs = bootstrap((nll, tokens), perplexity, rng=np.random.default_rng(2), **how).confidence_interval
    width = theirs.high - theirs.low
    assert bounds(np.exp(resampled[1] / resampled[0])) == pytest.approx(tuple(theirs), abs=0.05 * width)
    theirs = bootstrap((nll, other, tokens), difference, rng=np.random.default_rng(2), **how).confidence_interval
    width = theirs.high - theirs.low
    paired = bounds((resampled[2] - resampled[1]) / resampled[0])
    assert paired == pytest.approx(tuple(theirs), abs=0.05 * width)
    assert (
        resampled_sums(np.stack([tokens, nll]), 1, 10) == resampled_sums(np.stack([tokens, nll, other]), 1, 10)[:2]
    ).all()


def test_resamples_do_not_depend_on_how_many_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = np.random.default_rng(0).normal(size=(3, 40))
    whole = resampled_sums(sums, seed=4, resamples=50)
    for at_once in (120, 1):
        monkeypatch.setattr("demix.evaluate.intervals._AT_ONCE", at_once)
        np.testing.assert_allclose(resampled_sums(sums, seed=4, resamples=50), whole, rtol=1e-12)


def test_clusters_stand_in_the_order_of_their_first_pieces() -> None:
    sums = np.array([[1.0, 2.0, 4.0, 8.0], [0.0, 1.0, 0.0, 3.0]])
    assert clustered(sums, np.array([9, 2, 9, 5])).tolist() == [[5.0, 2.0, 8.0], [0.0, 1.0, 3.0]]
    assert clustered(sums, np.arange(4)).tolist() == sums.tolist()


def by_stretch(values: np.ndarray) -> np.ndarray:
    """The number and the sum [2, S] of `values` [N] by stretch of a text of N tokens."""
    starts = np.arange(0, len(values), stretch_tokens(len(values)))
    return np.add.reduceat(np.stack([np.ones(len(values)), values]), starts, axis=1)


def autoregressive(tokens: int, texts: int, share: float) -> np.ndarray:
    """Losses [texts, tokens] about 0, each `share` of the one before and a new part."""
    noise = np.random.default_rng(3).normal(size=(texts, tokens + 100))
    found = np.zeros_like(noise)
    for place in range(1, noise.shape[1]):
        found[:, place] = share * found[:, place - 1] + noise[:, place]
    return found[:, 100:]


@pytest.mark.parametrize("tokens", [400, 3000])
def test_block_intervals_are_those_of_a_plain_loop(tokens: int) -> None:
    (text,) = autoregressive(tokens, 1, 0.5)
    length, generator = STRETCHES * stretch_tokens(tokens), np.random.default_rng(1)
    assert length == pytest.approx(tokens**0.5, rel=0.1)
    count, endless = -(-tokens // length), np.concatenate([text, text])
    means = []
    for _ in range(4000):
        begins = stretch_tokens(tokens) * generator.integers(-(-tokens // stretch_tokens(tokens)), size=count)
        means.append(np.mean([endless[begin : begin + length].mean() for begin in begins]))
    drawn, nll = resampled_blocks(by_stretch(text), seed=2, resamples=4000)
    assert drawn.mean() == pytest.approx(count * length, rel=0.02), "sums, over a whole text"
    low, high = np.quantile(means, [0.025, 0.975])
    assert bounds(nll / drawn) == pytest.approx((low, high), abs=0.06 * (high - low))
    # By the formula of Politis and Romano, where blocks begin at every stretch and the text is whole stretches.
    if tokens % stretch_tokens(tokens) == 0:
        sums = by_stretch(text)[1]
        blocks = [np.take(sums, range(n, n + STRETCHES), mode="wrap").sum() / length for n in range(len(sums))]
        assert np.var(nll / drawn) == pytest.approx(np.var(blocks) / count, rel=0.1)


def test_a_short_text_has_no_interval() -> None:
    """Blocks are drawn of fewer than 20 documents, and nothing of a text of fewer than 400 tokens."""
    (text,) = autoregressive(400, 1, 0.5)
    sums, origins = np.stack([np.full(40, 10.0), text.reshape(40, 10).sum(axis=1)]), np.arange(40) % 19
    few, many = resampled_blocks(by_stretch(text), 7), resampled_sums(clustered(sums, np.arange(40) % 20), 7)
    assert few.shape == many.shape == (2, 2000)
    assert np.array_equal(resampled(sums, origins, by_stretch(text), 7), few)
    assert np.array_equal(resampled(sums, np.arange(40) % 20, by_stretch(text), 7), many)
    assert [stretch_tokens(tokens) for tokens in (1, 16, 400, 10_000)] == [1, 1, 5, 25]
    assert resampled(sums[:, :39], origins[:39], by_stretch(text[:390]), 7) is None
    assert [block_tokens(*some) for some in ((20, 800), (19, 800), (1, 399), (1, 400))] == [0, 28, 0, 20]
