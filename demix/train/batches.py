"""The tokens of each training step. They depend only on seed, step and domain, not on a reader's position or a rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from demix.config.counts import masked_places
from demix.data.order import block_count, drawn_block
from demix.data.shards import TokenShard
from demix.errors import DemixError
from demix.files import seed_for
from demix.model.gpt import MASKED
from demix.run.placement import Placement
from demix.train.parallel import World

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Batch:
    """One rank's part of the sequences of an optimizer step, grouped by expert (E = 1 for a dense model).

    `inputs` and `targets` [E, B, T] are int64. `domains` [E, B] int64 are the numbers of the sequences' domains, and
    `seeds` [E, B] int64 the random seeds of their dropout. In masked batches `targets` are [E, B, M], the tokens at the
    positions `places` [E, B, M] int64 of each sequence, and `inputs` are MASKED at hidden tokens.
    """

    inputs: Tensor
    targets: Tensor
    domains: Tensor
    seeds: Tensor
    places: Tensor | None = None

    def part(self, first: int, last: int) -> "Batch":
        """Sequences `first` to `last` of each expert."""
        return self._each(lambda tensor: tensor[:, first:last])

    def to(self, device: torch.device) -> "Batch":
        """The batch on `device`."""
        return self._each(lambda tensor: tensor.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        given = {name: tensor for name, tensor in vars(self).items() if tensor is not None}
        return replace(self, **{name: change(tensor) for name, tensor in given.items()})


@dataclass(frozen=True)
class Batches:
    """The batches of a run: `draw` returns this rank's part of any step (from 0).

    `tokens` is the number of tokens per step over all ranks. The loop divides a step's sum of losses by `targets`, the
    number of targets over all ranks; None means `tokens`.
    """

    draw: Callable[[int], Batch]
    tokens: int
    targets: float | None = None


def batches_of(
    how: str,
    shards: Sequence[TokenShard],
    names: Sequence[str],
    sequences: int,
    length: int,
    seed: int,
    placement: Placement | None = None,
    objective: str = "clm",
) -> Batches:
    """D * `sequences` blocks of `length` tokens per step, from the shards of the domains `names`.

    `how` is the field `batches` of a kind (`demix.config.models.Kind`): with by_domain `sequences` blocks of each
    domain, one group per domain [D, B, T]; with mixed the same sequences in one group [1, B, T], one domain after the
    other; with proportional one group from all domains in proportion to their training tokens. The blocks of a domain
    get a new random order in each epoch.

    A rank draws the domains and sequences of its `placement` (by default all), which counts the sequences of a group.
    Ranks that share a domain draw disjoint blocks. `objective` is the architecture's: with mlm, M tokens of each block
    are targets (`masked_places`).
    """
    counts = np.array([block_count(shard, name, length) for shard, name in zip(shards, names, strict=True)])
    total, ends = len(names) * sequences, np.cumsum(counts)
    if how == "by_domain":
        placement = placement or Placement(tuple(range(len(names))), 0, sequences, (0,))
        numbers, domains = np.meshgrid(np.arange(placement.first, placement.last), placement.experts)
    else:
        placement = placement or Placement((0,), 0, total, (0,))
        numbers = np.arange(placement.first, placement.last)[None]
        if how == "mixed":
            domains, numbers = np.divmod(numbers, sequences)

    def in_all(step: int) -> tuple[Array, Array]:
        drawn = [drawn_block(int(ends[-1]), seed, "all domains", step * total + n) for n in numbers[0].tolist()]
        found = np.searchsorted(ends, [drawn], side="right")
        return found, np.array([drawn]) - (ends - counts)[found]

    def in_each(step: int) -> tuple[Array, Array]:
        entry = np.vectorize(lambda d, n: drawn_block(int(counts[d]), seed, names[d], step * sequences + int(n)))
        return domains, entry(domains, numbers)

    def draw(step: int) -> Batch:
        found, places = (in_all if how == "proportional" else in_each)(step)
        pairs = zip(found.flat, places.flat, strict=True)
        blocks = np.array([_block(shards[d], n, length) for d, n in pairs]).reshape(*found.shape, length + 1)

        def seeds(what: str) -> Tensor:
            # The random seed of a sequence depends on the step, its domain and its number there, not on a rank.
            drawn = [seed_for(seed, what, step, names[d], n) for d, n in zip(found.flat, numbers.flat, strict=True)]
            return torch.tensor(drawn).view(found.shape)

        about = torch.from_numpy(found), seeds("dropout")
        if objective == "mlm":
            return _masked(blocks, seeds("masks"), shards[0].vocab_size, *about)
        tokens = torch.from_numpy(blocks)
        return Batch(tokens[..., :-1], tokens[..., 1:], *about)

    return Batches(draw, total * length, float(total * masked_places(length)) if objective == "mlm" else None)


def open_shards(paths: Sequence[Path], world: World) -> list[TokenShard]:
    """Open token shards. One rank verifies the sha256 of each. Raises DemixError if their tokenizers differ."""
    shards = [TokenShard.open(path, verify=world.owns(number)) for number, path in enumerate(paths)]
    for path, shard in zip(paths, shards, strict=True):
        if shard.tokenizer_sha256 != shards[0].tokenizer_sha256:
            raise DemixError(path, f"was made with another tokenizer than {paths[0]}", "tokenize all domains again")
    return shards


def _masked(blocks: Array, drawn: Tensor, vocab_size: int, domains: Tensor, seeds: Tensor) -> Batch:
    """Masked batches of the blocks (without the token before them), with M targets each (Devlin et al. 2019, 3.1).

    At the targets, 80% of the inputs are MASKED, 10% are random tokens and 10% are unchanged, by the random seeds
    `drawn` [E, B].
    """
    tokens = blocks[..., 1:]
    inputs, count = tokens.copy(), masked_places(tokens.shape[-1])
    places = np.empty((*domains.shape, count), np.int64)
    for at in np.ndindex(*domains.shape):
        generator = np.random.Generator(np.random.PCG64(int(drawn[at])))
        chosen = np.sort(generator.permutation(tokens.shape[-1])[:count])
        how, others = generator.random(count), generator.integers(vocab_size, size=count)
        inputs[at][chosen] = np.select([how < 0.8, how < 0.9], [MASKED, others], inputs[at][chosen])
        places[at] = chosen
    targets = np.take_along_axis(tokens, places, axis=-1)
    hidden = torch.from_numpy(places)
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), domains, seeds, places=hidden)


def _block(shard: TokenShard, number: int, length: int) -> Array:
    """The token before block `number`, then the block as scoring cuts it: [T + 1] int64."""
    first = int(number) * length
    before = shard.read(first - 1, first) if first else [shard.end_of_text]
    return np.concatenate([before, shard.read(first, first + length)]).astype(np.int64)
