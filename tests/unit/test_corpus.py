"""Deduplication, splits and what they leak, beside plain loops."""

import hashlib
import math
from itertools import accumulate, chain

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from demix.data import corpus
from demix.data.anonymize import SCHEMA
from demix.data.corpus import SPLITS, Budget, Splitting, left_out, mark_duplicates, split
from demix.data.leakage import contamination, grams_of
from demix.evaluate.harness import DOCUMENTS
from demix.files import read_json, write_json, write_parquet
from support.errors import refused

REPLACED = {"EMAIL": 3}
NORMALISED = {"nul": 1}


def _id(text):
    return hashlib.sha256(text.encode()).hexdigest()


def _document(text):
    """What the chunks of a document have in common: a first word of one letter. Other texts are whole documents."""
    return text[:1] if len(text.split()[0]) == 1 else text


def _clean(folder, domain, texts, empty=0):
    """What anonymize_documents writes for `texts`, with `empty` more documents rejected."""
    path = folder / "clean" / f"{domain}.parquet"
    path.parent.mkdir(exist_ok=True)
    columns = [[_id(text) for text in texts], texts, [len(text.split()) for text in texts]]
    columns.append([_id(_document(text)) for text in texts])
    pq.write_table(pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA), path)
    counts = {"documents": len(texts) + empty, "rejected": {"empty": empty}, "replacements": REPLACED}
    write_json(path.with_suffix(".json"), {**counts, "normalised": NORMALISED})
    return path


def _split(folder, domain, training=True, budget=None, seed=1, documents=None, near_duplicates=None):
    output = folder / "corpus" / domain
    clean = folder / "clean" / f"{domain}.parquet"
    splitting = Splitting(
        words=budget or Budget(train=None, dev=4, test=4),
        near_duplicates=near_duplicates,
        training=training,
        seed=seed,
    )
    split(domain, documents or [clean], folder / "owners.parquet", splitting, output)
    rows = {name: pq.read_table(output / f"{name}.parquet").to_pylist() for name in SPLITS}
    return rows, read_json(output / "card.json")


def _owners(folder, **texts):
    for domain, some in texts.items():
        _clean(folder, domain, some)
    mark_duplicates({domain: [folder / "clean" / f"{domain}.parquet"] for domain in texts}, folder / "owners.parquet")
    return {row["id"]: row["domain"] for row in pq.read_table(folder / "owners.parquet").to_pylist()}


WORD = st.sampled_from("abcdefgh")
TEXTS = st.lists(st.lists(WORD, min_size=1, max_size=3).map(" ".join), max_size=25)
MANY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=20)


@MANY
@given(TEXTS, TEXTS, TEXTS)
def test_each_text_has_one_owner_that_holds_it(tmp_path, a, b, c):
    held = {"a": a, "b": b, "c": c}
    owners = _owners(tmp_path, **held)
    expected = {}
    for text in {*a, *b, *c}:
        holders = [domain for domain in held if text in held[domain]]
        expected[_id(text)] = min(holders, key=lambda domain: hashlib.sha256(f"{domain}|{_id(text)}".encode()).digest())
    assert owners == expected
    assert list(owners) == sorted(owners)
    turned = _owners(tmp_path, c=c[::-1], b=b[::-1], a=a[::-1])
    assert turned == owners


def _words(texts):
    return sum(len(text.split()) for text in texts)


def _given(document, budget):
    """The first chunks of a document, as many as dev and test may have."""
    most = math.inf if budget.per_document is None else budget.per_document
    ends = list(accumulate(len(text.split()) for text in document))
    return [text for number, (text, end) in enumerate(zip(document, ends, strict=True)) if not number or end <= most]


def _documents(texts, seed):
    """The chunks of each document, in the order in which documents go to splits."""
    documents = {}
    for text in dict.fromkeys(texts):
        documents.setdefault(_id(_document(text)), []).append(text)
    return [
        documents[key] for key in sorted(documents, key=lambda one: hashlib.sha256(f"{seed}|{one}".encode()).digest())
    ]


def _expected(texts, budget, seed):
    """The splits as a plain loop fills them."""
    order, splits = _documents(texts, seed), {}
    for name in ("dev", "test"):
        splits[name] = []
        while order and _words(splits[name]) < getattr(budget, name):
            splits[name] += _given(order.pop(0), budget)
    rest = list(chain.from_iterable(order))
    while rest and budget.train is not None and _words(rest[:-1]) >= budget.train:
        rest.pop()
    return splits | {"train": rest} if rest else None


