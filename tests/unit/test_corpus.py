import hashlib
import json
import logging
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from demix.data import corpus
from demix.data.anonymize import SCHEMA
from demix.data.corpus import SPLITS, Budget, mark_duplicates, split
from demix.errors import DemixError

REPLACED = {"EMAIL": 3}
NORMALISED = {"nul": 1}


def _id(text):
    return hashlib.sha256(text.encode()).hexdigest()


def _clean(folder, domain, texts, empty=0):
    """What anonymize_documents writes for `texts`, with `empty` more documents rejected."""
    path = folder / "clean" / f"{domain}.parquet"
    path.parent.mkdir(exist_ok=True)
    columns = [[_id(text) for text in texts], texts, [len(text.split()) for text in texts], ["{}"] * len(texts)]
    pq.write_table(pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA), path)
    counts = {"documents": len(texts) + empty, "rejected": {"empty": empty}, "replacements": REPLACED}
    path.with_suffix(".json").write_text(json.dumps({**counts, "normalised": NORMALISED}))
    return path


def _split(folder, domain, training=True, budget=None, seed=1):
    output = folder / "corpus" / domain
    clean = folder / "clean" / f"{domain}.parquet"
    split(
        domain,
        clean,
        clean.with_suffix(".json"),
        folder / "owners.parquet",
        training,
        budget or Budget(None, 4, 4),
        seed,
        {name: output / f"{name}.parquet" for name in SPLITS},
        output / "card.json",
    )
    rows = {name: pq.read_table(output / f"{name}.parquet").to_pylist() for name in SPLITS}
    return rows, json.loads((output / "card.json").read_text())


def _owners(folder, **texts):
    for domain, some in texts.items():
        _clean(folder, domain, some)
    mark_duplicates({domain: folder / "clean" / f"{domain}.parquet" for domain in texts}, folder / "owners.parquet")
    return {row["id"]: row["domain"] for row in pq.read_table(folder / "owners.parquet").to_pylist()}


WORD = st.sampled_from("abcdefgh")
TEXTS = st.lists(st.lists(WORD, min_size=1, max_size=3).map(" ".join), max_size=25)
MANY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


@MANY
@given(TEXTS, TEXTS, TEXTS, st.sampled_from([1, 7, 4_000_000]))
def test_each_text_has_one_owner_that_holds_it(tmp_path, a, b, c, part_documents):
    held = {"a": a, "b": b, "c": c}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PART_DOCUMENTS", part_documents)
        owners = _owners(tmp_path, **held)
    expected = {}
    for text in {*a, *b, *c}:
        holders = [domain for domain in held if text in held[domain]]
        expected[_id(text)] = min(holders, key=lambda domain: hashlib.sha256(f"{domain}|{_id(text)}".encode()).digest())
    assert owners == expected
    assert list(owners) == sorted(owners)
    turned = _owners(tmp_path, c=c[::-1], b=b[::-1], a=a[::-1])
    assert turned == owners


def _expected(texts, budget, seed):
    """The splits as a plain loop fills them."""
    order = sorted(dict.fromkeys(texts), key=lambda text: hashlib.sha256(f"{seed}|{_id(text)}".encode()).digest())
    splits = {}
    for name in ("dev", "test", "train"):
        wanted = getattr(budget, name)
        taken = []
        while order and (wanted is None or sum(len(text.split()) for text in taken) < wanted):
            taken.append(order.pop(0))
        if wanted is not None and name != "train" and sum(len(text.split()) for text in taken) < wanted:
            return None
        splits[name] = taken
    return splits if splits["train"] or budget.train == 0 else None


