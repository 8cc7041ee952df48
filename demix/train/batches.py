"""Which tokens a training step sees: a function of (seed, step, domain), never of a reader's position or a rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from demix.config.placement import Placement
from demix.config.systems import Kind
from demix.data.shards import TokenShard
from demix.errors import DemixError
from demix.files import seed_for

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Batch:
    """What one rank sees of an optimizer step, grouped by its experts (E = 1 for a dense model).

    inputs, targets [E, B, T] int64; domains [E, B] int64, the number of each sequence's domain. `weights` [E, B, T]:
    how much each target's loss counts; None: all the same, 1.
    """

    inputs: Tensor
    targets: Tensor
    domains: Tensor
    weights: Tensor | None = None

    def part(self, first: int, last: int) -> "Batch":
        """Sequences `first` to `last` of each expert."""
        return self._each(lambda tensor: tensor[:, first:last])

    def to(self, device: torch.device) -> "Batch":
        """The batch on `device`."""
        return self._each(lambda tensor: tensor.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        weights = None if self.weights is None else change(self.weights)
        return Batch(change(self.inputs), change(self.targets), change(self.domains), weights)


@dataclass(frozen=True)
class Batches:
    """`draw` gives a rank's share of any step (from 0); `tokens` are the tokens of a step over all ranks.

    The sum of losses of a step is divided by `targets`, the sum of their weights over all ranks; None: `tokens`.
    """

    draw: Callable[[int], Batch]
    tokens: int
    targets: float | None = None


def balanced_batches(
    shards: Sequence[TokenShard],
    names: Sequence[str],
    sequences: int,
    length: int,
    seed: int,
    placement: Placement | None = None,
) -> Batches:
    """`sequences` blocks of `length` tokens of each domain a step, one expert's group per domain: [D, B, T].

    Of the domains and sequences those of `placement`; all by default. A domain's blocks come in a new random order each
    time they have all been seen, and the ranks that share a domain see disjoint ones.
    """
    placement = placement or Placement(tuple(range(len(names))), 0, sequences, (0,))
    counts = _block_counts(shards, names, length)

    def draw(step: int) -> Batch:
        first, wanted = step * sequences + placement.first, placement.last - placement.first
        blocks = [
            [_block(shards[d], n, length) for n in _order(counts[d], seed, names[d], first, wanted)]
            for d in placement.experts
        ]
        return _batch(np.array(blocks), np.repeat(np.array(placement.experts)[:, None], wanted, axis=1))

    return Batches(draw, len(names) * sequences * length)


def mixed_batches(
    shards: Sequence[TokenShard],
    names: Sequence[str],
    sequences: int,
    length: int,
    seed: int,
    placement: Placement | None = None,
) -> Batches:
    """The sequences of `balanced_batches` as one group [1, B, T]: what a dense model sees of balanced data.

    `placement` numbers the D * `sequences` of a step, one domain after the other.
    """
    placement = placement or Placement((0,), 0, len(names) * sequences, (0,))
    counts = _block_counts(shards, names, length)
    domains = np.arange(placement.first, placement.last) // sequences

    def draw(step: int) -> Batch:
        order = {d: _order(counts[d], seed, names[d], step * sequences, sequences) for d in set(domains.tolist())}
        places = zip(domains.tolist(), range(placement.first, placement.last), strict=True)
        blocks = [_block(shards[d], order[d][n % sequences], length) for d, n in places]
        return _batch(np.array([blocks]), domains[None])

    return Batches(draw, len(names) * sequences * length)


def proportional_batches(
    shards: Sequence[TokenShard],
    names: Sequence[str],
    sequences: int,
    length: int,
    seed: int,
    placement: Placement | None = None,
) -> Batches:
    """D * `sequences` blocks a step, drawn from all domains in proportion to their training tokens: [1, B, T]."""
    sequences *= len(names)
    placement = placement or Placement((0,), 0, sequences, (0,))
    counts = _block_counts(shards, names, length)
    ends = np.cumsum(counts)

    def draw(step: int) -> Batch:
        first, wanted = step * sequences + placement.first, placement.last - placement.first
        numbers = np.array(_order(int(ends[-1]), seed, "all domains", first, wanted))
        domains = np.searchsorted(ends, numbers, side="right")
        firsts = (ends - counts)[domains]
        places = zip(domains, numbers - firsts, strict=True)
        return _batch(np.array([[_block(shards[d], n, length) for d, n in places]]), domains[None])

    return Batches(draw, sequences * length)


_DRAWN = {"by_domain": balanced_batches, "mixed": mixed_batches, "proportional": proportional_batches}


def batches_of(
    kind: Kind,
    shards: Sequence[TokenShard],
    names: Sequence[str],
    sequences: int,
    length: int,
    seed: int,
    placement: Placement | None = None,
) -> Batches:
    """What a model of `kind` sees in each step: D * `sequences` blocks of `length` tokens, drawn as `kind.batches`."""
    return _DRAWN[kind.batches](shards, names, sequences, length, seed, placement)


def seen_blocks(shard: TokenShard, name: str, length: int, seed: int, drawn: int) -> Array:
    """Which blocks of a domain are among the first `drawn` of `balanced_batches`: bool, one for each whole block."""
    count = _block_count(shard, name, length)
    seen = np.zeros(count, bool)
    seen[_order(count, seed, name, 0, min(drawn, count))] = True
    return seen


def _batch(blocks: Array, domains: Array) -> Batch:
    """Blocks [E, B, T + 1], each with the token before it, as inputs and targets."""
    tokens = torch.from_numpy(blocks)
    return Batch(tokens[..., :-1], tokens[..., 1:], torch.from_numpy(domains))


def _block_counts(shards: Sequence[TokenShard], names: Sequence[str], length: int) -> list[int]:
    return [_block_count(shard, name, length) for shard, name in zip(shards, names, strict=True)]


def _block_count(shard: TokenShard, name: str, length: int) -> int:
    count = len(shard) // length
    if count == 0:
        raise DemixError(
            f"domain {name}", f"has {len(shard)} training tokens, fewer than one block of {length}", "add text"
        )
    return count


def _block(shard: TokenShard, number: int, length: int) -> Array:
    """Block `number` with the token before it in front, as scoring cuts them: [T + 1] int64."""
    first = int(number) * length
    before = shard.read(first - 1, first) if first else [shard.end_of_text]
    return np.concatenate([before, shard.read(first, first + length)]).astype(np.int64)


def _order(count: int, seed: int, name: str, first: int, wanted: int) -> list[int]:
    """Numbers `first` to `first + wanted` of the endless sequence of permutations of `count` blocks."""
    return [int(_permutation(count, seed, name, n // count)[n % count]) for n in range(first, first + wanted)]


@lru_cache(maxsize=64)
def _permutation(count: int, seed: int, name: str, epoch: int) -> Array:
    generator = np.random.Generator(np.random.PCG64(seed_for(seed, "order", name, epoch)))
    return generator.permutation(count)
