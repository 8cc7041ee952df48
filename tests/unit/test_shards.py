"""Token shards: their files, reads and blocks; and shards of documents of others."""

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from demix.data import shards
from demix.data.shards import TokenShard, blocks, join_documents, tokenize
from demix.data.tokenizer import Tokenizer, train_tokenizer
from demix.files import digest, read_json, write_json
from demix.files.batches import BATCH_ROWS
from support.errors import refused
from support.shards import bytes_tokenizer, shard_of, write_shard

TEXTS = ["one two", "", "<|endoftext|> is text", "漢字 and\nmore"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return bytes_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def _tokenized(folder, tokenizer, texts=TEXTS):
    write_shard(tokenizer, folder / "dev.arrow", texts)
    return folder / "dev.arrow"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=15)
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=40), max_size=12))
def test_a_shard_holds_every_document(tmp_path, tokenizer, texts):
    encoder = Tokenizer.load(tokenizer)
    shard = TokenShard.open(_tokenized(tmp_path, tokenizer, texts), verify=True)
    assert (shard.end_of_text, shard.vocab_size, shard.tokenizer_sha256) == (256, 257, encoder.sha256)
    tokens = shard.read(0, len(shard))
    edges = [*shard.offsets.tolist(), len(tokens)]
    assert len(edges) == len(texts) + 1
    assert edges[0] == 0
    for text, start, end in zip(texts, edges, edges[1:], strict=False):
        assert tokens[start] == 256
        assert encoder.decode(tokens[start + 1 : end]) == text
    assert shard.document_bytes.tolist() == [len(text.encode()) for text in texts]


