"""Overlap of domains in bigrams (pairs of neighbouring tokens).

The paper compares the affinity of experts (its Figure 2) with the bigrams that domains share. The paper's formula was
not available when this was written, so the formula here is our own: the share of the bigrams of a domain's test split,
each counted as often as it occurs, that also occur in the text on which an expert was trained. It has the direction of
Figure 2 (an expert reads a domain) and is not symmetric.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from demix.data.shards import TokenShard, open_alike
from demix.files.batches import write_rows
from demix.progress import followed

# Enough tokens for stable shares, and few enough to sort in a second. A larger sample has more of any text's bigrams.
TRAIN_TOKENS = 1_000_000
TEST_TOKENS = 100_000

SCHEMA = pa.schema(
    [
        *(("domain", pa.string()), ("expert", pa.string()), ("overlap", pa.float64())),
        *(("train_tokens", pa.int64()), ("test_bigrams", pa.int64())),
    ]
)


def bigrams(shard: TokenShard, tokens: int) -> np.ndarray:
    """The bigrams of the first `tokens` tokens, in order, as numbers (uint64); no bigram spans two documents."""
    ids = shard.read(0, min(tokens, len(shard))).astype(np.uint64)
    inside = ids != shard.end_of_text
    pairs: np.ndarray = (ids[:-1] * np.uint64(shard.vocab_size) + ids[1:])[inside[:-1] & inside[1:]]
    return pairs


def overlap(shards: Sequence[Path], output: Path) -> None:
    """Write the bigram overlap of each test split with each train split among tokens/<domain>/<split>.arrow.

    Rows: domain (of the test split), expert (the domain of the train split), overlap (0 to 1, null where the test
    split has no bigram), train_tokens, test_bigrams. The same number of first tokens is read of every train split (the
    size of the smallest, at most TRAIN_TOKENS), because a larger sample would overlap more whatever its text. Of test
    splits, the first TEST_TOKENS are read. Raises DemixError if shards differ in their tokenizer.
    """
    opened: dict[str, dict[str, TokenShard]] = {"train": {}, "test": {}}
    for shard in open_alike(shards, verify=True):
        opened[shard.path.stem][shard.path.parent.name] = shard
    tokens = min([TRAIN_TOKENS, *map(len, opened["train"].values())])
    found = {domain: bigrams(shard, TEST_TOKENS) for domain, shard in opened["test"].items()}
    shared = {}
    for expert, shard in followed(opened["train"].items(), "overlap: experts", len(opened["train"])):
        # A number behind the last one, so that every search ends at one.
        known = np.append(np.unique(bigrams(shard, tokens)), np.iinfo(np.uint64).max)
        for domain, pairs in found.items():
            shared[domain, expert] = int((known[np.searchsorted(known, pairs)] == pairs).sum())
    rows = [
        (domain, expert, shared[domain, expert] / len(pairs) if len(pairs) else None, tokens, len(pairs))
        for domain, pairs in found.items()
        for expert in opened["train"]
    ]
    write_rows(output, SCHEMA, rows)
