"""The tokens of each training step. They depend on (seed, step, domain) and never on a reader's position or a rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from demix.config.architecture import masked_places
from demix.config.models import Kind
from demix.data.shards import TokenShard
from demix.errors import DemixError
from demix.files import seed_for
from demix.model.gpt import MASKED
from demix.run.placement import Placement

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Batch:
    """One rank's part of the sequences of an optimizer step, grouped by expert (E = 1 for a dense model).

    `inputs` and `targets` [E, B, T] are int64. `domains` [E, B] int64 is the number of each sequence's domain.
    `weights`, in the shape of `targets`, weighs the loss of each target; None gives every target the weight 1. In
    masked batches `targets` are [E, B, M], the tokens at the positions `places` [E, B, M] int64 of each sequence, and
    `inputs` are MASKED where a token is hidden.
    """

    inputs: Tensor
    targets: Tensor
    domains: Tensor
    weights: Tensor | None = None
    places: Tensor | None = None

    def part(self, first: int, last: int) -> "Batch":
        """Sequences `first` to `last` of each expert."""
        return self._each(lambda tensor: tensor[:, first:last])

    def to(self, device: torch.device) -> "Batch":
        """The batch on `device`."""
        return self._each(lambda tensor: tensor.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        weights, places = (None if tensor is None else change(tensor) for tensor in (self.weights, self.places))
        return Batch(change(self.inputs), change(self.targets), change(self.domains), weights, places)


@dataclass(frozen=True)
class Batches:
    """The batches of a run: `draw` returns this rank's part of any step (from 0).

    `tokens` is the number of tokens per step over all ranks. The loop divides a step's sum of losses by `targets`, the
    sum of the targets' weights over all ranks; None stands for `tokens`.
    """

    draw: Callable[[int], Batch]
    tokens: int
    targets: float | None = None


# Of one step and rank: blocks [E, B, T + 1], each after the token before it; the number of each sequence's domain; its
# number among the sequences of the domain in the step (both [E, B]).
_Drawn = tuple[Array, Array, Array]


def balanced_batches(
    shards: Sequence[TokenShard],
    names: Sequence[str],
    sequences: int,
    length: int,
    seed: int,
    placement: Placement | None = None,
    objective: str = "clm",
) -> Batches:
    """`sequences` blocks of `length` tokens per step and domain, one group per domain: [D, B, T].

    A rank draws the domains and sequences of its `placement` (by default all). The blocks of a domain get a new random
    order in each epoch. Ranks that share a domain draw disjoint blocks. `objective` is that of an architecture.
    """
    placement = placement or Placement(tuple(range(len(names))), 0, sequences, (0,))
    counts = _block_counts(shards, names, length)

    def draw(step: int) -> _Drawn:
        first, wanted = step * sequences + placement.first, placement.last - placement.first
        blocks = [
            [_block(shards[d], n, length) for n in _order(counts[d], seed, names[d], first, wanted)]
            for d in placement.experts
        ]
        domains = np.repeat(np.array(placement.experts)[:, None], wanted, axis=1)
        numbers = np.arange(placement.first, placement.last)
        return np.array(blocks), domains, np.broadcast_to(numbers, domains.shape)

    return _batches(draw, len(names) * sequences, length, shards, names, seed, objective)


def mixed_batches(
    shards: Sequence[TokenShard],
    names: Sequence[str],
    sequences: int,
    length: int,
    seed: int,
    placement: Placement | None = None,
    objective: str = "clm",
) -> Batches:
    """The sequences of `balanced_batches` in one group [1, B, T]: balanced data for a dense model.

    `placement` counts the D * `sequences` sequences of a step, one domain after the other.
    """
    placement = placement or Placement((0,), 0, len(names) * sequences, (0,))
    counts = _block_counts(shards, names, length)
    domains = np.arange(placement.first, placement.last) // sequences

    def draw(step: int) -> _Drawn:
        order = {d: _order(counts[d], seed, names[d], step * sequences, sequences) for d in set(domains.tolist())}
        places = zip(domains.tolist(), range(placement.first, placement.last), strict=True)
        blocks = [_block(shards[d], order[d][n % sequences], length) for d, n in places]
        numbers = np.arange(placement.first, placement.last) % sequences
        return np.array([blocks]), domains[None], numbers[None]

    return _batches(draw, len(names) * sequences, length, shards, names, seed, objective)


def proportional_batches(
    shards: Sequence[TokenShard],
    names: Sequence[str],
    sequences: int,
    length: int,
    seed: int,
    placement: Placement | None = None,
    objective: str = "clm",
) -> Batches:
    """D * `sequences` blocks per step, drawn from all domains in proportion to their training tokens: [1, B, T]."""
    sequences *= len(names)
    placement = placement or Placement((0,), 0, sequences, (0,))
    counts = _block_counts(shards, names, length)
    ends = np.cumsum(counts)

    def draw(step: int) -> _Drawn:
        first, wanted = step * sequences + placement.first, placement.last - placement.first
        numbers = np.array(_order(int(ends[-1]), seed, "all domains", first, wanted))
        domains = np.searchsorted(ends, numbers, side="right")
        firsts = (ends - counts)[domains]
        places = zip(domains, numbers - firsts, strict=True)
        blocks = np.array([[_block(shards[d], n, length) for d, n in places]])
        return blocks, domains[None], np.arange(placement.first, placement.last)[None]

    return _batches(draw, sequences, length, shards, names, seed, objective)


_DRAWN = {"by_domain": balanced_batches, "mixed": mixed_batches, "proportional": proportional_batches}


def batches_of(
    kind: Kind,
    shards: Sequence[TokenShard],
    names: Sequence[str],
    sequences: int,
    length: int,
    seed: int,
    placement: Placement | None = None,
    objective: str = "clm",
) -> Batches:
    """The batches of a model of `kind`: D * `sequences` blocks of `length` tokens per step, as `kind.batches` says.

    `objective` is that of its architecture: with mlm, M tokens of each block are targets (`masked_places`).
    """
    return _DRAWN[kind.batches](shards, names, sequences, length, seed, placement, objective)


def seen_blocks(shard: TokenShard, name: str, length: int, seed: int, drawn: int) -> Array:
    """Whether each whole block of a domain is among the first `drawn` blocks of `balanced_batches`: bool [blocks]."""
    count = _block_count(shard, name, length)
    seen = np.zeros(count, bool)
    seen[_order(count, seed, name, 0, min(drawn, count))] = True
    return seen


def _batches(
    draw: Callable[[int], _Drawn],
    sequences: int,
    length: int,
    shards: Sequence[TokenShard],
    names: Sequence[str],
    seed: int,
    objective: str,
) -> Batches:
    """The batches of a model with this `objective`: each step has `sequences` of `length` tokens on all ranks."""
    if objective == "mlm":
        vocab_size = shards[0].vocab_size
        targets = sequences * masked_places(length)
        return Batches(
            lambda step: _masked(*draw(step), step, names, vocab_size, seed), sequences * length, float(targets)
        )

    def shifted(step: int) -> Batch:
        blocks, domains, _ = draw(step)
        tokens = torch.from_numpy(blocks)
        return Batch(tokens[..., :-1], tokens[..., 1:], torch.from_numpy(domains))

    return Batches(shifted, sequences * length)


def _masked(
    blocks: Array, domains: Array, numbers: Array, step: int, names: Sequence[str], vocab_size: int, seed: int
) -> Batch:
    """The blocks without the token before them, with M targets each (Devlin et al. 2019, section 3.1).

    Of the inputs at the targets' places, 80% are MASKED, 10% are random tokens and 10% stay. The draw of a sequence
    depends on the seed, the step, its domain and its number there, and on no rank.
    """
    tokens = blocks[..., 1:]
    inputs, count = tokens.copy(), masked_places(tokens.shape[-1])
    places = np.empty((*domains.shape, count), np.int64)
    for at in np.ndindex(*domains.shape):
        named = ("masks", step, names[int(domains[at])], int(numbers[at]))
        generator = np.random.Generator(np.random.PCG64(seed_for(seed, *named)))
        chosen = np.sort(generator.permutation(tokens.shape[-1])[:count])
        how, others = generator.random(count), generator.integers(vocab_size, size=count)
        inputs[at][chosen] = np.select([how < 0.8, how < 0.9], [MASKED, others], inputs[at][chosen])
        places[at] = chosen
    targets = np.take_along_axis(tokens, places, axis=-1)
    numbered = torch.from_numpy(domains)
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), numbered, places=torch.from_numpy(places))


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
    """The token before block `number`, then the block as scoring cuts it: [T + 1] int64."""
    first = int(number) * length
    before = shard.read(first - 1, first) if first else [shard.end_of_text]
    return np.concatenate([before, shard.read(first, first + length)]).astype(np.int64)


def _order(count: int, seed: int, name: str, first: int, wanted: int) -> list[int]:
    """Entries `first` to `first + wanted` of an endless sequence of permutations of `count` blocks."""
    return [int(_permutation(count, seed, name, n // count)[n % count]) for n in range(first, first + wanted)]


@lru_cache(maxsize=64)
def _permutation(count: int, seed: int, name: str, epoch: int) -> Array:
    generator = np.random.Generator(np.random.PCG64(seed_for(seed, "order", name, epoch)))
    return generator.permutation(count)