@MANY
@given(
    TEXTS,
    TEXTS,
    st.booleans(),
    st.builds(
        Budget,
        train=st.none() | st.integers(1, 12),
        dev=st.integers(1, 9),
        test=st.integers(1, 9),
        per_document=st.none() | st.integers(1, 6),
    ),
    st.integers(0, 3),
    st.sampled_from([1, 12, 64 << 20]),
    st.sampled_from([None, 0.5]),
)
def test_splits_follow_the_hash_order_and_lose_nothing(
    tmp_path, texts, others, training, budget, seed, stretch_bytes, near
):
    owners = _owners(tmp_path, a=texts, b=others) if training else _owners(tmp_path, b=others)
    if not training:
        _clean(tmp_path, "a", texts)
    mine = [text for text in texts if (owners[_id(text)] == "a" if training else _id(text) not in owners)]
    expected = _expected(mine, budget, seed)
    if expected is None:
        # Dev and test then have half of what they could.
        words = _words(chain.from_iterable(_given(one, budget) for one in _documents(mine, seed)))
        asked = budget.dev + budget.test
        dev, test = (min(wanted, math.ceil(wanted * words / (2 * asked))) for wanted in (budget.dev, budget.test))
        expected = _expected(mine, budget.replace(dev=dev, test=test), seed) if mine else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "STRETCH_BYTES", stretch_bytes)
        if expected is None:
            with refused("a.words"):
                _split(tmp_path, "a", training, budget, seed, near_duplicates=near)
            return
        rows, card = _split(tmp_path, "a", training, budget, seed, near_duplicates=near)
    assert {name: [row["text"] for row in rows[name]] for name in SPLITS} == expected
    for row in chain.from_iterable(rows.values()):
        ids = {"id": _id(row["text"]), "origin": _id(_document(row["text"]))}
        assert row == ids | {"text": row["text"], "n_words": len(row["text"].split())}
    assert card["documents"] == {name: len(rows[name]) for name in SPLITS}
    assert card["words"] == {name: sum(row["n_words"] for row in rows[name]) for name in SPLITS}
    origins = {name: {row["origin"] for row in rows[name]} for name in SPLITS}
    assert card["origins"] == {name: len(origins[name]) for name in ("dev", "test")}
    assert not origins["dev"] & origins["test"]
    assert not (origins["dev"] | origins["test"]) & origins["train"]
    assert card["duplicates"] == {"within": len(texts) - len(set(texts)), "across": len(set(texts)) - len(set(mine))}
    accounted = (card[key].values() for key in ("documents", "rejected", "duplicates"))
    assert sum(map(sum, accounted)) == len(texts)
    assert [*(tmp_path / "corpus" / "a").glob(".*")] == []


TEXT = [f"word {i} " + "more " * (i % 5) for i in range(40)]


def test_the_card_counts_what_is_left_out(tmp_path, caplog):
    _owners(tmp_path, a=TEXT)
    path = _clean(tmp_path, "a", [*TEXT, TEXT[0]], empty=2)
    rows, card = _split(tmp_path, "a", budget=Budget(train=20, dev=10, test=10))
    assert card["domain"] == "a"
    assert card["rejected"] == {"empty": 2, "near_duplicates": 0, "rest_of_held_out": 0} | {
        "beyond_budget": 40 - sum(card["documents"].values())
    }
    assert card["duplicates"] == {"within": 1, "across": 0}
    assert (card["replacements"], card["normalised"]) == (REPLACED, NORMALISED)
    for name, wanted in (("train", 20), ("dev", 10), ("test", 10)):
        assert wanted <= card["words"][name] < wanted + 7
        assert card["words"][name] - rows[name][-1]["n_words"] < wanted
    assert caplog.text == ""
    _split(tmp_path, "a", budget=Budget(train=10_000, dev=4, test=4))
    _split(tmp_path, "a", budget=Budget(train=None, dev=4000, test=400))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2, "budgets are beyond the text"
    counts = path.with_suffix(".json")
    write_json(counts, read_json(counts) | {"rejected": {"empty": 0, "not_utf8": 4}, "normalised": {}})
    _split(tmp_path, "a")
    (line,) = left_out([tmp_path / "corpus" / "a" / "card.json"])
    assert line.startswith("a: ")
    assert "4" in line
    _clean(tmp_path, "a", ["a b"])
    _owners(tmp_path, a=["a b"])
    with refused("a.words"):
        _split(tmp_path, "a", budget=Budget(train=None, dev=1, test=1))


def test_a_missing_or_damaged_file_is_named(tmp_path):
    _owners(tmp_path, a=TEXT)
    with refused("gone.parquet"):
        mark_duplicates({"a": [tmp_path / "gone.parquet"]}, tmp_path / "o.parquet")
    path = tmp_path / "clean" / "a.parquet"
    path.write_bytes(path.read_bytes()[:-50])
    with refused("a.parquet"):
        _split(tmp_path, "a")
    assert not (tmp_path / "o.parquet").exists()
    assert not (tmp_path / "corpus" / "a" / "card.json").exists()


def _grams(text):
    words = text.split()
    return {tuple(words[start : start + 13]) for start in range(len(words) - 12)}


LONG = st.lists(
    st.lists(st.sampled_from(["a", "\u00a0", "bcdefghij", "é" * 40, "a\u2003b"]), max_size=40).map(" ".join)
)


