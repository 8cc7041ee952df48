"""The claims of the papers and ours, each with a verdict on a run and the numbers that decide.

claims.toml has an entry for each claim. An entry whose name has a field stands for one claim per mixture of the run
that is not in the paper.
"""

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from string import Formatter
from typing import Any

from demix.report import cells, needs, systems
from demix.report.claims import judges
from demix.report.claims.judges import paired
from demix.report.needs import Need, missing
from demix.report.read import Domains, paired_either_way
from demix.report.run_data import RunData
from demix.report.systems import ByDomain
from demix.report.verdict import Claim, Part, compare, corrected
from demix.run.run import Run
from demix.run.systems import System


@dataclass(frozen=True)
class Row:
    """An entry of claims.toml; `mixture` is the system of a claim that is made for each mixture."""

    name: str
    statement: str
    source: str = ""
    needs: tuple[Need, ...] = ()
    compare: tuple[dict[str, Any], ...] = ()
    judge: str = ""
    mixture: System | None = None

    def said(self, data: RunData) -> str:
        """The statement, with its source."""
        fields = {field for _, field, *_ in Formatter().parse(self.statement) if field}
        words = {"mixture": self.mixture.label if self.mixture else ""}
        words |= {field: judges.WORDS[field](data) for field in fields & judges.WORDS.keys()}
        return self.statement.format(**words) + (f" ({self.source})." if self.source else ".")

    def judged(self, data: RunData) -> Claim:
        """The claim, judged on one seed."""
        parts = [part for one in self.compare for part in self._parts(data, **one)]
        parts += getattr(judges, self.judge)(data) if self.judge else ()
        return Claim(self.name, self.said(data), tuple(parts), published=bool(self.source))

    def _parts(
        self,
        data: RunData,
        first: str = "",
        second: str = "",
        pairs: str = "",
        adapting: str = "",
        on: Sequence[str] = ("training",),
        **how: Any,
    ) -> Iterator[Part]:
        """The comparisons of one entry of `compare`."""
        if adapting:
            (label, other), (before, after) = how.pop("labels"), (found[adapting] for found in cells.adapting(data))
            yield compare(label, after, other, before, **how)
            return
        found: Iterable[tuple[ByDomain, ByDomain]]
        if pairs:
            found = getattr(systems, pairs)(data.run) if pairs.isidentifier() else paired(pairs, data)
        else:
            firsts = [self.mixture] if self.mixture else _named(first, data.run)
            found = list(product(firsts, _named(second, data.run)))
        for domains in (one for one in data.kinds if one.kind in on):
            for pair in found:
                yield _compared(data, pair, domains, **how)


def _named(name: str, run: Run) -> list[ByDomain]:
    """The systems that `demix.report.systems` has under a name."""
    found = getattr(systems, name)
    found = found if isinstance(found, System) else found(run)
    return found if isinstance(found, list) else [found]


def _compared(
    data: RunData,
    pair: tuple[ByDomain, ByDomain],
    domains: Domains,
    labels: Sequence[str] = ("", ""),
    intervals: bool = True,
    **how: Any,
) -> Part:
    """The comparison of two systems by their test perplexities and the intervals of the differences."""
    oracles = judges.ORACLES if domains.kind == "novel" else {}
    (label, values), (other, others) = (
        (
            given or (oracles.get(system, system.label) if isinstance(system, System) else ""),
            data.results.perplexities(system, domains.names),
        )
        for system, given in zip(pair, labels, strict=True)
    )
    first, second = pair
    bounds = None
    if intervals and isinstance(second, System):
        bounds = paired_either_way(data.bounds, first, second, domains.names)
    return replace(
        compare(label, values, other, others, bounds=bounds, **how), rival=other if isinstance(second, System) else ""
    )


@cache
def _rows() -> list[dict[str, Any]]:
    text = Path(__file__).with_name("claims.toml").read_text("utf-8")
    return [
        row | {"needs": tuple(getattr(needs, need) for need in row.get("needs", ()))}
        for row in tomllib.loads(text)["claims"]
    ]


def rows(run: Run) -> list[Row]:
    """The claims that apply to the run, in the order in which they are shown."""
    found: list[Row] = []
    for row in (row for row in _rows() if not missing(row["needs"], run)):
        # A name with a field stands for one claim per mixture.
        mixtures: Sequence[System | None] = judges.mixtures(run) if "{" in row["name"] else [None]
        found += [Row(**row | {"name": row["name"].format(one=one), "mixture": one}) for one in mixtures]
    return found


@lru_cache(maxsize=1)
def claims(data: RunData) -> list[Claim]:
    """The claims judged on a run's own seed and checked on its other seeds; the papers' claims come first."""
    run = data.run
    seeds = (run.seed, *(seed for seed in data.results.by_seed if seed != run.seed))
    own, *others = (data.of_seed(seed) for seed in seeds)
    judged = (row.judged(own).among([row.judged(one) for one in others]) for row in rows(run))
    found = corrected([claim for claim in judged if claim.parts])
    return sorted(found, key=lambda claim: not claim.published)
