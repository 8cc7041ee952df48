"""Which rank trains which experts and sequences.

This module does not import torch, so that a config can be checked quickly before anything runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from demix.config.models import DENSE_EXPERT, KINDS, Kind
from demix.errors import DemixError


@dataclass(frozen=True)
class Placement:
    """What one rank trains: the experts of the domains with the numbers `experts`, on some sequences of each step.

    These are the sequences from `first` to `last` (exclusive). `ranks` are the ranks that hold the same experts, in
    order. The first of them writes the experts.
    """

    experts: tuple[int, ...]
    first: int
    last: int
    ranks: tuple[int, ...]


def place(kind: Kind | str, domains: Sequence[str], sequences: int, ranks: int) -> tuple[Placement, ...]:
    """What each rank trains of a model of `kind` on `domains`, with `sequences` of each domain per step.

    If a step is drawn by domain, the domains' experts are divided among the ranks. Otherwise there is one expert, and
    the sequences of a step are divided among the ranks. Raises DemixError with the numbers of ranks that are possible.
    """
    kind = KINDS[kind] if isinstance(kind, str) else kind
    if kind.batches == "by_domain":
        return place_experts(domains, sequences, ranks)
    return place_experts([DENSE_EXPERT], len(domains) * sequences, ranks)


def place_experts(domains: Sequence[str], sequences: int, ranks: int) -> tuple[Placement, ...]:
    """What each rank trains of the experts of `domains`, with `sequences` per step for each domain.

    The number of ranks is a multiple of the number of domains (several ranks for each expert) or a divisor of it
    (several experts per rank). Raises DemixError with the possible numbers.
    """
    count = len(domains)
    if count % ranks == 0:
        size = count // ranks
        return tuple(Placement(tuple(range(r * size, (r + 1) * size)), 0, sequences, (r,)) for r in range(ranks))
    number = ranks // count
    if ranks % count or number > sequences:
        fitting = [n for n in range(1, count) if count % n == 0] + [n * count for n in range(1, sequences + 1)]
        raise DemixError("ranks", f"is {ranks}, which does not fit {count} domains", f"use {_listed(fitting)}")
    found: list[Placement] = []
    for expert in range(count):
        own = tuple(range(len(found), len(found) + number))
        cuts = [sequences * part // number for part in range(number + 1)]
        found += [Placement((expert,), cuts[part], cuts[part + 1], own) for part in range(number)]
    return tuple(found)


def _listed(numbers: Sequence[int]) -> str:
    names = [str(number) for number in numbers[:12]] + (["..."] if len(numbers) > 12 else [])
    return (", ".join(names[:-1]) + " or " + names[-1] if len(names) > 1 else names[0]) + " ranks"


def owners_of(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each item of `sizes`. Items are assigned from the largest, each to the rank with the least so far."""
    loads, owners = [0] * ranks, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += sizes[number]
    return owners
