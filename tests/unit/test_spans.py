"""Shards of spans: the tokens of other shards in another order, of which none is copied."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from demix.data.shards import TokenShard, write_spans
from demix.data.tokenizer import train_tokenizer
from demix.files import read_json, write_json
from support.errors import refused
from support.shards import bytes_tokenizer, write_shard


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bytes_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


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
