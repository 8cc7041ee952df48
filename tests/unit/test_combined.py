"""Systems that mix columns of several models, against plain sums of probabilities and scipy."""

from collections import defaultdict
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from demix.config.mixing import parsed_weights
from demix.data.shards import TokenShard
from demix.evaluate.choice import ALPHAS, BETAS, GAMMAS
from demix.evaluate.combined import CACHE_DECAYS, Combination, NGramScoring, UnigramCache, combine, log_p, score_ngrams
from demix.evaluate.score_tables import ScoreTable, read_scores
from demix.files import read_json
from demix.mix.mixtures import Mixture
from demix.mix.priors import fitted_log_prior
from demix.mix.rules import Switching, Tempered
from demix.run.evaluated import chosen_on_dev, columns_of, comparisons
from demix.run.systems import Member, rivals
from support.entries import tiny
from support.errors import refused
from support.tokens import NOVEL, TRAINING

SCORED = {"length": 8, "dev_blocks": 30, "test_tokens": 400}


@pytest.fixture(scope="module")
def scores(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Score tables of n-grams of two orders."""
    folder = tmp_path_factory.mktemp("run") / "scores"
    for order in (1, 3):
        paths = [tokens / "tokens" / domain / "train.arrow" for domain in TRAINING] + _shards(tokens)
        score_ngrams(paths, NGramScoring(order=order, train_tokens=3000, **SCORED), folder, folder / f"{order}.json")
    return folder


def _shards(tokens: Path) -> list[Path]:
    return [tokens / "tokens" / domain / f"{split}.arrow" for domain in TRAINING + NOVEL for split in ("dev", "test")]


def _combined(scores: Path, tokens: Path, name: str, members: list[dict], **more: object) -> dict:
    combination = Combination(members=members, training=TRAINING, length=8, **more)
    combine(name, _shards(tokens), scores, combination, scores / f"systems/{name}.json")
    return read_json(scores / f"systems/{name}.json")


def _column(scores: Path, place: str, column: str = "dense") -> np.ndarray:
    table = read_scores(scores / place, [column])
    return table.scores[..., 0][table.mask]


def _loss(part: float, one: np.ndarray, other: np.ndarray) -> float:
    """Nats per token of a mixture of two columns of log p."""
    return float(-np.log(part * np.exp(one) + (1 - part) * np.exp(other)).mean())


def test_a_system_sums_probabilities_in_proportions_of_the_lowest_loss_on_dev(scores: Path, tokens: Path) -> None:
    rule = Tempered(0.2, 0.98)
    members = [
        {"folder": "ngram3", "columns": ["dense"]},
        {"folder": "ngram3_domains", "columns": TRAINING, "weights": "tempered(0.2,0.98)"},
    ]
    said = _combined(scores, tokens, "both", members)

    def mixed(place: str) -> np.ndarray:
        table: ScoreTable = read_scores(scores / "ngram3_domains" / place, TRAINING)
        prior = np.full(len(TRAINING), -np.log(len(TRAINING)))
        return Mixture(rule, prior).table(table.scores, table.mask)[table.mask]

    one, other = (
        np.concatenate(found)
        for found in zip(
            *((_column(scores, f"ngram3/{domain}.dev"), mixed(f"{domain}.dev")) for domain in TRAINING), strict=True
        )
    )
    best = minimize_scalar(_loss, (0, 1), (0, 1), (one, other), method="bounded", options={"xatol": 1e-9}).x
    assert said["proportions"] == pytest.approx([best, 1 - best], abs=1e-4)
    assert 0.01 < best < 0.99
    for domain in TRAINING + NOVEL:
        first, second = np.exp(_column(scores, f"ngram3/{domain}.test")), np.exp(mixed(f"{domain}.test"))
        part, rest = said["proportions"]
        expected = np.log(part * first + rest * second)
        assert _column(scores, f"both/{domain}.test") == pytest.approx(expected, abs=2e-6)


def test_a_cache_counts_the_text_before_a_token(scores: Path, tokens: Path) -> None:
    shard = TokenShard.open(tokens / "tokens" / TRAINING[0] / "test.arrow")
    ids = shard.read(0, 400)
    found = UnigramCache(shard.vocab_size)
    rows = np.concatenate([found.log_p(ids[:150]), found.log_p(ids[150:])])
    for column, decay in enumerate(CACHE_DECAYS):
        for place in (0, 1, 149, 150, 399):
            counts: dict[int, float] = defaultdict(float)
            for distance, token in enumerate(reversed(ids[:place].tolist())):
                counts[token] += decay ** (distance + 1)
            share = (counts[int(ids[place])] + 1 / shard.vocab_size) / (sum(counts.values()) + 1)
            assert rows[place, column] == pytest.approx(np.log(share), rel=1e-9)
    said = _combined(scores, tokens, "remembers", [{"folder": "ngram1", "columns": ["dense"]}, {}])
    assert len(said["proportions"]) == 1 + len(CACHE_DECAYS)
    assert sum(said["proportions"]) == pytest.approx(1)
    lower = [_column(scores, f"{name}/{TRAINING[0]}.test").mean() for name in ("remembers", "ngram1")]
    assert lower[0] > lower[1]


def test_pairs_are_mixed_with_one_proportion_each_on_its_own_domain(scores: Path, tokens: Path) -> None:
    members = [{"folder": f"ngram{order}_domains", "columns": TRAINING} for order in (1, 3)]
    said = _combined(scores, tokens, "pairs", members, paired=True)
    part, rest = said["proportions"]
    for domain in TRAINING:
        for split in ("dev", "test"):
            place = f"{NOVEL[0]}.{split}"
            first, second = (np.exp(_column(scores, f"ngram{order}_domains/{place}", domain)) for order in (1, 3))
            expected = np.log(part * first + rest * second)
            assert _column(scores, f"pairs/{place}", domain) == pytest.approx(expected, abs=2e-6)
    own = [[_column(scores, f"ngram{order}_domains/{one}.dev", one) for one in TRAINING] for order in (1, 3)]
    one, other = map(np.concatenate, own)
    assert _loss(part, one, other) <= min(_loss(part + step, one, other) for step in (-0.01, 0.01))


def test_a_run_evaluates_systems_like_models() -> None:
    systems = {
        "rival": {"columns": {"dense": None, "ngram2": None}, "label": "Dense + bigrams"},
        "pairs": {"pairs": ["demix", "ngram2_domains"]},
    }
    run = tiny(evaluation={"ngrams": [2], "systems": systems})
    against = [pair[:1] for pair in comparisons(run, run.training[0]) if pair[4] == "rival"]
    assert {("pairs",), ("demix",)} < {*against}
    assert ("rival",) not in against
    assert chosen_on_dev(run)["pairs"] == run.training == columns_of(run, "demix")
    assert next(model for model in run.own if model.name == "dense").splits == ("dev", "test")
    ensemble = tiny(seeds=[2], evaluation={"systems": {"rival": {"columns": {"dense": None, "dense-seed2": None}}}})
    assert {one.splits for one in ensemble.trained if one.base.name == "dense"} == {("dev", "test")}
    assert [one.model for one in rivals(ensemble)] == ["rival"]
    for wrong in (
        {"columns": {"dense": None, "nothing": None}},
        {"columns": {"dense": "tempered", "ngram2": None}},
        {"columns": {"demix": None, "ngram2": None}},
        {"columns": {"dense": None}},
        {"pairs": ["dense", "demix"]},
        {"pairs": ["demix", "ngram2_domains"], "weights": "switching"},
        {"pairs": ["demix", "ngram2_domains"], "reset": True},
        {"columns": {"demix": "cluster", "ngram2": None}},
        {"columns": {"dense": None, "cache": "tempered"}},
    ):
        with refused("evaluation.systems.rival"):
            tiny(evaluation={"ngrams": [2], "systems": {"rival": wrong}})
    with refused("evaluation.systems.ngram2"):
        tiny(evaluation={"ngrams": [2], "systems": {"ngram2": systems["rival"]}})


def test_weights_and_cache_begin_again_at_each_block(scores: Path, tokens: Path) -> None:
    experts = {"folder": "ngram3_domains", "columns": TRAINING}

    def by_hand(place: str, rule: Tempered | Switching, prior: np.ndarray) -> np.ndarray:
        table = read_scores(scores / "ngram3_domains" / place, TRAINING)
        blocks = zip(table.scores, table.mask, strict=True)
        return np.concatenate([Mixture(rule, prior).table(one[None], mask[None])[0, mask] for one, mask in blocks])

    uniform = np.full(len(TRAINING), -np.log(len(TRAINING)))
    said = _combined(scores, tokens, "tempers", [experts | {"weights": "tempered"}], reset=True)
    named, lowest = said["members"][0]["weights"], np.inf
    for beta, gamma in product(BETAS, GAMMAS):
        losses = []
        for domain in TRAINING:
            table = read_scores(scores / f"ngram3_domains/{domain}.dev", TRAINING)
            for part in (table, table.select([one for one in TRAINING if one != domain])):
                mixture = Mixture(Tempered(beta, gamma), np.full(len(part.experts), -np.log(len(part.experts))))
                parts = [mixture.table(one[None], mask[None]) for one, mask in zip(part.scores, part.mask, strict=True)]
                losses.append(-np.sum(parts) / part.tokens)
        if np.mean(losses) < lowest - 1e-12:
            lowest, best = np.mean(losses), f"tempered({beta},{gamma})"
    assert named == best
    _combined(scores, tokens, "switches", [experts | {"weights": "switching"}], reset=True)
    for domain in (TRAINING[0], NOVEL[0]):
        tempered = Tempered(*parsed_weights(named).parameters)
        assert _column(scores, f"tempers/{domain}.test") == pytest.approx(
            by_hand(f"{domain}.test", tempered, uniform), abs=2e-6
        )
        dev = read_scores(scores / f"ngram3_domains/{domain}.dev", TRAINING)
        prior = fitted_log_prior(dev.scores, dev.mask)
        rule = max(map(Switching, ALPHAS), key=lambda rule: by_hand(f"{domain}.dev", rule, prior).sum())
        assert _column(scores, f"switches/{domain}.test") == pytest.approx(
            by_hand(f"{domain}.test", rule, prior), abs=2e-6
        )
    ids = TokenShard.open(tokens / "tokens" / TRAINING[0] / "test.arrow").read(0, 400)
    types = TokenShard.open(tokens / "tokens" / TRAINING[0] / "test.arrow").vocab_size
    members = [Member(folder="ngram1", columns=("dense",)), Member()]
    (found,) = log_p(scores, members, f"{TRAINING[0]}.test", types, reset=True)
    assert np.array_equal(found[16:24, 1:], UnigramCache(types).log_p(ids[16:24]))