@settings(deadline=None)
@given(st.integers(0, 70), st.integers(1, 20), st.none() | st.integers(0, 80), st.integers(0, 4))
def test_blocks_are_those_of_a_plain_loop(tokens, length, limit, first):
    ids = [*range(tokens)]
    wanted = ids[:limit]
    start = min(first, max(0, len(wanted) - 1) // length) * length
    inputs, targets, mask = blocks(shard_of(np.array(ids, np.uint16)), length, limit, start)
    assert inputs.dtype == targets.dtype == np.int64
    assert mask.dtype == np.bool_
    assert inputs.shape == targets.shape == mask.shape == (-(-(len(wanted) - start) // length), length)
    for number, at in enumerate(range(start, len(wanted), length)):
        block = wanted[at : at + length]
        assert targets[number].tolist() == block + [99] * (length - len(block))
        assert inputs[number].tolist() == ([99, *wanted][at : at + length] + [99] * length)[:length]
        assert mask[number].tolist() == [place < len(block) for place in range(length)]


def test_files(tmp_path, tokenizer):
    path = _tokenized(tmp_path, tokenizer)
    columns = {}
    for name, part in (("dev.arrow", b"tokens"), ("dev.documents.arrow", b"documents")):
        reader = pa.ipc.open_file(pa.memory_map(str(tmp_path / name)))
        assert reader.num_record_batches == 1
        batch = reader.get_batch(0)
        columns |= zip(batch.schema.names, batch.columns, strict=True)
        assert reader.schema.metadata == {
            b"sha256": read_json(tmp_path / "dev.json")["sha256"].encode(),
            b"tokenizer_sha256": digest(read_json(tokenizer)).encode(),
            b"vocab_size": b"257",
            b"documents": b"4",
            b"part": part,
        }
    assert columns["token"].type == pa.uint16()
    assert {columns[name].type for name in ("offset", "bytes", "origin")} == {pa.int64()}
    assert read_json(tmp_path / "dev.json") == {
        "tokens": len(columns["token"]),
        "documents": 4,
        "bytes": sum(len(text.encode()) for text in TEXTS),
        "sha256": hashlib.sha256(columns["token"].to_numpy().tobytes()).hexdigest(),
        "tokens_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "documents_sha256": hashlib.sha256((tmp_path / "dev.documents.arrow").read_bytes()).hexdigest(),
        "tokenizer_sha256": digest(read_json(tokenizer)),
        "vocab_size": 257,
        "end_of_text": 256,
    }
    assert {file.name for file in tmp_path.iterdir()} == {path.name, "dev.documents.arrow", "dev.json", "dev.parquet"}


def test_a_shard_that_cannot_be_written_has_no_manifest(tmp_path, tokenizer):
    (tmp_path / "dev.documents.arrow").mkdir()
    with refused("dev.documents.arrow"):
        _tokenized(tmp_path, tokenizer)
    assert not (tmp_path / "dev.json").exists()


def test_pieces_of_one_document_have_one_number(tmp_path, tokenizer):
    digests = [hashlib.sha256(name.encode()).hexdigest() for name in "abd"]
    origins = [digests[number] for number in (2, 0, 2, 1, 0)]
    pq.write_table(
        pa.table({"origin": origins, "text": pa.array(["x y"] * 5, pa.large_string())}), tmp_path / "a.parquet"
    )
    tokenize(tokenizer, tmp_path / "a.parquet", tmp_path / "a.arrow")
    found = TokenShard.open(tmp_path / "a.arrow", verify=True).origins.tolist()
    assert found == [int(origin[:16], 16) & (1 << 63) - 1 for origin in origins]
    assert len({*found}) == 3
    assert TokenShard.open(_tokenized(tmp_path, tokenizer)).origins.tolist() == [0, 1, 2, 3], (
        "its own where none is told"
    )


@given(st.data(), st.integers(0, 60), st.sampled_from([np.uint16, np.uint32]))
def test_reads_are_views(data, size, kind):
    flat = np.arange(size, dtype=kind)
    shard = shard_of(flat)
    assert len(shard) == size
    edges = st.integers(0, size)
    for start, stop in [(0, size), *(sorted(data.draw(st.tuples(edges, edges))) for _ in range(8))]:
        found = shard.read(start, stop)
        assert found.dtype == kind
        assert np.array_equal(found, flat[start:stop])
        assert np.shares_memory(found, flat) == (start < stop)
    for start, stop in ((-1, 0), (0, size + 1), (1, 0)):
        with pytest.raises(IndexError):
            shard.read(start, stop)


def test_tokens_are_mapped_and_read_only(tmp_path, tokenizer):
    path = _tokenized(tmp_path, tokenizer, ["word " * 100_000])
    before = pa.total_allocated_bytes()
    shard = TokenShard.open(path)
    assert pa.total_allocated_bytes() - before < 100_000
    tokens = shard.read(0, len(shard))
    assert tokens.dtype == np.uint16
    assert not tokens.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_a_renewed_encoder_gives_the_same_ids(tmp_path, tokenizer, monkeypatch):
    texts = [f"{number} ünd 漢字" for number in range(2 * BATCH_ROWS + 1)]
    before = _tokenized(tmp_path, tokenizer, texts).read_bytes()
    renewed = []
    monkeypatch.setattr(shards, "RENEW_EVERY", 1)
    monkeypatch.setattr(Tokenizer, "renewed", lambda self, real=Tokenizer.renewed: renewed.append(1) or real(self))
    assert _tokenized(tmp_path, tokenizer, texts).read_bytes() == before
    assert len(renewed) == 3
    shard = TokenShard.open(tmp_path / "dev.arrow")
    assert np.array_equal(shard.offsets, np.flatnonzero(shard.read(0, len(shard)) == 256))


@pytest.mark.parametrize(("types", "kind"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_a_large_vocabulary_takes_four_bytes(tmp_path, types, kind):
    many_ids = bytes_tokenizer(tmp_path / "tokenizer.json", pairs=types - 257)
    shard = TokenShard.open(_tokenized(tmp_path, many_ids, ["ÿÿ"]))
    tokens = shard.read(0, len(shard))
    assert (shard.vocab_size, tokens.dtype, tokens[0]) == (types, kind, types - 1)
    assert Tokenizer.load(many_ids).decode(tokens[1:]) == "ÿÿ"


@pytest.mark.parametrize("name", ["dev.arrow", "dev.documents.arrow"])
def test_damage_is_found(tmp_path, tokenizer, name):
    path = _tokenized(tmp_path, tokenizer, TEXTS * 100)
    damaged = tmp_path / name
    data = damaged.read_bytes()
    pa.ipc.new_file(str(damaged), pa.ipc.open_file(data).schema).close()
    with refused(name):
        TokenShard.open(path)
    for size in (0, 7, 100, len(data) // 2, len(data) - 1):
        damaged.write_bytes(data[:size])
        with refused(name):
            TokenShard.open(path)
    middle = len(data) // 2
    damaged.write_bytes(data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :])
    TokenShard.open(path)
    with refused(name):
        TokenShard.open(path, verify=True)
    damaged.unlink()
    with refused(name):
        TokenShard.open(path)


@pytest.mark.parametrize("name", ["dev.arrow", "dev.documents.arrow"])
def test_files_of_different_runs_are_not_mixed(tmp_path, tokenizer, name):
    # Of one length each: their rows do not tell them apart.
    path = _tokenized(tmp_path, tokenizer, ["one two"] * 6)
    other = (tmp_path / name).read_bytes()
    _tokenized(tmp_path, tokenizer, ["one six"] * 6)
    mine = (tmp_path / name).read_bytes()
    assert len(other) == len(mine)
    (tmp_path / name).write_bytes(other)
    with refused(name):
        TokenShard.open(path)
    (tmp_path / name).write_bytes(mine)
    # Of as many tokens as documents, the files may not change places.
    _tokenized(tmp_path, tokenizer, [""] * 6)
    path.write_bytes((tmp_path / "dev.documents.arrow").read_bytes())
    with refused("dev.arrow"):
        TokenShard.open(path)


def test_a_manifest_must_be_whole(tmp_path, tokenizer):
    path = _tokenized(tmp_path, tokenizer, ["one two"] * 6)
    manifest = tmp_path / "dev.json"
    whole = read_json(manifest)
    for key in ("tokens", "documents", "tokens_sha256", "vocab_size"):
        write_json(manifest, {other: value for other, value in whole.items() if other != key})
        with refused("dev.json"):
            TokenShard.open(path)
    write_json(manifest, whole | {"tokens": "many"})
    with refused("dev.json"):
        TokenShard.open(path)
    # A file of more rows than the manifest says.
    write_json(manifest, whole | {"tokens": 7})
    with refused("dev.arrow"):
        TokenShard.open(path)
    manifest.unlink()
    with refused("dev.json"):
        TokenShard.open(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(st.data())
def test_joined_documents_are_those_of_their_shards_in_order(tmp_path, tokenizer, data):
    some = [["one two", "", "three"], ["a b c", "h"], ["x " * 9, "y"]]
    paths = [tmp_path / name / "train.arrow" for name in "abc"]
    sources = [write_shard(tokenizer, path, texts) for path, texts in zip(paths, some, strict=True)]
    chosen = [np.array(sorted(data.draw(st.sets(st.integers(0, len(texts) - 1)))), np.int64) for texts in some]
    (tmp_path / "c00").mkdir(exist_ok=True)
    output = tmp_path / "c00" / "train.arrow"
    join_documents(paths, chosen, output)

    texts = [each[number] for each, numbers in zip(some, chosen, strict=True) for number in numbers]
    shard, expected = (
        TokenShard.open(output, verify=True),
        write_shard(tokenizer, tmp_path / "d" / "train.arrow", texts),
    )
    assert shard.tokens.dtype == np.uint16
    assert np.array_equal(shard.tokens, expected.tokens)
    assert np.array_equal(shard.offsets, expected.offsets)
    assert np.array_equal(shard.document_bytes, expected.document_bytes)
    own = [source.origins[numbers] for source, numbers in zip(sources, chosen, strict=True)]
    assert np.array_equal(shard.origins, np.concatenate(own))
    assert (shard.end_of_text, shard.vocab_size) == (256, 257)
    assert shard.tokenizer_sha256 == sources[0].tokenizer_sha256
    said, wanted = (read_json(path.with_suffix(".json")) for path in (output, expected.path))
    assert {key: said[key] for key in ("tokens", "documents", "bytes", "sha256")} == {
        key: wanted[key] for key in ("tokens", "documents", "bytes", "sha256")
    }


def test_documents_of_different_tokenizers_are_not_joined(tmp_path, tokenizer):
    paths = [tmp_path / name / "train.arrow" for name in "ab"]
    write_shard(tokenizer, paths[0], ["one two " * 9])
    train_tokenizer([paths[0].with_suffix(".parquet")], 260, tmp_path / "tokenizer.json")
    write_shard(tmp_path / "tokenizer.json", paths[1], ["text"])
    with refused("b/train.arrow"):
        join_documents(paths, [np.array([0])] * 2, tmp_path / "c00.arrow")
    assert not (tmp_path / "c00.arrow").exists()
