"""Which tokens a training step sees: a pure function of (seed, step, domain), never of a reader's position."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from demix.data.shards import TokenShard
from demix.errors import DemixError
from demix.files import seed_for


@dataclass(frozen=True)
class Batch:
    """One optimizer step's sequences, grouped by expert (E = 1 for a dense model).

    inputs, targets [E, B, T] int64; domains [E, B] int64, the number of each sequence's domain.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    domains: torch.Tensor


Batches = Callable[[int], Batch]


def balanced_batches(
    shards: Sequence[TokenShard], names: Sequence[str], sequences: int, length: int, seed: int
) -> Batches:
    """Step -> `sequences` blocks of `length` tokens of each domain, one expert's group per domain: [D, B, T].

    A domain's blocks come in a new random order each time they have all been seen.
    """
    counts = [_block_count(shard, name, length) for shard, name in zip(shards, names, strict=True)]

    def batch(step: int) -> Batch:
        rows = []
        for shard, name, count in zip(shards, names, counts, strict=True):
            numbers = _order(count, seed, name, step * sequences, sequences)
            rows.append(np.stack([_block(shard, number, length) for number in numbers]))
        blocks = torch.from_numpy(np.stack(rows))  # [D, B, T + 1]
        domains = torch.arange(len(names)).unsqueeze(1).expand(len(names), sequences)
        return Batch(blocks[..., :-1], blocks[..., 1:], domains)

    return batch


def mixed_batches(batches: Batches) -> Batches:
    """The same sequences as one group [1, D*B, T]: what a dense model sees of balanced data."""

    def batch(step: int) -> Batch:
        grouped = batches(step)
        return Batch(
            grouped.inputs.flatten(0, 1).unsqueeze(0),
            grouped.targets.flatten(0, 1).unsqueeze(0),
            grouped.domains.flatten().unsqueeze(0),
        )

    return batch


def proportional_batches(
    shards: Sequence[TokenShard], names: Sequence[str], sequences: int, length: int, seed: int
) -> Batches:
    """Step -> `sequences` blocks drawn from all domains in proportion to their training tokens: [1, B, T]."""
    counts = [_block_count(shard, name, length) for shard, name in zip(shards, names, strict=True)]
    ends = np.cumsum(counts)

    def batch(step: int) -> Batch:
        numbers = _order(int(ends[-1]), seed, "all domains", step * sequences, sequences)
        domains = np.searchsorted(ends, numbers, side="right")
        firsts = ends - counts
        blocks = torch.from_numpy(
            np.stack([_block(shards[d], n - firsts[d], length) for d, n in zip(domains, numbers, strict=True)])
        ).unsqueeze(0)
        return Batch(blocks[..., :-1], blocks[..., 1:], torch.from_numpy(domains).unsqueeze(0))

    return batch


def _block_count(shard: TokenShard, name: str, length: int) -> int:
    count = len(shard) // length
    if count == 0:
        raise DemixError(
            f"domain {name}", f"has {len(shard)} training tokens, fewer than one block of {length}", "add text"
        )
    return count


def _block(shard: TokenShard, number: int, length: int) -> np.ndarray:
    """Block `number` with the token before it in front, as scoring cuts them: [T + 1] int64."""
    first = int(number) * length
    before = shard.read(first - 1, first) if first else [shard.end_of_text]
    return np.concatenate([before, shard.read(first, first + length)]).astype(np.int64)


def _order(count: int, seed: int, name: str, first: int, wanted: int) -> list[int]:
    """Numbers `first` to `first + wanted` of the endless sequence of permutations of `count` blocks."""
    return [int(_permutation(count, seed, name, n // count)[n % count]) for n in range(first, first + wanted)]


@lru_cache(maxsize=64)
def _permutation(count: int, seed: int, name: str, epoch: int) -> np.ndarray:
    generator = np.random.Generator(np.random.PCG64(seed_for(seed, "order", name, epoch)))
    return generator.permutation(count)
