"""Which rank trains what; without torch, so that a config is checked before anything runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from demix.errors import DemixError


@dataclass(frozen=True)
class Share:
    """What one rank trains: the domains `experts` (by number), and of each step's sequences `first` to `last`.

    `ranks` hold the same experts, in order; the first of them speaks for all.
    """

    experts: tuple[int, ...]
    first: int
    last: int
    ranks: tuple[int, ...]


def shares(
    domains: Sequence[str], ranks: int, sequences: int, replicas: Mapping[str, int] | None = None
) -> tuple[Share, ...]:
    """Each rank's share of `domains` with `sequences` a step each. A dense model is one domain.

    Either the ranks are a multiple of the domains (replicas of each expert), or the domains of the ranks (several
    experts a rank), or `replicas` gives some domains more ranks than the one that the others have. Raises DemixError
    that says which numbers fit.
    """
    count = len(domains)
    fitting = [n for n in range(1, count) if count % n == 0] + [n * count for n in range(1, sequences + 1)]
    told = f"use {_listed(fitting)}"
    if replicas:
        for name in replicas:
            if name not in domains:
                raise DemixError(f"replicas.{name}", "is no training domain", f"name some of {', '.join(domains)}")
        numbers = [replicas.get(name, 1) for name in domains]
        if sum(numbers) != ranks:
            cause = f"is {ranks}, but the replicas of {count} domains make {sum(numbers)}"
            raise DemixError("ranks", cause, f"use {sum(numbers)} ranks, or without replicas {_listed(fitting)}")
    elif ranks % count == 0:
        numbers = [ranks // count] * count
    elif count % ranks == 0:
        size = count // ranks
        return tuple(Share(tuple(range(r * size, (r + 1) * size)), 0, sequences, (r,)) for r in range(ranks))
    else:
        raise DemixError("ranks", f"is {ranks}, which does not fit {count} domains", told)
    if max(numbers) > sequences:
        name = domains[numbers.index(max(numbers))]
        cause = f"gives {name} {max(numbers)} ranks for {sequences} sequences a step"
        raise DemixError("ranks", cause, f"{told}, or raise sequences")
    found: list[Share] = []
    for expert, number in enumerate(numbers):
        own = tuple(range(len(found), len(found) + number))
        cuts = [sequences * part // number for part in range(number + 1)]
        found += [Share((expert,), cuts[part], cuts[part + 1], own) for part in range(number)]
    return tuple(found)


def placement(
    kind: str, domains: Sequence[str], sequences: int, ranks: int, replicas: Mapping[str, int] | None = None
) -> tuple[Share, ...]:
    """Each rank's share of the training of a model of `kind`; the sequences of a dense one are cut among all ranks."""
    if kind == "demix":
        return shares(domains, ranks, sequences, replicas)
    return shares(["dense"], ranks, len(domains) * sequences)


def _listed(numbers: Sequence[int]) -> str:
    some = [str(number) for number in numbers[:12]] + (["..."] if len(numbers) > 12 else [])
    return (", ".join(some[:-1]) + " or " + some[-1] if len(some) > 1 else some[0]) + " ranks"
