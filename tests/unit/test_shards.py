"""Token shards: their files, reads and blocks; and shards of spans, the tokens of others in another order."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from demix.data import shards
from demix.data.shards import TokenShard, blocks, tokenize, write_spans
from demix.data.tokenizer import Tokenizer, train_tokenizer
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


def documents_of(shard: TokenShard) -> list[tuple[int, int]]:
    return list(zip(shard.offsets.tolist(), np.diff([*shard.offsets, len(shard)]).tolist(), strict=True))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> list[Path]:
    """Three small shards, in files of four tokens, of seven and in one."""
    run, texts = tmp_path_factory.mktemp("run"), [["one two", "", "three"], ["a b c", "h"], ["x " * 9, "y"]]
    paths = [run / "tokens" / str(number) / "train.arrow" for number in range(3)]
    for path, some, file_tokens in zip(paths, texts, (4, 7, 1000), strict=True):
        write_shard(tokenizer, path, some, file_tokens=file_tokens)
    return paths


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(st.data())
def test_spans_read_as_the_tokens_of_their_documents(tmp_path: Path, sources: list[Path], data: st.DataObject) -> None:
    opened = [TokenShard.open(path) for path in sources]
    whole = [(number, *document) for number, shard in enumerate(opened) for document in documents_of(shard)]
    chosen = data.draw(st.lists(st.sampled_from(whole), max_size=8))
    # Some are pieces of their documents.
    cut = [data.draw(st.integers(1, length)) for _, _, length in chosen]
    output = tmp_path / "clusters" / "c00.arrow"
    output.parent.mkdir(exist_ok=True)
    source, start, _ = np.array(chosen, np.int64).reshape(-1, 3).T
    write_spans(sources, source, start, np.array(cut, np.int64), output)

    pieces = [opened[number].read(at, at + length) for (number, at, _), length in zip(chosen, cut, strict=True)]
    expected = np.concatenate([np.empty(0, np.uint16), *pieces])
    shard = TokenShard.open(output, verify=True)
    assert (shard.path, len(shard), len(shard.document_bytes)) == (output, len(expected), 0)
    assert shard.offsets.tolist() == (np.cumsum(cut) - cut).tolist()
    assert (shard.end_of_text, shard.vocab_size) == (256, 257)
    assert shard.tokenizer_sha256 == opened[0].tokenizer_sha256
    assert read_json(output.with_suffix(".json"))["sha256"] == hashlib.sha256(expected.tobytes()).hexdigest()
    for begin in range(len(expected) + 1):
        for end in range(begin, len(expected) + 1):
            found = shard.read(begin, end)
            assert found.dtype == np.uint16
            assert np.array_equal(found, expected[begin:end])
    for begin, end in ((-1, 0), (0, len(expected) + 1), (1, 0)):
        with pytest.raises(IndexError):
            shard.read(begin, end)


def texts_of(domain: str) -> list[str]:
    return [f"{domain} has {n * n} texts" * (1 + n % 3) for n in range(40)]


@pytest.fixture
def domains(tmp_path: Path, tokenizer: Path) -> list[Path]:
    """Shards of three domains of a run, each of 40 documents."""
    paths = [tmp_path / "a" / "tokens" / name / "train.arrow" for name in ("law", "news", "code")]
    for path in paths:
        write_shard(tokenizer, path, texts_of(path.parent.name))
    return paths


def spans_of(paths: list[Path], output: Path) -> None:
    """Every other document of each domain, the domains in turn."""
    found = [(n, *document) for n, path in enumerate(paths) for document in documents_of(TokenShard.open(path))[::2]]
    write_spans(paths, *np.array(found[::-1]).T, output)


def test_spans_move_with_their_run_and_refuse_other_tokens(
    domains: list[Path], tmp_path: Path, tokenizer: Path
) -> None:
    spans_of(domains, tmp_path / "a" / "c00.arrow")
    flat = TokenShard.open(tmp_path / "a" / "c00.arrow").read(0, 500)
    os.rename(tmp_path / "a", tmp_path / "b")
    moved, source = tmp_path / "b" / "c00.arrow", tmp_path / "b" / "tokens" / "law" / "train.arrow"
    assert np.array_equal(TokenShard.open(moved).read(0, 500), flat)

    # The first document of a domain is among the spans.
    data = source.read_bytes()
    place = data.index(TokenShard.open(source).read(0, 20).tobytes()) + 9
    source.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    TokenShard.open(moved)
    with refused("c00.arrow"):
        TokenShard.open(moved, verify=True)
    source.write_bytes(data)

    spans = moved.read_bytes()
    moved.write_bytes(spans[:-20])
    with refused("c00.arrow"):
        TokenShard.open(moved)
    moved.write_bytes(spans)
    manifest = read_json(moved.with_suffix(".json"))
    write_json(moved.with_suffix(".json"), manifest | {"spans_sha256": "0" * 64})
    TokenShard.open(moved)
    for key, value, subject in (
        ("spans_sha256", "0" * 64, "c00.arrow"),
        ("documents", 1, "c00.arrow"),
        ("tokens", 7, "c00.arrow"),
        ("sources", [], "c00.json"),
        ("sources", manifest["sources"][:1], "c00.arrow"),
        ("vocab_size", "many", "c00.json"),
    ):
        write_json(moved.with_suffix(".json"), manifest | {key: value})
        with refused(subject):
            TokenShard.open(moved, verify=True)
    write_json(moved.with_suffix(".json"), manifest)
    TokenShard.open(moved, verify=True)

    # Spans of as many tokens in another order, then tokens of as many spans.
    spans_of([source.parents[1] / name / source.name for name in ("code", "news", "law")], moved.with_stem("c01"))
    moved.write_bytes(moved.with_stem("c01").read_bytes())
    with refused("c00.arrow"):
        TokenShard.open(moved)
    moved.write_bytes(spans)
    write_shard(tokenizer, source, texts_of("war"))
    with refused("c00.arrow"):
        TokenShard.open(moved)


def test_spans_outside_of_their_source_are_refused(sources: list[Path], tmp_path: Path, tokenizer: Path) -> None:
    paths = sources
    size = len(TokenShard.open(paths[1]))
    for span in ((3, 0, 1), (65536, 0, 1), (-1, 0, 1), (1, -1, 2), (1, 0, 0), (1, size - 1, 2), (1, 0, size + 1)):
        source, start, length = np.array([(0, 0, 1), span]).T
        with refused("c00.arrow"):
            write_spans(paths, source, start, length, tmp_path / "c00.arrow")
    assert not list(tmp_path.iterdir())
    other = tmp_path / "other" / "train.arrow"
    write_shard(tokenizer, other, ["one two " * 9])
    train_tokenizer([other.with_suffix(".parquet")], 260, tmp_path / "tokenizer.json")
    write_shard(tmp_path / "tokenizer.json", other, ["text"])
    with refused("other/train.arrow"):
        write_spans([*paths, other], *np.array([(0, 0, 1)]).T, tmp_path / "c00.arrow")
