import hashlib
import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from demix.data import shards
from demix.data.shards import TokenShard, blocks, tokenize
from demix.data.tokenizer import Tokenizer, gpt2_tokenizer, train_tokenizer
from demix.errors import DemixError

TEXTS = ["one two", "", "<|endoftext|> is text", "漢字 and\nmore"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    gpt2_tokenizer(path)
    return path


def _documents(path, texts):
    pq.write_table(pa.table({"text": pa.array(texts, pa.large_string())}), path)
    return path


def _tokenized(folder, tokenizer, texts=TEXTS):
    _documents(folder / "dev.parquet", texts)
    tokenize(tokenizer, folder / "dev.parquet", folder / "dev.arrow")
    return folder / "dev.arrow"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=15)
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=40), max_size=12))
def test_a_shard_holds_every_document(tmp_path, tokenizer, texts):
    encoder = Tokenizer.load(tokenizer)
    shard = TokenShard.open(_tokenized(tmp_path, tokenizer, texts), verify=True)
    assert (shard.end_of_text, shard.vocab_size, shard.tokenizer_sha256) == (50256, 50257, encoder.sha256)
    edges = [*shard.offsets.tolist(), len(shard.tokens)]
    assert len(edges) == len(texts) + 1
    assert edges[0] == 0
    for text, start, end in zip(texts, edges, edges[1:], strict=False):
        assert shard.tokens[start] == 50256
        assert encoder.decode(shard.tokens[start + 1 : end]) == text
    assert np.count_nonzero(shard.tokens == 50256) == len(texts)
    assert shard.document_bytes.tolist() == [len(text.encode()) for text in texts]


def test_files(tmp_path, tokenizer):
    path = _tokenized(tmp_path, tokenizer)
    manifest = json.loads((tmp_path / "dev.json").read_text())
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    assert reader.num_record_batches == 1
    assert reader.schema.field("token").type == pa.uint16()
    assert reader.schema.metadata == {
        b"tokenizer_sha256": hashlib.sha256(tokenizer.read_bytes()).hexdigest().encode(),
        b"vocab_size": b"50257",
        b"documents": b"4",
    }
    assert manifest == {
        "tokens": reader.get_batch(0).num_rows,
        "documents": 4,
        "bytes": sum(len(text.encode()) for text in TEXTS),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "documents_sha256": hashlib.sha256((tmp_path / "dev.documents.arrow").read_bytes()).hexdigest(),
        "tokenizer_sha256": hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
        "vocab_size": 50257,
    }
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "dev.arrow", "dev.documents.arrow", "dev.json", "dev.parquet",
    ]  # fmt: skip
    before = path.read_bytes()
    _tokenized(tmp_path, tokenizer)
    assert path.read_bytes() == before


def test_tokens_are_mapped_and_read_only(tmp_path, tokenizer):
    path = _tokenized(tmp_path, tokenizer, ["word " * 300_000])
    before = pa.total_allocated_bytes()
    shard = TokenShard.open(path)
    assert pa.total_allocated_bytes() - before < 100_000
    assert shard.tokens.dtype == np.uint16
    assert not shard.tokens.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        shard.tokens[0] = 1


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    words = [f"{i:05x}" for i in range(70_000)]
    pq.write_table(
        pa.table({"text": ["".join(chr(0x4E00 + int(d, 16)) for d in w) for w in words] * 2}), tmp_path / "t.parquet"
    )
    train_tokenizer([tmp_path / "t.parquet"], 66_000, tmp_path / "t.json")
    shard = TokenShard.open(_tokenized(tmp_path, tmp_path / "t.json"))
    assert shard.vocab_size == 66_000
    assert shard.tokens.dtype == np.uint32
    assert shard.tokens[0] == 65_999


@pytest.mark.parametrize("name", ["dev.arrow", "dev.documents.arrow"])
def test_damage_is_found(tmp_path, tokenizer, name):
    path = _tokenized(tmp_path, tokenizer, TEXTS * 100)
    damaged = tmp_path / name
    data = damaged.read_bytes()
    for size in (0, 7, 100, len(data) // 2, len(data) - 1):
        damaged.write_bytes(data[:size])
        with pytest.raises(DemixError, match=f"{name}: is damaged or cut short"):
            TokenShard.open(path)
    middle = len(data) // 2
    damaged.write_bytes(data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :])
    TokenShard.open(path)
    with pytest.raises(DemixError, match=f"{name}: is damaged: its sha256"):
        TokenShard.open(path, verify=True)
    damaged.unlink()
    with pytest.raises(DemixError, match=f"{name}: is missing"):
        TokenShard.open(path)


def test_files_of_different_runs_are_not_mixed(tmp_path, tokenizer):
    path = _tokenized(tmp_path, tokenizer)
    other = path.read_bytes()
    _tokenized(tmp_path, tokenizer, ["something else, and longer than before, by a few words at least"])
    path.write_bytes(other)
    with pytest.raises(DemixError, match=r"dev\.arrow: does not hold the \d+ rows of dev\.json"):
        TokenShard.open(path)
    (tmp_path / "dev.json").unlink()
    with pytest.raises(DemixError, match=r"dev\.json: is missing"):
        TokenShard.open(path)


@given(st.lists(st.integers(0, 98), max_size=70), st.integers(1, 20), st.none() | st.integers(0, 80))
def test_blocks_score_each_token_once(tokens, length, limit):
    inputs, targets, mask = blocks(np.array(tokens, np.uint16), length, 99, limit)
    tokens = tokens[:limit]
    rows = []
    for start in range(0, len(tokens), length):
        own = tokens[start : start + length]
        before = tokens[start - 1] if start else 99
        padding = length - len(own)
        seen = [before, *own][:length]
        rows.append((seen + [99] * (length - len(seen)), own + [99] * padding, [True] * len(own) + [False] * padding))
    expected = [np.array([row[i] for row in rows]).reshape(-1, length) for i in range(3)]
    assert inputs.dtype == targets.dtype == np.int64
    assert mask.dtype == np.bool_
    for found, wanted in zip((inputs, targets, mask), expected, strict=True):
        assert np.array_equal(found, wanted)
    assert targets[mask].tolist() == tokens


def test_ids_that_differ_from_tiktoken_are_encoded_by_it(tmp_path, tokenizer, caplog):
    encoder = Tokenizer.load(tokenizer)
    # A gigatoken of another vocabulary stands for one that knows other characters.
    train_tokenizer([_documents(tmp_path / "t.parquet", ["some other text " * 9])], 260, tmp_path / "other.json")
    wrong = replace(encoder, fast=Tokenizer.load(tmp_path / "other.json").fast)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "load", staticmethod(lambda path: wrong))
        path = _tokenized(tmp_path, tokenizer)
    assert "gigatoken's ids differ from tiktoken's in document 1; encoding with tiktoken" in caplog.text
    shard = TokenShard.open(path, verify=True)
    edges = [*shard.offsets.tolist(), len(shard.tokens)]
    assert [encoder.decode(shard.tokens[a + 1 : b]) for a, b in pairwise(edges)] == TEXTS


def test_a_shard_has_a_largest_size(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(shards, "MOST_TOKENS", 20)
    with pytest.raises(DemixError, match=r"dev\.parquet: holds more than the 20 tokens of a shard; lower the words"):
        _tokenized(tmp_path, tokenizer, ["one two three"] * 9)
    assert [file.name for file in tmp_path.iterdir()] == ["dev.parquet"]
