"""The kinds of domains of a run, those trained on and those that are novel, and what is told over them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from demix.files import read_json
from demix.progress import so_many
from demix.run.run import Run


def mean_of(values: Iterable[float]) -> float:
    """The plain mean; NaN without values or if a value is NaN."""
    numbers = np.asarray(list(values), dtype="float64")
    return float(numbers.mean()) if len(numbers) else float("nan")


def percent(before: Any, after: Any) -> Any:
    """The change from `before` to `after`, in percent of `before`."""
    return 100 * (after / before - 1)


@dataclass(frozen=True)
class Domains:
    """The domains of one kind, `training` or `novel`, in the config's order."""

    kind: str
    names: list[str]

    @property
    def heading(self) -> str:
        """The kind as the heading of a column."""
        return self.kind.capitalize()

    @property
    def counted(self) -> str:
        """The kind with the number of its domains: "8 novel"."""
        return f"{len(self.names)} {self.kind}"

    @property
    def said(self) -> str:
        """The number of domains: "8 novel domains"."""
        return so_many(len(self.names), f"{self.kind} domain")


def domains_of(run: Run) -> list[Domains]:
    """The kinds of domains that a run has: training domains first."""
    kinds = (Domains("training", list(run.training)), Domains("novel", list(run.novel)))
    return [domains for domains in kinds if domains.names]


def partly_known(run: Run, domains: Domains) -> str:
    """How many test documents of `domains` have other pieces in train, in a sentence; empty where none has."""
    cards = {name: read_json(run.folder / "corpus" / name / "card.json")["origins"] for name in domains.names}
    counts = {name: (card["test_in_train"], card["test"]) for name, card in cards.items() if card["test_in_train"]}
    counts = dict(sorted(counts.items(), key=lambda one: one[1][0] / one[1][1], reverse=True))
    several = ", ".join(f"{name} {known:,} of {every:,}" for name, (known, every) in counts.items())
    every = sum(card["test"] for card in cards.values())
    return (
        f"Of {every:,} test documents of the {domains.said}, {sum(known for known, _ in counts.values()):,} have other "
        f"pieces in train ({several}): numbers there are for documents that are known in part, not for new ones."
        if counts
        else ""
    )
