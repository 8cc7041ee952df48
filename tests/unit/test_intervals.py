"""Bootstrap intervals: resampled sums, their bounds, and pieces of one document that are drawn together."""

import numpy as np
import pytest
from scipy.stats import bootstrap

from demix.evaluate.intervals import bounds, clustered, resampled_sums


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
    monkeypatch.setattr("demix.evaluate.intervals._AT_ONCE", 100)
    np.testing.assert_allclose(resampled_sums(sums, seed=4, resamples=50), whole, rtol=1e-12)


def test_clusters_stand_in_the_order_of_their_first_pieces() -> None:
    sums = np.array([[1.0, 2.0, 4.0, 8.0], [0.0, 1.0, 0.0, 3.0]])
    assert clustered(sums, np.array([9, 2, 9, 5])).tolist() == [[5.0, 2.0, 8.0], [0.0, 1.0, 3.0]]
    assert clustered(sums, np.arange(4)).tolist() == sums.tolist()