@MANY
@given(LONG)
@example([" ".join([word] * 13) for word in ("é" * 40, "é" * 20 + "b" * 40)])
def test_grams_are_those_of_the_words(texts):
    numbers = {}
    for hashes, number in grams_of(pa.array(texts, pa.large_string())):
        for value, text in zip(hashes.tolist(), number.tolist(), strict=True):
            numbers.setdefault(text, set()).add(value)
    expected = [_grams(text) for text in texts]
    assert [len(numbers.get(text, ())) for text in range(len(texts))] == [len(grams) for grams in expected]
    for one in range(len(texts)):
        for other in range(one):
            shared = len(numbers.get(one, set()) & numbers.get(other, set()))
            assert shared == len(expected[one] & expected[other])


def test_the_share_of_held_out_grams_in_train(tmp_path):
    common = " ".join(f"c{i}" for i in range(30))
    texts = [f"{common} " + " ".join(f"w{i}x{j}" for j in range(100)) for i in range(30)]
    _owners(tmp_path, a=texts)
    budget = Budget(train=None, dev=300, test=300)
    rows, card = _split(tmp_path, "a", budget=budget)
    train = set().union(*(_grams(row["text"]) for row in rows["train"]))
    for name in ("dev", "test"):
        held = set().union(*(_grams(row["text"]) for row in rows[name]))
        assert card["leakage"]["ngrams"][name] == round(len(held & train) / len(held), 6) > 0
    assert card["leakage"]["ngrams"]["length"] == 13


def test_near_duplicates_stay_out_of_train(tmp_path):
    """Pairs of texts that share most of their 13-grams: no partner of a held-out text is left in train."""
    body = [" ".join(f"w{i}x{j}" for j in range(100)) for i in range(40)]
    texts = [f"{text} {end}" for text in body for end in ("one", "other")]
    _owners(tmp_path, a=texts)
    budget = Budget(train=2500, dev=300, test=300)
    before, plain = _split(tmp_path, "a", budget=budget)
    rows, card = _split(tmp_path, "a", budget=budget, near_duplicates=0.5)
    assert (rows["dev"], rows["test"]) == (before["dev"], before["test"])
    held = {row["text"].split()[0] for name in ("dev", "test") for row in rows[name]}
    assert not held & {row["text"].split()[0] for row in rows["train"]}
    dropped = [row for row in before["train"] if row["text"].split()[0] in held]
    assert plain["rejected"]["near_duplicates"] == 0
    assert card["rejected"]["near_duplicates"] >= len(dropped) > 0
    assert card["words"]["train"] >= 2500
    assert sum(card["documents"].values()) + sum(card["rejected"].values()) == len(texts)
    assert card["leakage"]["ngrams"]["dev"] == card["leakage"]["ngrams"]["test"] == 0


def test_parts_make_no_difference(tmp_path):
    _owners(tmp_path, a=[*TEXT, TEXT[3]], b=TEXT[::2])
    whole = _split(tmp_path, "a")
    owners = (tmp_path / "owners.parquet").read_bytes()
    parts = [_clean(tmp_path, f"a{number}", some) for number, some in enumerate((TEXT[:7], [], [*TEXT[7:], TEXT[3]]))]
    mark_duplicates({"b": [tmp_path / "clean" / "b.parquet"], "a": parts[::-1]}, tmp_path / "owners.parquet")
    assert (tmp_path / "owners.parquet").read_bytes() == owners
    rows, card = _split(tmp_path, "a", documents=parts)
    assert rows == whole[0]
    assert card == {**whole[1], "replacements": {"EMAIL": 9}, "normalised": {"nul": 3}}


ASKED = st.lists(st.sampled_from(["a", "naïve", "the", "of"]), max_size=18).map(" ".join)
# By task, the texts of each document.
TASKS = st.dictionaries(st.sampled_from(["one", "two"]), st.lists(st.lists(ASKED, min_size=1, max_size=2), min_size=1))


def _contaminated(folder, tasks, train):
    """The rows of a training text with these documents of tasks, each of several texts."""
    rows = [
        {"task": task, "version": "1", "document": number, "text": text, "n_words": len(text.split())}
        | {"task_sha256": ""}
        for task, documents in tasks.items()
        for number, texts in enumerate(documents)
        for text in texts
    ]
    write_parquet(pa.Table.from_pylist(rows, DOCUMENTS), folder / "documents.parquet")
    text = pa.table({"text": pa.array(train, pa.large_string())})
    (folder / "law").mkdir(exist_ok=True)
    write_parquet(text, folder / "law" / "train.parquet")
    contamination(folder / "documents.parquet", folder / "law" / "train.parquet", folder / "found.parquet")
    return pd.read_parquet(folder / "found.parquet")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(tasks=TASKS, train=st.lists(ASKED, max_size=4))
def test_contamination_is_counted_as_by_sets(tmp_path, tasks, train):
    found = _contaminated(tmp_path, tasks, train)
    known = set().union(*map(_grams, train))
    assert list(found["task"]) == list(tasks)
    for row in found.itertuples():
        documents = [set().union(*map(_grams, texts)) for texts in tasks[row.task]]
        distinct = set().union(*documents)
        assert (row.domain, row.documents) == ("law", len(documents))
        assert row.long_documents == sum(map(bool, documents))
        assert row.found_documents == sum(bool(one & known) for one in documents)
        assert (row.ngrams, row.found_ngrams) == (len(distinct), len(distinct & known))
