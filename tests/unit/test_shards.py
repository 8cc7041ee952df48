import hashlib
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from demix.data import shards
from demix.data.shards import TokenShard, blocks, tokenize
from demix.data.tokenizer import Tokenizer
from demix.files import digest, read_json, write_json
from demix.files.batches import BATCH_ROWS
from support.errors import refused
from support.shards import bytes_tokenizer, shard_of, write_shard

TEXTS = ["one two", "", "<|endoftext|> is text", "漢字 and\nmore"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return bytes_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def _tokenized(folder, tokenizer, texts=TEXTS, **options):
    write_shard(tokenizer, folder / "dev.arrow", texts, **options)
    return folder / "dev.arrow"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=15)
@given(
    st.lists(st.text(st.characters(codec="utf-8"), max_size=40), max_size=12), st.sampled_from([1, 7, 24, 25, 10**6])
)
def test_a_shard_holds_every_document_in_any_number_of_files(tmp_path, tokenizer, texts, file_tokens):
    encoder = Tokenizer.load(tokenizer)
    shard = TokenShard.open(_tokenized(tmp_path, tokenizer, texts, file_tokens=file_tokens), verify=True)
    assert {len(file) for file in shard.files[:-1]} <= {file_tokens}
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
@given(st.integers(0, 70), st.integers(1, 20), st.none() | st.integers(0, 80), st.integers(0, 4), st.integers(1, 80))
def test_blocks_are_those_of_a_plain_loop(tokens, length, limit, first, file_tokens):
    ids = [*range(tokens)]
    wanted = ids[:limit]
    start = min(first, max(0, len(wanted) - 1) // length) * length
    inputs, targets, mask = blocks(shard_of(np.array(ids, np.uint16), file_tokens), length, limit, start)
    assert inputs.dtype == targets.dtype == np.int64
    assert mask.dtype == np.bool_
    assert inputs.shape == targets.shape == mask.shape == (-(-(len(wanted) - start) // length), length)
    for number, at in enumerate(range(start, len(wanted), length)):
        block = wanted[at : at + length]
        assert targets[number].tolist() == block + [99] * (length - len(block))
        assert inputs[number].tolist() == ([99, *wanted][at : at + length] + [99] * length)[:length]
        assert mask[number].tolist() == [place < len(block) for place in range(length)]


def test_files(tmp_path, tokenizer):
    _tokenized(tmp_path, tokenizer, file_tokens=24)
    names = ["dev.arrow", "dev.1.arrow"]
    columns = []
    for number, name in enumerate(names):
        reader = pa.ipc.open_file(pa.memory_map(str(tmp_path / name)))
        assert reader.num_record_batches == 1
        assert reader.schema.field("token").type == pa.uint16()
        columns.append(reader.get_batch(0)["token"].to_numpy())
        assert reader.schema.metadata == {
            b"sha256": read_json(tmp_path / "dev.json")["sha256"].encode(),
            b"tokenizer_sha256": digest(read_json(tokenizer)).encode(),
            b"vocab_size": b"257",
            b"documents": b"4",
            b"part": str(number).encode(),
        }
    assert len(columns[0]) == 24
    assert read_json(tmp_path / "dev.json") == {
        "tokens": 24 + len(columns[1]),
        "documents": 4,
        "bytes": sum(len(text.encode()) for text in TEXTS),
        "sha256": hashlib.sha256(np.concatenate(columns).tobytes()).hexdigest(),
        "files": [
            {"name": name, "tokens": len(column), "sha256": hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()}
            for name, column in zip(names, columns, strict=True)
        ],
        "documents_sha256": hashlib.sha256((tmp_path / "dev.documents.arrow").read_bytes()).hexdigest(),
        "tokenizer_sha256": digest(read_json(tokenizer)),
        "vocab_size": 257,
    }
    assert {file.name for file in tmp_path.iterdir()} == {*names, "dev.documents.arrow", "dev.json", "dev.parquet"}
    assert 450e6 < shards.FILE_TOKENS < 500e6
    assert shards.FILE_TOKENS % (1 << 22) == 0, "no block whose length is a power of two up to that spans two files"


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


def test_files_of_an_earlier_longer_split_are_removed(tmp_path, tokenizer):
    _tokenized(tmp_path, tokenizer, ["seven b"] * 9, file_tokens=16)
    assert (tmp_path / "dev.4.arrow").exists()
    # As after a removal that was cut short.
    (tmp_path / "dev.2.arrow").unlink()
    others = {"dev.2.json", "dev.old.arrow", "test.2.arrow"}
    for name in others:
        (tmp_path / name).touch()
    shard = TokenShard.open(_tokenized(tmp_path, tokenizer, ["seven b"] * 3, file_tokens=16), verify=True)
    assert len(shard) == 24
    assert {file.name for file in tmp_path.iterdir()} == others | {
        "dev.arrow",
        "dev.1.arrow",
        "dev.documents.arrow",
        "dev.json",
        "dev.parquet",
    }


@given(st.data(), st.integers(0, 60), st.integers(1, 25), st.sampled_from([np.uint16, np.uint32]))
def test_reads_across_files_are_those_of_one_array(data, size, file_tokens, kind):
    flat = np.arange(size, dtype=kind)
    shard = shard_of(flat, file_tokens)
    assert len(shard) == size
    edges = st.integers(0, size) | st.sampled_from(range(0, size + 1, file_tokens))
    for start, stop in [(0, size), *(sorted(data.draw(st.tuples(edges, edges))) for _ in range(8))]:
        found = shard.read(start, stop)
        assert found.dtype == kind
        assert np.array_equal(found, flat[start:stop])
        # No copy is made inside a file.
        inside = start < stop and start // file_tokens == (stop - 1) // file_tokens
        assert np.shares_memory(found, flat) == inside
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


def test_opening_imports_no_pandas(tmp_path, tokenizer):
    path = _tokenized(tmp_path, tokenizer)
    code = "import sys; from demix.data.shards import TokenShard; TokenShard.open(sys.argv[1])"
    code += "; sys.exit('pandas' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_a_renewed_encoder_gives_the_same_ids(tmp_path, tokenizer, monkeypatch):
    texts = [f"{number} ünd 漢字" for number in range(2 * BATCH_ROWS + 1)]
    before = _tokenized(tmp_path, tokenizer, texts).read_bytes()
    renewed = []
    monkeypatch.setattr(shards, "RENEW_EVERY", 1)
    monkeypatch.setattr(shards, "_PIECE", 1000)
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


@pytest.mark.parametrize("name", ["dev.arrow", "dev.1.arrow", "dev.documents.arrow"])
def test_damage_is_found(tmp_path, tokenizer, name):
    path = _tokenized(tmp_path, tokenizer, TEXTS * 100, file_tokens=1000)
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


@pytest.mark.parametrize("name", ["dev.arrow", "dev.1.arrow", "dev.2.arrow", "dev.documents.arrow"])
def test_files_of_different_runs_are_not_mixed(tmp_path, tokenizer, name):
    # Of one length each: their rows do not tell them apart.
    path = _tokenized(tmp_path, tokenizer, ["one two"] * 6, file_tokens=16)
    other = (tmp_path / name).read_bytes()
    _tokenized(tmp_path, tokenizer, ["one six"] * 6, file_tokens=16)
    mine = (tmp_path / name).read_bytes()
    assert len(other) == len(mine)
    (tmp_path / name).write_bytes(other)
    with refused(name):
        TokenShard.open(path)
    (tmp_path / name).write_bytes(mine)
    (tmp_path / "dev.1.arrow").write_bytes(path.read_bytes())
    with refused("dev.1.arrow"):
        TokenShard.open(path)


def test_a_manifest_must_be_whole(tmp_path, tokenizer):
    path = _tokenized(tmp_path, tokenizer, ["one two"] * 6, file_tokens=18)
    manifest = tmp_path / "dev.json"
    whole = read_json(manifest)
    lengths = [(18, 17, 13), (15, 15, 18), (18, 18)]
    others = [[entry | {"tokens": n} for entry, n in zip(whole["files"], some, strict=False)] for some in lengths]
    wrong = [whole | {"files": files} for files in ([], whole["files"][::-1], [{"name": "dev.arrow"}], *others)]
    for content in wrong:
        write_json(manifest, content)
        with refused("dev.json"):
            TokenShard.open(path)
    # A file of more rows than the manifest says.
    short = [entry | {"tokens": 7} for entry in whole["files"]]
    write_json(manifest, whole | {"files": short, "tokens": 7 * len(short)})
    with refused("dev.arrow"):
        TokenShard.open(path)
    manifest.unlink()
    with refused("dev.json"):
        TokenShard.open(path)
