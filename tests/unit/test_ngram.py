"""N-gram baselines: probabilities by the definition of Chen and Goodman, what is scored, what a run makes of them."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from demix.data.shards import TokenShard, tokenize
from demix.data.tokenizer import train_tokenizer
from demix.evaluate.combined import NGramScoring, score_ngrams
from demix.evaluate.score_tables import read_scores
from demix.files import read_json
from demix.model.ngram import FALLBACK, KneserNey, discounts_of
from demix.run.evaluated import evaluated
from demix.run.rules import RunRules
from demix.run.systems import bases, ngram_lines
from support.configs import changed
from support.entries import tiny
from support.errors import refused
from support.tokens import NOVEL, TRAINING


class Defined:
    """Modified Kneser-Ney by its definition: dictionaries of tuples, one probability at a time."""

    def __init__(self, streams: Sequence[Sequence[int]], order: int, types: int) -> None:
        self.types, self.order = types, min(order, max(map(len, streams)))
        grams = [tuple(one[i : i + self.order]) for one in streams for i in range(len(one) - self.order + 1)]
        self.counts: dict[int, dict[tuple, int]] = {self.order: {gram: grams.count(gram) for gram in grams}}
        for size in range(self.order - 1, 0, -1):
            longer = {tuple(one[i : i + size + 1]) for one in streams for i in range(len(one) - size)}
            before = defaultdict(set)
            for gram in longer:
                before[gram[1:]].add(gram[0])
            self.counts[size] = {gram: len(tokens) for gram, tokens in before.items()}

    def discount(self, count: int, size: int) -> float:
        n1, n2, n3, n4 = (list(self.counts[size].values()).count(k) for k in (1, 2, 3, 4))
        if 0 in (n1, n2, n3):
            return FALLBACK[min(count, 3) - 1]
        y = n1 / (n1 + 2 * n2)
        discounts = [1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]
        if any(d <= 0 for d in discounts):
            discounts = list(FALLBACK)
        return discounts[min(count, 3) - 1]

    def probability(self, context: tuple, token: int) -> float:
        context = context[max(0, len(context) - self.order + 1) :]
        lower = self.probability(context[1:], token) if context else 1 / self.types
        size = len(context) + 1
        after = {gram[-1]: count for gram, count in self.counts[size].items() if gram[:-1] == context}
        if not after:
            return lower
        total = sum(after.values())
        own = after.get(token, 0)
        kept = own - self.discount(own, size) if own else 0
        return (kept + sum(self.discount(count, size) for count in after.values()) * lower) / total


def probability(model: KneserNey, context: Sequence[int], token: int) -> float:
    """p(token | context), with a token before it that the model must not look at."""
    return float(np.exp(model.log_probabilities(np.array([[*context, token]]))[0, -1]))


def test_a_small_text_by_hand() -> None:
    """Of 0 1 0 1 0 2 the bigrams are 01 and 10 twice and 02 once, and each of 0, 1 and 2 follows one other token.

    No order has the counts of counts that it needs, so the discounts are 0.5, 1 and 1.5. Of four types
    p(w) = 0.5/3 + (3 · 0.5/3)/4 = 7/24 for those that were seen, 3/24 for the other. After 0 stand 1, twice, and 2:
    γ = (1 + 0.5)/3 = 1/2, so p(1|0) = 1/3 + 7/48, p(2|0) = 0.5/3 + 7/48. After 1 stands 0 alone: γ = 1/2.
    """
    model = KneserNey.fit([[0, 1, 0, 1, 0, 2]], 2, 4)
    found = np.array([[probability(model, [context], token) for token in range(4)] for context in range(4)])
    expected = np.array([[7, 23, 15, 3], [31, 7, 7, 3], [14, 14, 14, 6], [14, 14, 14, 6]]) / 48
    assert found == pytest.approx(expected, rel=1e-12)
    assert model.stored == 3 + 3


def test_discounts_are_those_of_counts_of_counts() -> None:
    """n1 = 4, n2 = 2, n3 = 1, n4 = 1: Y = 4/8, D1 = 1 - 1/2, D2 = 2 - 3/4, D3 = 3 - 2."""
    assert discounts_of(np.array([1, 1, 1, 1, 2, 2, 3, 4, 9, 0])) == pytest.approx((0.5, 1.25, 1.0))
    assert discounts_of(np.array([1, 1, 1, 2, 2, 4, 4])) == FALLBACK, "no n-gram came three times"
    assert discounts_of(np.array([1, 1, 2, 3, 3, 3, 3, 3])) == FALLBACK, "D2 would be below 0"
    assert discounts_of(np.array([2, 2, 3, 4])) == FALLBACK
    assert discounts_of(np.array([], np.int64)) == FALLBACK


STREAMS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=60), min_size=1, max_size=3)


@given(STREAMS, st.integers(1, 5), st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_probabilities_are_those_of_the_definition_and_sum_to_one(
    streams: list[list[int]], order: int, context: list[int]
) -> None:
    """Of contexts that were seen and of others: the types 5 and 6 come in no stream."""
    model, defined = KneserNey.fit(streams, order, 7), Defined(streams, order, 7)
    for before in (context, streams[0][-7:-1] or [0], [5, *context[-1:]]):
        found = [probability(model, before, token) for token in range(7)]
        assert sum(found) == pytest.approx(1, rel=1e-12)
        assert min(found) > 0
        assert found == pytest.approx([defined.probability(tuple(before), token) for token in range(7)], rel=1e-9)


def test_a_longer_text_has_discounts_of_its_own() -> None:
    text = np.minimum(np.random.default_rng(0).geometric(0.25, 3000), 12) - 1
    model, defined = KneserNey.fit([text], 3, 12), Defined([text.tolist()], 3, 12)
    assert all(defined.discount(1, size) != FALLBACK[0] for size in (2, 3))
    for place in range(100, 130):
        found = [probability(model, text[place - 2 : place], token) for token in range(12)]
        assert found == pytest.approx(
            [defined.probability(tuple(text[place - 2 : place].tolist()), token) for token in range(12)]
        )


def test_the_contexts_of_scores_begin_one_token_before_the_block(tokens: Path, tmp_path: Path) -> None:
    length, order, learned_tokens = 8, 4, 500
    scoring = NGramScoring(order=order, train_tokens=learned_tokens, length=length, dev_blocks=5, test_tokens=61)
    score_ngrams(_shards(tokens), scoring, tmp_path, tmp_path / "ngram4.json")
    assert {path.parent.name for path in tmp_path.glob("ngram4/*/dense.parquet")} == {
        f"{domain}.{split}" for domain in TRAINING + NOVEL for split in ("dev", "test")
    }
    # All text is more.
    score_ngrams(_shards(tokens), scoring.replace(train_tokens=None), tmp_path, tmp_path / "all.json")
    both = [read_scores(tmp_path / folder / "licenses.test", ["dense"]).scores for folder in ("ngram4_all", "ngram4")]
    assert both[0].sum() > both[1].sum()
    streams = {}
    for domain in TRAINING:
        shard = TokenShard.open(tokens / "tokens" / domain / "train.arrow")
        streams[domain] = [shard.end_of_text, *shard.read(0, learned_tokens).tolist()]
    grams = {
        domain: {tuple(text[i : i + size]) for size in range(1, order + 1) for i in range(len(text) - size + 1)}
        for domain, text in streams.items()
    }
    assert read_json(tmp_path / "ngram4.json")["ngrams"] == {
        "ngram4": len(set.union(*grams.values())),
        "ngram4_domains": sum(map(len, grams.values())),
    }
    for domain, split, count in (("fantasy", "test", 61), ("licenses", "dev", 40)):
        shard = TokenShard.open(tokens / "tokens" / domain / f"{split}.arrow")
        text = [shard.end_of_text, *shard.read(0, count).tolist()]
        tables = [("ngram4_domains", column, [stream]) for column, stream in streams.items()]
        tables.append(("ngram4", "dense", [*streams.values()]))
        for folder, column, learned in tables:
            defined = Defined(learned, order, shard.vocab_size)
            table = read_scores(tmp_path / folder / f"{domain}.{split}", [column])
            # The token number t of the text is the one after t tokens, the first of them the end of a text.
            expected = [
                np.log(defined.probability(tuple(text[t // length * length : t + 1]), text[t + 1]))
                for t in range(count)
            ]
            assert table.scores[..., 0][table.mask] == pytest.approx(expected, abs=1e-5)


def test_shards_of_other_tokenizers_are_refused(tokens: Path, tmp_path: Path) -> None:
    other = tmp_path / "fantasy" / "test.arrow"
    train_tokenizer([tokens / "corpus" / "licenses" / "train.parquet"], 300, tmp_path / "tokenizer.json")
    tokenize(tmp_path / "tokenizer.json", tokens / "corpus" / "fantasy" / "test.parquet", other)
    scoring = NGramScoring(order=2, train_tokens=9, length=8)
    with refused("fantasy/test.arrow"):
        score_ngrams([*_shards(tokens)[:3], other], scoring, tmp_path, tmp_path / "none.json")


def _shards(run: Path) -> list[Path]:
    names = [(domain, "train") for domain in TRAINING]
    names += [(domain, split) for domain in TRAINING + NOVEL for split in ("dev", "test")]
    return [run / "tokens" / domain / f"{split}.arrow" for domain, split in names]


def test_ngrams_learn_as_many_tokens_as_dense_and_are_mixed_as_experts() -> None:
    run = tiny(evaluation={"ngrams": [5]}, models={"dense": {"tokens": 24576}})
    settings = json.loads(RunRules(run).ngram_settings("5"))
    assert settings == {"order": 5, "train_tokens": 8192, "length": 32, "dev_blocks": 10, "test_tokens": 1000}
    plain = changed(run, evaluation={"weights": ["history"]})
    assert [system.method for system in ngram_lines(plain)] == ["dense", "cached"]
    assert bases(run).keys() == {"dense_unbalanced", "dense", "demix_cached"}
    every = tiny(evaluation={"ngrams": ["5_all"]})
    settings = json.loads(RunRules(every).ngram_settings("5_all"))
    assert (settings["order"], settings["train_tokens"]) == (5, None)
    folders = [one.folder for one in evaluated(every, "fantasy")]
    assert [one for one in folders if "ngram" in one] == ["ngram5_all", "ngram5_all_domains"]
