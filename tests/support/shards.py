"""Small token shards, in memory and in files."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from demix.data.shards import TokenShard, tokenize
from demix.data.tokenizer import own_definition
from demix.data.vocabulary import END_OF_TEXT, byte_of_character
from demix.files import write_json


def shard_of(tokens: np.ndarray, offsets: Sequence[int] = (0,)) -> TokenShard:
    """A shard of `tokens`, of a tokenizer of 100 types whose last one ends a document."""
    places = np.array(offsets, np.int64)
    return TokenShard(Path("t"), tokens, places, places, places, 99, 100, "")


def bytes_tokenizer(path: Path, pairs: int = 0) -> Path:
    """A tokenizer of the 256 bytes, and of the first `pairs` of them, whose last type ends a document."""
    alphabet = list(byte_of_character())
    merges = [(first, second) for first in alphabet for second in alphabet][:pairs]
    tokens = [*alphabet, *map("".join, merges), END_OF_TEXT]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    write_json(path, own_definition(vocabulary, merges), sort_keys=False)
    return path


def write_shard(tokenizer: Path, path: Path, texts: Sequence[str]) -> TokenShard:
    """The shard `path` of documents with these texts, which are next to it in Parquet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": pa.array(texts, pa.large_string())}), path.with_suffix(".parquet"))
    tokenize(tokenizer, path.with_suffix(".parquet"), path)
    return TokenShard.open(path, verify=True)
