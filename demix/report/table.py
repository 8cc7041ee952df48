"""A table of a report: its numbers (pandas), what a reader must know of them, and its lines as they are printed."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

# The formats of columns whose headings end so.
FORMATS = {"%": "{:+.1f}", **dict.fromkeys(("Documents", "Pieces", "Tokens"), "{:,.0f}")}


@dataclass(frozen=True)
class Cell:
    """A cell as printed: its text, the line beneath it (empty for none), whether it is bold, and what sorts it."""

    text: str
    beneath: str
    best: bool
    is_text: bool
    key: str


@dataclass(frozen=True)
class Line:
    """A line of a table as printed; `summary` tells whether it averages the lines above."""

    label: str
    cells: list[Cell]
    summary: bool
    position: int


@dataclass(frozen=True)
class Table:
    """A table of numbers, with caption and notes, and a name and title of its own.

    `frame` has one row per label, and NaN (or "") where the run has no such evaluation. `formats` maps a column, or how
    its heading ends, to a format; `FORMATS` come next, and two decimals last. `summaries` are the labels of rows that
    average the rows above. `best` is True for the cells to print bold. `beneath` holds the second lines of cells. A
    `long` table may span several pages.
    """

    frame: pd.DataFrame
    caption: str = ""
    notes: tuple[str, ...] = ()
    formats: dict[str, str] = field(default_factory=dict)
    summaries: frozenset[str] = frozenset()
    best: pd.DataFrame | None = None
    beneath: pd.DataFrame | None = None
    long: bool = False
    name: str = ""
    title: str = ""

    def renamed(self, columns: dict[str, str]) -> "Table":
        """This table with other names of columns."""
        frames = {name: getattr(self, name) for name in ("frame", "best", "beneath")}
        frames = {name: one.rename(columns=columns) for name, one in frames.items() if one is not None}
        return replace(self, **frames)

    def noted(self, *notes: str) -> "Table":
        """This table with more notes below it."""
        return replace(self, notes=(*self.notes, *notes))

    def filled(self) -> "Table":
        """This table without the rows and columns that have no numbers, and a note that names them."""
        numbers = self.frame.select_dtypes("number").notna()
        if not numbers.to_numpy().any():
            return replace(self, notes=("This run has no rows for this table.", *self.notes))
        rows = [str(label) for label in numbers.index[~numbers.any(axis=1)]]
        columns = list(numbers.columns[~numbers.any(axis=0)])
        kept = replace(self, frame=self.frame.drop(index=rows, columns=columns))
        return kept.noted(f"Without numbers in this run: {', '.join([*rows, *columns])}.") if rows or columns else kept

    @property
    def columns(self) -> dict[str, bool]:
        """The headings of the columns, each with whether the column holds text."""
        return {str(name): values.dtype.kind not in "fi" for name, values in self.frame.items()}

    def text(self) -> pd.DataFrame:
        """The cells as printed."""
        import pandas as pd

        columns = {
            column: [cell(value, self._format(str(column))) for value in values]
            for column, values in self.frame.items()
        }
        return pd.DataFrame(columns, index=self.frame.index, dtype=object)

    def _format(self, column: str) -> str:
        known = self.formats | {end: form for end, form in FORMATS.items() if end not in self.formats}
        return known.get(column) or next((known[end] for end in known if column.endswith(end)), "{:.2f}")

    def bold(self) -> pd.DataFrame:
        """True for the cells that are printed bold."""
        best = self.frame.iloc[:, :0] if self.best is None else self.best
        return best.reindex(index=self.frame.index, columns=self.frame.columns, fill_value=False).astype(bool)

    def second_lines(self) -> pd.DataFrame:
        """The second line of each cell; empty text without one."""
        beneath = self.frame.iloc[:, :0] if self.beneath is None else self.beneath
        lines = beneath.reindex(index=self.frame.index, columns=self.frame.columns, fill_value="")
        return lines.fillna("").astype(object)

    def lines(self) -> Iterator[Line]:
        """The lines as every format prints them."""
        columns = self.columns
        printed = (frame.to_numpy() for frame in (self.text(), self.second_lines(), self.bold()))
        sorted_by = [[_key(value) for value in values] for _, values in self.frame.items()]
        for position, (label, texts, beneath, best) in enumerate(zip(self.frame.index, *printed, strict=True)):
            keys = (column[position] for column in sorted_by)
            cells = [
                Cell(str(text), str(below), bool(bold), is_text, key)
                for text, below, bold, is_text, key in zip(texts, beneath, best, columns.values(), keys, strict=True)
            ]
            yield Line(str(label), cells, label in self.summaries, position)


def cell(value: Any, form: str) -> str:
    """A value as printed: "–" for a missing one, a minus sign for a hyphen, no sign for a value that rounds to zero."""
    if isinstance(value, str):
        return value or "–"
    if pd.isna(value):
        return "–"
    text = form.format(value)
    return (text if any(digit in text for digit in "123456789") else text.lstrip("+-")).replace("-", "−")


def _key(value: Any) -> str:
    """What a page sorts a cell by."""
    if isinstance(value, str):
        return value
    return "" if pd.isna(value) else f"{value:.10g}"
