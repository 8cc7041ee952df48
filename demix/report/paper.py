"""The numbers of Tables 3 to 7 and 13 of Gururangan et al. 2021 (arXiv:2108.05036), as printed."""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from demix.run.run import Run
from demix.settings import written

# The paper's names of the sizes in Table 2, by preset.
SIZES = {"gpt3-small": "125M", "gpt3-medium": "350M", "gpt3-large": "760M", "gpt3-xl": "1.3B"}


@dataclass(frozen=True)
class Printed:
    """What one table of the paper prints for one size, by the labels of the table of the same name here.

    `column` is a column of numbers by row of our table. `rows` are rows of numbers by column of our table: a domain of
    the paper, or the paper's mean over domains, whose name begins with "mean". One of the two is empty.
    """

    table: str
    preset: str
    column: dict[str, float] = field(default_factory=dict)
    rows: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What marks the numbers in our table."""
        return f"Paper, {SIZES[self.preset]}"


def size_of(run: Run) -> str | None:
    """The preset whose size in the paper a run has, or None. A preset with changed sizes has no size of the paper."""
    given = written(run.config.architecture)
    changed = given.keys() - {"preset", "context"} or run.context != 1024
    return given["preset"] if given.get("preset") in SIZES and not changed else None


@cache
def printed() -> tuple[Printed, ...]:
    """All entries of paper.json."""
    return tuple(Printed(**entry) for entry in json.loads(Path(__file__).with_name("paper.json").read_text("utf-8")))


def nearest(table: str, preset: str | None) -> Printed | None:
    """What the paper prints in `table` for the size `preset`, or else for the smallest size in that table.

    None for a table that is not the paper's.
    """
    entries = [one for one in printed() if one.table == table]
    return next((one for one in entries if one.preset == preset), next(iter(entries), None))
