"""Tokens made elsewhere, in the layouts of nanoGPT and OLMo-core, beside the shards that the pipeline makes of text."""

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer as Peer

from demix.data.added_tokens import add_tokens
from demix.data.shards import TokenShard, tokenize
from demix.data.tokenizer import Tokenizer
from demix.files import write_parquet
from support.cli import demix
from support.errors import refused

TEXTS = ["A first document.", "Über 東京 and a smile 🙂 inside.", "x", "The end.\n\n" * 40]


def test_ids_of_others_become_the_shard_of_the_same_text(tokens, tmp_path):
    tokenizer = Tokenizer.load(tokens / "tokenizer.json")
    write_parquet(pa.table({"text": pa.array(TEXTS, pa.large_string())}), tmp_path / "train.parquet")
    own = tmp_path / "tokens" / "own" / "train.arrow"
    tokenize(tokens / "tokenizer.json", tmp_path / "train.parquet", own)
    # As nanoGPT's data/openwebtext/prepare.py lays them out: the end behind the ids of each text.
    peer = Peer.from_str(tokenizer.definition)
    ids = np.array([one for text in TEXTS for one in [*peer.encode(text).ids, tokenizer.end_of_text]], np.uint16)
    files = {
        "nanoGPT": {"train.bin": ids},
        "OLMo-core": {"part-0.npy": ids.astype(np.uint32)},
        "ends first": {"train.bin": np.concatenate([ids[-1:], ids[:-1]])},
        "several": {"0.bin": ids[:7], "1.bin": ids[:0], "2.bin": ids[7:21], "3.bin": ids[21:]},
    }
    for layout, parts in files.items():
        folder = tmp_path / layout
        folder.mkdir()
        for name, some in parts.items():
            some.tofile(folder / name)
        made = folder / "tokens" / "own" / "train.arrow"
        options = ("--dtype", "uint32") if layout == "OLMo-core" else ()
        words = ("--tokenizer", tokens / "tokenizer.json", "--output", made, *options)
        assert demix("data", "add-tokens", *(folder / name for name in parts), *words).exit_code == 0
        for name in ("train.arrow", "train.documents.arrow", "train.json"):
            assert made.with_name(name).read_bytes() == own.with_name(name).read_bytes(), (layout, name)
        TokenShard.open(made, verify=True)


@pytest.mark.parametrize(
    ("ids", "kind"), [([5, 60000, 399], "uint16"), ([5, 7], "uint16"), ([], "uint16"), ([5], "uint8")]
)
def test_what_is_no_tokens_of_the_tokenizer_is_refused(ids, kind, tokens, tmp_path):
    np.array(ids, kind).tofile(tmp_path / "a.bin")
    with refused("a.bin"):
        add_tokens([tmp_path / "a.bin"], tokens / "tokenizer.json", tmp_path / "d" / "train.arrow")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "a.bin"]
