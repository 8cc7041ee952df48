"""Classification by routing: accuracies from stored log-probabilities, held against plain loops."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp, softmax
from scipy.stats import binomtest

from demix.config.tasks import Task
from demix.data.examples import Prompt
from demix.evaluate.classification import (
    Classification,
    Scored,
    chance,
    choice,
    judged,
    likelihoods,
    mean_weights,
    performance,
    resampled_means,
    routings,
    updating,
    with_cues,
)
from demix.mix.rules import Tempered
from support.mixing import log_mixture, log_weights, switching, tempered, window
from support.tasks import LABELS, made_up

E = 4
EXPERTS = tuple(f"e{number}" for number in range(E))
TASK = Task(test={"path": "x.jsonl"}, shots=8)
GIVEN = Classification(
    tasks={},
    models=(),
    weights=("history", "released", "tempered", "switching", "cluster"),
    temperature=0.1,
    top_k=(1, 2, 9),
)


def near_of(scored: list[Scored], seed: int = 3) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(seed)
    return {one.prompt.context: drawn.uniform(0.2, 1.2, E) for one in scored}


def found(scored: list[Scored], **more: object) -> dict[tuple[str, int | None, str], np.ndarray]:
    """The likelihoods [N, L] of all tests by routing, top-k and expert."""
    tests = [one for one in with_cues(scored) if one.prompt.split == "test"]
    rows = {}
    for routing in routings(TASK, EXPERTS, scored, GIVEN, near_of(scored), Tempered(0.2, 0.9)):
        values = np.stack([likelihoods(one, routing) for one in tests], 1)
        rows |= {(routing.name, k, routing.expert): row for k, row in zip(routing.top_k, values, strict=True)}
    return rows


def by_token(one: Scored, log_prior: np.ndarray, rule: Callable[..., np.ndarray], top_k: int | None) -> list[float]:
    """log p of each label, one token after the other; `rule` gives what the tokens before say of the experts."""
    totals = []
    for label in one.labels:
        evidence = rule(np.concatenate([one.context, label]))
        log_g = log_weights(log_prior, evidence, top_k)[len(one.context) : -1]
        totals.append(log_mixture(log_g, label).sum())
    return totals


def none(scores: np.ndarray) -> np.ndarray:
    return np.zeros((len(scores) + 1, E))


@pytest.mark.parametrize("top_k", [None, 1, 2])
def test_every_routing_is_that_of_a_loop_over_tokens(top_k: int | None) -> None:
    scored = made_up(E, cues=False)
    rows, near = found(scored), near_of(scored)
    tests = [one for one in scored if one.prompt.split == "test"]
    uniform = np.zeros(E)
    right = np.array(
        [
            [np.argmax([label[:, j].sum() for label in one.labels]) == one.prompt.answer for j in range(E)]
            for one in scored
            if one.prompt.split == "validation"
        ]
    )
    fixed = softmax(right.mean(axis=0))
    for number, one in enumerate(tests):
        close = -near[one.prompt.context] / 0.1
        expected = {
            "history": (uniform, window),
            "released": (uniform, partial(window, size=1)),
            "tempered": (uniform, partial(tempered, beta=0.2, gamma=0.9)),
            "switching": (uniform, partial(switching, log_prior=np.full(E, -np.log(E)), alpha=0.2)),
            "cluster": (close, none),
            "cluster+history": (close, window),
            "fixed, 8 + 8": (np.log(fixed), none),
        }
        for name, (log_prior, rule) in expected.items():
            assert rows[name, top_k, ""][number] == pytest.approx(by_token(one, log_prior, rule, top_k), abs=1e-9)
        if top_k is None:
            # Of a whole label, the posterior over experts is exact: sums of products.
            sums = np.stack([label.sum(axis=0) for label in one.labels])
            posterior = log_softmax(one.context.sum(axis=0))
            assert rows["history", None, ""][number] == pytest.approx(logsumexp(posterior + sums, axis=1), abs=1e-9)
            mean = [np.log(np.exp(label).mean(axis=1)).sum() for label in one.labels]
            assert rows["average", None, ""][number] == pytest.approx(mean, abs=1e-12)
            for j, name in enumerate(EXPERTS):
                assert rows["one expert", None, name][number] == pytest.approx(sums[:, j], abs=1e-12)
    assert not any(k == 9 for _, k, _ in rows), "no more experts than there are"
    assert {k for name, k, _ in rows if name == "average"} == {None}, "equal weights have no likeliest experts"


@pytest.mark.parametrize("cues", [False, True])
def test_a_released_row_mixes_labels_after_a_softmax_over_labels(cues: bool) -> None:
    scored = made_up(E, cues=cues)
    rows, near = found(scored), near_of(scored)
    bare = {one.prompt.example: one for one in scored if one.prompt.split == "cue"}
    for number, one in enumerate(one for one in scored if one.prompt.split == "test"):
        sums = np.stack([label.sum(axis=0) for label in one.labels])
        if cues:
            sums -= np.stack([label.sum(axis=0) for label in bare[one.prompt.cue].labels])
        shares = softmax(sums, axis=0)
        assert np.exp(rows["average, released", None, ""][number]) == pytest.approx(shares.mean(axis=1))
        for top_k in (None, 1, 2):
            g = np.exp(log_weights(-near[one.prompt.context] / 0.1, 0, top_k))
            expected = [sum(g[j] * label[j] for j in range(E)) for label in shares]
            assert np.exp(rows["cluster, released", top_k, ""][number]) == pytest.approx(expected)
    assert {name for name, _, _ in rows if name.endswith("released") and name != "released"} == {
        f"{name}, released" for name in ("average", "cluster", "fixed, 8 + 8", "fixed, 8", "updating")
    }


def test_updating_reads_the_labels_of_earlier_tests_alone() -> None:
    scored = made_up(E, cues=False, seeds=(1, 2))
    task = TASK.replace(seeds=(1, 2))
    weights = updating(scored, task, EXPERTS)
    for seed in (1, 2):
        tests = [one for one in scored if (one.prompt.split, one.prompt.seed) == ("test", seed)]
        hits, sums = np.zeros(E), np.full(E, 1 / E)
        for number, one in enumerate(tests):
            assert np.exp(weights[seed, number]) == pytest.approx(sums / (number + 1), abs=1e-12)
            hits += [np.argmax([label[:, j].sum() for label in one.labels]) == one.prompt.answer for j in range(E)]
            sums = sums + softmax(hits / (number + 1))


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("split", ["validation", "permutation", "test"])
def test_weights_by_accuracy_are_those_of_what_is_right(split: str, calibrated: bool) -> None:
    """Of each seed, after calibration where there are cues."""
    scored = made_up(E, cues=calibrated, seeds=(1, 2))
    weights = performance(with_cues(scored), split, TASK.replace(seeds=(1, 2)), EXPERTS)
    cues = {(one.prompt.seed, one.prompt.example): one for one in scored if one.prompt.split == "cue"}
    for seed in (1, 2):
        some = [one for one in scored if (one.prompt.split, one.prompt.seed) == (split, seed)]
        right = np.zeros((len(some), E))
        for number, one in enumerate(some):
            sums = np.stack([label.sum(axis=0) for label in one.labels])
            if calibrated:
                sums -= np.stack([label.sum(axis=0) for label in cues[seed, one.prompt.cue].labels])
            right[number] = sums.argmax(axis=0) == one.prompt.answer
        assert np.exp(weights[seed]) == pytest.approx(softmax(right.mean(axis=0)), abs=1e-12)


def test_mean_weights_are_those_of_the_contexts_alone() -> None:
    # The first label has three tokens, of which the last is predicted with other weights than the first.
    scored = [replace(one, labels=one.labels[::-1]) for one in made_up(E)]
    near, tests = near_of(scored), [one for one in scored if one.prompt.split == "test"]
    named = {
        routing.name: mean_weights(scored, routing)
        for routing in routings(TASK, EXPERTS, scored, GIVEN, near, Tempered(0.2, 0.9))
        if routing.mixes
    }
    close = [-near[one.prompt.context] / 0.1 for one in tests]
    seen = [one.context.sum(axis=0) for one in tests]
    assert named["cluster"] == pytest.approx(softmax(close, axis=1).mean(axis=0))
    assert named["history"] == pytest.approx(softmax(seen, axis=1).mean(axis=0))
    assert named["cluster+history"] == pytest.approx(softmax(np.add(close, seen), axis=1).mean(axis=0))
    assert not {"average", "one expert"} & named.keys()


def test_without_demonstrations_nothing_is_permuted() -> None:
    scored = [one for one in made_up(E) if one.prompt.split != "permutation"]
    names = [routing.name for routing in routings(TASK, EXPERTS, scored, GIVEN, None, Tempered(0.2, 0.9))]
    assert "fixed, 8 + 8" in names
    assert not {"fixed, 8", "cluster", "cluster+history"} & {*names}


def test_ties_are_broken_by_content_and_not_by_place() -> None:
    chosen = set()
    for number in range(40):
        prompt = Prompt("test", 1, number, f"text {number}", LABELS)
        one = choice(np.array([-2.0, -2.0, -3.0]), prompt)
        turned = replace(prompt, choices=LABELS[::-1])
        assert turned.choices[choice(np.array([-3.0, -2.0, -2.0]), turned)] == LABELS[one]
        chosen.add(one)
    assert chosen == {0, 1}


def test_chance_is_that_of_guessing_or_of_one_label() -> None:
    def asked(answers: list[int], choices: list[tuple[str, ...]]) -> list[Prompt]:
        pairs = enumerate(zip(answers, choices, strict=True))
        return [Prompt("test", 1, n, "x", labels, answer) for n, (answer, labels) in pairs]

    assert chance(asked([0, 0, 0, 1], [LABELS] * 4)) == 0.75
    assert chance(asked([0, 1, 2], [LABELS] * 3)) == pytest.approx(1 / 3)
    own = [("a", "b"), ("c", "d"), ("e", "f", "g", "h"), ("i", "j", "k", "l")]
    assert chance(asked([0, 0, 0, 0], own)) == pytest.approx((0.5 + 0.5 + 0.25 + 0.25) / 4)


@pytest.mark.parametrize(
    ("hits", "count", "sure"), [(60, 200, True), (30, 200, False), (10, 200, True), (19, 19, False)]
)
def test_a_row_is_judged_where_the_exact_interval_excludes_chance(hits: int, count: int, sure: bool) -> None:
    row = judged(np.arange(count)[None] < hits, 0.125, 1)
    assert row["accuracy"] == hits / count
    assert row["judged"] is sure
    if count < 20:
        assert row["accuracy_low"] is None
    else:
        # Clopper and Pearson: the proportions under which so many hits are just not rejected.
        for bound, side in (("accuracy_low", "greater"), ("accuracy_high", "less")):
            assert binomtest(hits, count, row[bound], side).pvalue == pytest.approx(0.025, abs=1e-6)


def test_an_interval_of_several_seeds_is_that_of_both_samples() -> None:
    generator = np.random.default_rng(5)
    right = generator.random((5, 120)) < generator.random((5, 1))
    means = resampled_means(right, 1)
    plain = [
        right[np.ix_(generator.integers(5, size=5), generator.integers(120, size=120))].mean() for _ in range(4000)
    ]
    assert means.mean() == pytest.approx(right.mean(), abs=0.01)
    assert means.std() == pytest.approx(np.std(plain), rel=0.08)
    row = judged(right, 0.5, 1)
    assert row["accuracy_low"] == pytest.approx(np.quantile(plain, 0.025), abs=0.03)
    assert row["accuracy_high"] == pytest.approx(np.quantile(plain, 0.975), abs=0.03)