@MANY
@given(
    TEXTS,
    TEXTS,
    st.booleans(),
    st.builds(Budget, st.none() | st.integers(0, 12), st.integers(0, 9), st.integers(0, 9)),
    st.integers(0, 3),
    st.sampled_from([1, 12, 64 << 20]),
)
def test_splits_follow_the_hash_order_and_lose_nothing(tmp_path, texts, others, training, budget, seed, part_bytes):
    owners = _owners(tmp_path, a=texts, b=others) if training else _owners(tmp_path, b=others)
    if not training:
        _clean(tmp_path, "a", texts)
    mine = [text for text in texts if (owners[_id(text)] == "a" if training else _id(text) not in owners)]
    expected = _expected(mine, budget, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PART_BYTES", part_bytes)
        if expected is None:
            with pytest.raises(DemixError, match=r"^a\.words: "):
                _split(tmp_path, "a", training, budget, seed)
            return
        rows, card = _split(tmp_path, "a", training, budget, seed)
    assert {name: [row["text"] for row in rows[name]] for name in SPLITS} == expected
    for row in chain.from_iterable(rows.values()):
        assert row == {"id": _id(row["text"]), "text": row["text"], "n_words": len(row["text"].split())}
    assert card["documents"] == {name: len(rows[name]) for name in SPLITS}
    assert card["words"] == {name: sum(row["n_words"] for row in rows[name]) for name in SPLITS}
    assert card["duplicates"] == {"within": len(texts) - len(set(texts)), "across": len(set(texts)) - len(set(mine))}
    accounted = (card[key].values() for key in ("documents", "rejected", "duplicates"))
    assert sum(map(sum, accounted)) == len(texts)
    assert [*(tmp_path / "corpus" / "a").glob(".*")] == []


TEXT = [f"word {i} " + "more " * (i % 5) for i in range(40)]


def test_the_card(tmp_path):
    _owners(tmp_path, a=TEXT)
    _clean(tmp_path, "a", [*TEXT, TEXT[0]], empty=2)
    rows, card = _split(tmp_path, "a", budget=Budget(20, 10, 10))
    assert card["domain"] == "a"
    assert card["rejected"] == {"empty": 2, "beyond_budget": 40 - sum(card["documents"].values())}
    assert card["duplicates"] == {"within": 1, "across": 0}
    assert (card["replacements"], card["normalised"]) == (REPLACED, NORMALISED)
    for name, wanted in (("train", 20), ("dev", 10), ("test", 10)):
        assert wanted <= card["words"][name] < wanted + 7
        assert card["words"][name] - rows[name][-1]["n_words"] < wanted


def test_the_order_of_documents_does_not_matter(tmp_path):
    _owners(tmp_path, a=TEXT)
    _split(tmp_path, "a")
    before = {name: (tmp_path / "corpus" / "a" / f"{name}.parquet").read_bytes() for name in SPLITS}
    _clean(tmp_path, "a", TEXT[::-1])
    _split(tmp_path, "a")
    assert {name: (tmp_path / "corpus" / "a" / f"{name}.parquet").read_bytes() for name in SPLITS} == before
    rows, _ = _split(tmp_path, "a", seed=2)
    assert [row["text"] for row in rows["dev"]] != [row["text"] for row in _split(tmp_path, "a")[0]["dev"]]


def test_a_short_train_split_is_told(tmp_path, caplog):
    _owners(tmp_path, a=TEXT)
    with caplog.at_level(logging.WARNING):
        _, card = _split(tmp_path, "a", budget=Budget(10_000, 4, 4))
    assert f"a: train has {card['words']['train']} of the 10000 words of its budget" in caplog.text
    caplog.clear()
    _split(tmp_path, "a", budget=Budget(20, 4, 4))
    assert caplog.text == ""


def test_a_missing_or_damaged_file_is_named(tmp_path):
    _owners(tmp_path, a=TEXT)
    with pytest.raises(DemixError, match=r"gone\.parquet: is missing"):
        mark_duplicates({"a": tmp_path / "gone.parquet"}, tmp_path / "o.parquet")
    path = tmp_path / "clean" / "a.parquet"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DemixError, match=r"a\.parquet: is damaged"):
        _split(tmp_path, "a")
    assert not (tmp_path / "o.parquet").exists()
    assert not (tmp_path / "corpus" / "a" / "card.json").exists()
