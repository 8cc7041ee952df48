"""The order in which training draws the blocks of a domain. It depends only on the seed and the domain."""

from functools import lru_cache

import numpy as np

from demix.data.shards import TokenShard
from demix.errors import DemixError
from demix.files import seed_for


def block_count(shard: TokenShard, name: str, length: int) -> int:
    """The number of whole blocks of `length` tokens in the shard of the domain `name`. Raises DemixError for none."""
    count = len(shard) // length
    if count == 0:
        cause = f"has {len(shard)} training tokens, fewer than one block of {length}"
        raise DemixError(f"domain {name}", cause, "add text")
    return count


def drawn_block(count: int, seed: int, name: str, number: int) -> int:
    """Which of `count` blocks is drawn as number `number` (from 0). Each epoch has its own random order."""
    return int(_order(count, seed, name, number // count)[number % count])


def seen_blocks(shard: TokenShard, name: str, length: int, seed: int, drawn: int) -> np.ndarray:
    """Whether each whole block of a domain is among the first `drawn` that training draws: bool [blocks]."""
    count = block_count(shard, name, length)
    seen = np.zeros(count, bool)
    seen[_order(count, seed, name, 0)[:drawn]] = True
    return seen


@lru_cache(maxsize=64)
def _order(count: int, seed: int, name: str, epoch: int) -> np.ndarray:
    generator = np.random.Generator(np.random.PCG64(seed_for(seed, "order", name, epoch)))
    return generator.permutation(count)
