"""Bigrams that domains share, against a count pair by pair."""

from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest

from demix.data import overlap as module
from demix.data.overlap import overlap
from demix.data.shards import TokenShard, tokenize
from demix.data.tokenizer import train_tokenizer
from demix.files import read_parquet, write_parquet
from support.errors import refused
from support.tokens import TRAINING


def shard(folder: Path, tokenizer: Path, domain: str, split: str, *texts: str) -> Path:
    documents = folder / f"{domain}.{split}.parquet"
    write_parquet(pa.table({"text": list(texts)}), documents)
    path = folder / domain / f"{split}.arrow"
    tokenize(tokenizer, documents, path)
    return path


def rows(path: Path) -> dict[tuple[str, str], float | None]:
    return {(row["domain"], row["expert"]): row["overlap"] for row in read_parquet(path).to_pylist()}


def test_occurrences_are_counted_of_the_test_split(tokens, tmp_path, monkeypatch):
    places = [tokens / "tokens" / domain / f"{split}.arrow" for domain in TRAINING for split in ("train", "test")]
    overlap(places, tmp_path / "overlap.parquet")
    found = rows(tmp_path / "overlap.parquet")
    assert len(found) == len(TRAINING) ** 2
    limit = min(len(TokenShard.open(tokens / "tokens" / domain / "train.arrow")) for domain in TRAINING)
    for domain, expert in found:
        read = [
            TokenShard.open(tokens / "tokens" / place) for place in (f"{domain}/test.arrow", f"{expert}/train.arrow")
        ]
        test, train = ([int(i) for i in one.read(0, min(limit, len(one)))] for one in read)
        end = read[0].end_of_text
        pairs = {pair for pair in pairwise(train) if end not in pair}
        wanted = [pair in pairs for pair in pairwise(test) if end not in pair]
        assert found[domain, expert] == pytest.approx(sum(wanted) / len(wanted))
    # Samples have one size.
    monkeypatch.setattr(module, "TRAIN_TOKENS", 200)
    overlap(places, tmp_path / "few.parquet")
    assert set(read_parquet(tmp_path / "few.parquet")["train_tokens"].to_pylist()) == {200}


def test_what_cannot_be_counted_is_null_or_refused(tokens, tmp_path):
    tokenizer = tokens / "tokenizer.json"
    train = shard(tmp_path, tokenizer, "a", "train", "the sea")
    short = shard(tmp_path, tokenizer, "b", "test", "a")
    overlap([train, short], tmp_path / "overlap.parquet")
    assert rows(tmp_path / "overlap.parquet") == {("b", "a"): None}
    other = tmp_path / "tokenizer.json"
    train_tokenizer([tmp_path / "a.train.parquet"], 258, other)
    with refused("a/test.arrow"):
        overlap([train, shard(tmp_path, other, "a", "test", "the sea")], tmp_path / "overlap.parquet")
