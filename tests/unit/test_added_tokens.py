"""Tokens made elsewhere, in the layouts of nanoGPT and OLMo-core, beside the shards that the pipeline makes of text."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer as Peer

from demix.data.added_tokens import add_tokens
from demix.data.shards import TokenShard, tokenize
from demix.data.tokenizer import Tokenizer, gpt2_tokenizer
from demix.files import write_parquet
from support.cli import demix
from support.errors import refused

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
    done = demix("data", "add-tokens", *files, "--tokenizer", gpt2, "--output", output, *options)
    assert done.exit_code == 0, done.output
    same(output, own)


@pytest.mark.parametrize(
    ("ids", "kind"), [([5, 50257, 50256], "uint16"), ([5, 7], "uint16"), ([], "uint16"), ([5], "uint8")]
)
def test_what_is_no_tokens_of_the_tokenizer_is_refused(ids: list[int], kind: str, gpt2: Path, tmp_path: Path) -> None:
    np.array(ids, kind).tofile(tmp_path / "a.bin")
    with refused("a.bin"):
        add_tokens([tmp_path / "a.bin"], gpt2, tmp_path / "d" / "train.arrow")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "a.bin"]
