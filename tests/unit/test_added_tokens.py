"""Tokens made elsewhere, in the layouts of nanoGPT and OLMo-core, beside the shards that the pipeline makes of text."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Peer

from demix.data import added_tokens
from demix.data.added_tokens import add_tokens
from demix.data.shards import TokenShard, tokenize
from demix.data.tokenizer import Tokenizer, byte_lengths, gpt2_tokenizer
from demix.files import read_json, write_parquet
from support.cli import demix, said

TEXTS = ["A first document.", "Über 東京 and a smile 🙂 inside.", "x", "The end.\n\n" * 40]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2") / "tokenizer.json"
    gpt2_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def own(gpt2: Path) -> Path:
    """The shard that the pipeline makes of TEXTS."""
    documents = gpt2.with_name("train.parquet")
    write_parquet(pa.table({"text": pa.array(TEXTS, pa.large_string())}), documents)
    tokenize(gpt2, documents, gpt2.parent / "tokens" / "own" / "train.arrow")
    return gpt2.parent / "tokens" / "own" / "train.arrow"


def encoded(gpt2: Path) -> list[int]:
    """TEXTS as nanoGPT's data/openwebtext/prepare.py lays them out: the ids of each text, and the end behind them."""
    peer = Peer.from_str(Tokenizer.load(gpt2).definition)
    return [one for text in TEXTS for one in [*peer.encode(text).ids, 50256]]


def same(made: Path, own: Path) -> None:
    """Whether each file of a shard has the bytes of another one's."""
    for name in ("train.arrow", "train.documents.arrow", "train.json"):
        assert made.with_name(name).read_bytes() == own.with_name(name).read_bytes(), name
    TokenShard.open(made, verify=True)


@pytest.mark.parametrize("layout", ["nanoGPT", "OLMo-core", "numpy.save", "ends first", "several files"])
def test_ids_of_others_become_the_shard_of_the_same_text(layout: str, gpt2: Path, own: Path, tmp_path: Path) -> None:
    ids, files, options = np.array(encoded(gpt2)), [tmp_path / "train.bin"], ()
    match layout:
        case "nanoGPT":
            ids.astype(np.uint16).tofile(files[0])
        case "OLMo-core":
            files = [tmp_path / "part-0.npy"]
            np.memmap(files[0], np.uint32, "w+", shape=len(ids))[:] = ids
            options = ("--dtype", "uint32")
        case "numpy.save":
            files = [tmp_path / "train.npy"]
            np.save(files[0], ids)
        case "ends first":
            np.concatenate([ids[-1:], ids[:-1]]).astype(np.uint16).tofile(files[0])
        case _:
            files = [tmp_path / f"{number}.bin" for number in range(4)]
            for path, part in zip(files, (ids[:7], ids[:0], ids[7:21], ids[21:]), strict=True):
                part.astype(np.uint16).tofile(path)
    output = tmp_path / "tokens" / "own" / "train.arrow"
    told = demix("data", "add-tokens", *files, "--tokenizer", gpt2, "--output", output, *options)
    assert told.exit_code == 0, told.output
    assert told.stdout.endswith(f"{len(ids):,} tokens in 4 documents, {len(''.join(TEXTS).encode()):,} bytes\n")
    same(output, own)


@given(
    documents=st.lists(st.lists(st.integers(0, 255), max_size=5), min_size=1, max_size=6),
    piece=st.integers(1, 7),
    behind=st.booleans(),
)
@hypothesis_settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_documents_are_found_whatever_the_pieces(
    documents: list[list[int]], piece: int, behind: bool, tokens: Path, tmp_path: Path
) -> None:
    # A small tokenizer loads at once.
    tokenizer = tokens / "tokenizer.json"
    end, lengths = Tokenizer.load(tokenizer).end_of_text, byte_lengths(tokenizer)
    assert end > 255
    rows = [[*ids, end] if behind else [end, *ids] for ids in documents]
    # The id at the beginning begins a document, and that at the end ends one.
    assume(documents[0] if behind else documents[-1])
    np.array([one for row in rows for one in row], np.uint16).tofile(tmp_path / "a.bin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(added_tokens, "PIECE", piece)
        add_tokens([tmp_path / "a.bin"], tokenizer, tmp_path / "d" / "test.arrow")
    shard = TokenShard.open(tmp_path / "d" / "test.arrow", verify=True)
    assert shard.read(0, len(shard)).tolist() == [one for ids in documents for one in (end, *ids)]
    assert shard.document_bytes.tolist() == [int(lengths[ids].sum()) if ids else 0 for ids in documents]
    assert shard.offsets.tolist() == np.cumsum([0, *(len(ids) + 1 for ids in documents[:-1])]).tolist()
    assert read_json(tmp_path / "d" / "test.json")["documents"] == len(documents)


@pytest.mark.parametrize(
    ("ids", "kind", "options", "line"),
    [
        ([5, 50257, 50256], "uint16", (), "a.bin: has id 50257 at token 2, of 50257 types; name the tokens' own"),
        ([5, 7], "uint16", (), "a.bin: has no id 50256, which ends a document for"),
        ([5, 70000], "uint32", ("--dtype", "uint32"), "a.bin: has id 70000 at token 2"),
        ([], "uint16", (), "a.bin: holds no tokens; name files of tokens"),
        ([50256], "uint16", (), "a.bin: holds no tokens; name files of tokens"),
        ([5], "uint8", (), "a.bin: holds no tokens (1 bytes are no whole number of uint16); give flat uint16"),
        ([5, 50256], "uint16", ("--dtype", "int"), "--dtype int: is not known; use uint16 or uint32"),
    ],
)
def test_what_is_no_tokens_of_the_tokenizer_is_refused(
    ids: list[int], kind: str, options: tuple[str, ...], line: str, gpt2: Path, tmp_path: Path
) -> None:
    np.array(ids, kind).tofile(tmp_path / "a.bin")
    output = tmp_path / "d" / "train.arrow"
    asked = ["data", "add-tokens", tmp_path / "a.bin", "--tokenizer", gpt2, "--output", output, *options]
    told = said([str(one) for one in asked])
    assert told is not None
    assert line in told
    assert "\n" not in told
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "a.bin"]


def test_tables_and_missing_files_are_refused(gpt2: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "table.npy", np.zeros((2, 3), np.uint16))
    np.save(tmp_path / "floats.npy", np.zeros(3))
    output = ("--tokenizer", str(gpt2), "--output", str(tmp_path / "train.arrow"))
    for name, line in (
        ("table.npy", "holds uint16 of shape (2, 3); give one row of whole numbers"),
        ("floats.npy", "holds float64 of shape (3,)"),
        ("none.bin", "is missing"),
    ):
        assert line in str(said(["data", "add-tokens", str(tmp_path / name), *output]))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "table.npy").read_bytes()[:-1])
    assert "cut.npy: holds no tokens" in str(said(["data", "add-tokens", str(tmp_path / "cut.npy"), *output]))
