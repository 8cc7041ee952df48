"""Rules beyond the paper, `tempered`, `switching` and the prior `fitted`, against the definitions token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, logsumexp

from demix.evaluate.choice import ALPHAS, BETAS, GAMMAS, switching_on_dev, tempered_on_dev
from demix.evaluate.score_tables import ScoreTable
from demix.mix.priors import fitted_log_prior
from demix.mix.rules import Chunk, History, Switching, Tempered, in_blocks
from support.mixing import log_mixture, log_weights, mix, switching, tables, tempered

# What is infinite on purpose warns nobody.
pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
priors = st.tuples(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 30.0, 1000.0]))


def log_prior_of(drawn: tuple[int, float], experts: int) -> np.ndarray:
    seed, scale = drawn
    return log_softmax(scale * np.random.default_rng(seed).normal(size=experts))


def slow_weights(rows: np.ndarray, rule: Tempered | Switching, log_prior: np.ndarray) -> np.ndarray:
    """log g [N, E] before each token of a text, by the formulas."""
    if isinstance(rule, Tempered):
        evidence = tempered(rows, rule.beta, rule.gamma)
    else:
        evidence = switching(rows, log_prior, rule.alpha)
    return log_weights(log_prior, evidence)[:-1]


rules = st.one_of(
    st.builds(Tempered, st.floats(0, 2), st.sampled_from([0.0, 0.3, 0.98, 1.0])),
    st.builds(Switching, st.sampled_from([0.0, 1e-9, 0.001, 0.2, 1.0])),
)


@settings(max_examples=200, deadline=None)
@given(tables(), rules, priors, st.data())
def test_mixtures_equal_the_formulas(table, rule, drawn, data) -> None:
    scores, mask = table
    experts = scores.shape[-1]
    top_k = data.draw(st.one_of(st.none(), st.integers(1, experts)))
    log_prior = log_prior_of(drawn, experts)
    every = slow_weights(scores[mask], rule, log_prior)
    clear = np.ones(len(every), bool)
    if top_k is not None:
        # Which of two experts with nearly the same weight is kept depends on rounding.
        edge = np.sort(every, axis=1)[:, -top_k, None]
        clear = (np.abs(every - edge) < 1e-6).sum(axis=1) == 1
    mixed = mix(scores, mask, "fitted", rule, log_prior=log_prior, top_k=top_k)
    expected = log_mixture(log_weights(every, 0, top_k), scores[mask])
    np.testing.assert_allclose(mixed[mask][clear], expected[clear], rtol=1e-9, atol=1e-9)
    assert (mixed[~mask] == 0).all()


@settings(max_examples=50, deadline=None)
@given(tables(), rules, priors)
def test_a_rule_in_blocks_mixes_each_block_as_a_text_of_its_own(table, rule, drawn) -> None:
    scores, mask = table
    log_prior = log_prior_of(drawn, scores.shape[-1])
    mixed = mix(scores, mask, "fitted", in_blocks(rule), log_prior=log_prior)
    for number, (block, real) in enumerate(zip(scores, mask, strict=True)):
        expected = log_mixture(slow_weights(block[real], rule, log_prior), block[real])
        np.testing.assert_allclose(mixed[number, real], expected, rtol=1e-9, atol=1e-9)
    assert in_blocks(History()) == History()


@settings(max_examples=50, deadline=None)
@given(tables(), rules, priors, st.integers(1, 5))
def test_chunks_do_not_matter(table, rule, drawn, size) -> None:
    scores, mask = table
    log_prior = log_prior_of(drawn, scores.shape[-1])
    whole, _ = rule.evidence(Chunk(scores, mask), rule.begin(log_prior))
    state = rule.begin(log_prior)
    for start in range(0, len(scores), size):
        part = slice(start, start + size)
        evidence, state = rule.evidence(Chunk(scores[part], mask[part]), state)
        np.testing.assert_allclose(evidence, whole[part], rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize(("alpha", "blocks", "size"), [(0.001, 120, 120), (0.2, 120, 33), (0.001, 1300, 1000)])
def test_switching_goes_on_within_stretches_and_across_chunks(alpha: float, blocks: int, size: int) -> None:
    """Stretches, which are scanned side by side, have several tokens each. An expert without a prior has no weight."""
    scores, mask = -np.random.default_rng(3).exponential(9, (blocks, 10, 4)), np.ones((blocks, 10), bool)
    mask[-1, 4:] = False
    scores[~mask] = 0
    prior = np.array([0.5, 0.3, 0.0, 0.2])
    with np.errstate(divide="ignore"):
        rule, log_prior = Switching(alpha), np.log(prior)
    state, found = rule.begin(log_prior), []
    for start in range(0, blocks, size):
        part = slice(start, start + size)
        evidence, state = rule.evidence(Chunk(scores[part], mask[part]), state)
        found.append(evidence)
    log_g = log_prior + np.concatenate(found)[mask]
    expected = slow_weights(scores[mask][:, prior > 0], rule, log_prior[prior > 0])
    np.testing.assert_allclose(log_g[:, prior > 0], expected, rtol=1e-9, atol=1e-9)
    assert (log_g[:, 2] == -np.inf).all()


def gains(scores: np.ndarray, log_prior: np.ndarray) -> np.ndarray:
    """The mean over tokens of p_j / p_mixture [E]. At the optimum it is 1 where a weight is, and nowhere more."""
    return np.exp(scores - logsumexp(log_prior + scores, axis=1, keepdims=True)).mean(axis=0)


@settings(max_examples=150, deadline=None)
@given(tables(scales=(1e-6, 0.1, 3.0, 400.0)))
def test_no_expert_gains_on_the_fitted_prior(table) -> None:
    scores, mask = table
    log_prior = fitted_log_prior(scores, mask)
    assert np.exp(log_prior).sum() == pytest.approx(1, abs=1e-12)
    found = gains(scores[mask], log_prior)
    assert found.max() <= 1 + 1e-9
    assert (np.abs(found[log_prior > -np.inf] - 1) <= 1e-9).all()
    mixed = mix(scores, mask, "fitted", "", log_prior=log_prior).sum() / mask.sum()
    assert mixed >= scores.sum(axis=(0, 1)).max() / mask.sum() - 1e-9


@pytest.mark.parametrize("experts", [2, 9, 40])
@pytest.mark.parametrize("scale", [0.01, 1, 30])
def test_no_expert_gains_on_the_fitted_prior_of_many(experts: int, scale: float) -> None:
    generator = np.random.default_rng(experts)
    even = -scale * generator.exponential(2, (600, experts)) - 0.03 * np.arange(experts)
    # Where few tokens decide, whole steps would overshoot.
    rare = np.where(generator.random((50, experts)) < 0.02, 0, -scale * (1 + generator.random((50, experts))))
    few = 100 * scale * generator.standard_t(1.5, (5, experts))
    for scores in (even, rare, few):
        log_prior = fitted_log_prior(scores[None], np.ones((1, len(scores)), bool))
        assert gains(scores, log_prior).max() <= 1 + 1e-9


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.79, 0.95])
def test_experts_that_do_not_help_have_no_weight_at_all(share: float) -> None:
    """Two of four experts give a token of the first kind 0.8 and 0.2: their best weights give it its share, or all."""
    tokens = 1000
    first = np.arange(tokens) < round(share * tokens)
    chances = np.where(first[:, None], [0.8, 0.2, 0.1, 0.19999], [0.2, 0.8, 0.1, 0.79])
    prior = np.exp(fitted_log_prior(np.log(chances)[None], np.ones((1, tokens), bool)))
    weight = np.clip((share - 0.2) / 0.6, 0, 1)
    np.testing.assert_allclose(prior, [weight, 1 - weight, 0, 0], atol=1e-8)
    assert (prior[2:] == 0).all()
    assert (prior[:2] == 0).tolist() == [weight == 0, weight == 1]


def test_of_equally_good_priors_the_most_even_one_is_fitted() -> None:
    """Where a third expert gives 0.9 of one and 0.1 of another, its weight c stands for 0.9 c and 0.1 c on these."""
    one, other = np.exp(-3 * np.random.default_rng(7).exponential(1, (2, 500)))
    mask = np.ones((1, 500), bool)
    alone = np.exp(fitted_log_prior(np.log(np.stack([one, other], axis=1))[None], mask))
    scores = np.log(np.stack([one, 0.9 * one + 0.1 * other, other], axis=1))[None]
    # Where the sum of squares of (a - 0.9 c, c, b - 0.1 c) is least.
    third = (0.9 * alone[0] + 0.1 * alone[1]) / (1 + 0.81 + 0.01)
    expected = [alone[0] - 0.9 * third, third, alone[1] - 0.1 * third]
    assert min(expected) > 0.1
    np.testing.assert_allclose(np.exp(fitted_log_prior(scores, mask)), expected, atol=3e-5)


def test_experts_with_equal_scores_may_be_needed_for_one_token_of_many() -> None:
    scores = np.tile([-1.0, -40.0, -40.0], (1, 100_000, 1))
    scores[0, 7] = [-60, -1, -1]
    prior = np.exp(fitted_log_prior(scores, np.ones((1, 100_000), bool)))
    np.testing.assert_allclose(prior, [1 - 1e-5, 5e-6, 5e-6], rtol=1e-3)


def table_of(experts: tuple[str, ...], generator: np.random.Generator, best: str) -> ScoreTable:
    scores = -generator.exponential(2, (3, 40, len(experts)))
    scores[..., experts.index(best)] *= 0.5
    return ScoreTable(scores, np.ones((3, 40), bool), experts)


def test_tempered_is_chosen_over_the_grid_with_and_without_the_own_expert() -> None:
    generator = np.random.default_rng(0)
    experts = ("law", "news", "code")
    # No expert has the name of the second domain, so that the best one, code, counts as its own.
    dev = {"law": table_of(experts, generator, "law"), "songs": table_of(experts, generator, "code")}
    grid = tempered_on_dev(dev)
    assert {(rule.beta, rule.gamma) for rule in grid} == {(b, g) for b in BETAS for g in GAMMAS}
    assert [*grid.values()] == sorted(grid.values())
    for rule in ([*grid][place] for place in (0, 30, -1)):
        expected = 0.0
        for domain, own in (("law", "law"), ("songs", "code")):
            rest = dev[domain].select([expert for expert in experts if expert != own])
            for part in (dev[domain], rest):
                rows = part.scores.reshape(-1, len(part.experts))
                log_g = slow_weights(rows, rule, np.zeros(len(part.experts)))
                expected -= log_mixture(log_g, rows).mean() / 2
        assert grid[rule] == pytest.approx(expected, rel=1e-12)
    assert tempered_on_dev({"law": dev["law"].select(("law", "news"))}) == {}


def test_switching_is_chosen_on_dev() -> None:
    """A text whose best expert changes every 25 tokens wants an α near 0.04."""
    generator = np.random.default_rng(1)
    scores = -generator.exponential(1, (8, 250, 2))
    scores[:, :, 0] -= 3 * (np.arange(250) // 25 % 2)
    scores[:, :, 1] -= 3 * (np.arange(250) // 25 % 2 == 0)
    dev = ScoreTable(scores, np.ones((8, 250), bool), ("law", "news"))
    prior = np.log([0.5, 0.5])
    chosen = switching_on_dev(dev, prior)
    losses = {alpha: -mix(scores, dev.mask, "fitted", Switching(alpha), log_prior=prior).sum() for alpha in ALPHAS}
    assert chosen.alpha == min(losses, key=losses.get)
    assert 0.01 <= chosen.alpha <= 0.1
    # Where the best expert changes at every token, the last token says less than the prior.
    turns = np.where(np.arange(500).reshape(2, 250, 1) % 2 == [0, 1], -3.0, 0.0)
    assert switching_on_dev(ScoreTable(turns, np.ones((2, 250), bool), ("law", "news")), prior).alpha == 1.0
