"""Token shards in memory."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from demix.data.shards import TokenShard


def shard_of(tokens: np.ndarray, file_tokens: int = 1 << 20, offsets: Sequence[int] = (0,)) -> TokenShard:
    """A shard of `tokens` in files of `file_tokens`, of a tokenizer of 100 types whose last one ends a document."""
    files = tuple(tokens[at : at + file_tokens] for at in range(0, max(1, len(tokens)), file_tokens))
    places = np.array(offsets, np.int64)
    return TokenShard(Path("t"), files, places, places, places, 99, 100, "")
