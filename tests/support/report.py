"""What a report shows: cells of tables, as they are made and as other programs read them, data of charts, verdicts."""

import json
import math
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
from markdown_it import MarkdownIt

from demix.report.claims import claims, rows
from demix.report.item import FigureItem, Item, TableItem
from demix.report.items import ITEMS
from demix.report.run_data import Pairs, RunData
from demix.report.table import Table
from demix.report.verdict import Verdict


@dataclass(frozen=True)
class Shown:
    """A table as it is printed: its cells, the lines beneath them, which cells are bold, and the marked lines."""

    cells: pd.DataFrame
    beneath: pd.DataFrame
    bold: pd.DataFrame
    marked: tuple[str, ...] = ()

    @property
    def numbers(self) -> pd.DataFrame:
        """The cells as numbers, NaN for text."""
        return self.cells.map(lambda cell: math.nan if (found := number(cell)) is None else float(found))

    @property
    def of_run(self) -> "Shown":
        """The same without the numbers that the paper prints."""
        frames = (self.cells, self.beneath, self.bold)
        kept = [[not name.startswith("Paper, ") for name in names] for names in (self.cells.index, self.cells.columns)]
        return Shown(*(frame.loc[kept[0], kept[1]] for frame in frames), self.marked)

    def wrong(self, expected: pd.DataFrame) -> list[tuple[str, str, str, object]]:
        """Where the table does not show what is expected: line, column, cell, and the value expected there."""
        return [
            (line, column, self.cells.at[line, column], value)
            for column, values in expected.items()
            for line, value in values.items()
            if not says(self.cells.at[line, column], value)
        ]


def number(cell: str) -> Decimal | None:
    """What a cell says, to the digit printed; None for text."""
    try:
        return Decimal(cell.replace("−", "-").replace(",", "").rstrip("%× *"))
    except InvalidOperation:
        return None


def says(cell: str, value: Any) -> bool:
    """Whether a cell shows `value`: the same text, a dash for NaN, or the number rounded to the digits printed."""
    if isinstance(value, str):
        return cell == value
    if math.isnan(value):
        return cell == "–"
    found = number(cell)
    # Half of the last digit, and what binary fractions lack.
    return found is not None and abs(float(found) - value) <= 0.5000001 * 10.0 ** int(found.as_tuple().exponent)


def read_table(path: Path) -> Shown:
    """The table of a Markdown file of a report, without what the paper prints."""
    (found,) = tables_of(path.read_text(encoding="utf-8"))
    return found.of_run


def tables_of(text: str) -> list[Shown]:
    """The tables of a text in Markdown."""
    return in_html(MarkdownIt("commonmark", {"html": True}).enable("table").render(text), "<table>")


def read_page(path: Path) -> list[Shown]:
    """The tables of numbers of a page, without what the paper prints."""
    return [table.of_run for table in in_html(path.read_text(encoding="utf-8"), '<table class="compact')]


def in_html(page: str, begin: str) -> list[Shown]:
    """The tables of a page whose tag begins so; a cell's second line is in a tag of its own or behind a break."""
    found = []
    for text in re.findall(f"{begin}.*?</table>", page, re.DOTALL):
        for old, new in ((" hidden", ' class="hidden"'), ("<br>", "\n"), ('<span class="beneath">', "<span>\n")):
            text = text.replace(old, new)
        marked, lines = [], []
        for line in ElementTree.fromstring(text).iter("tr"):
            cells = [cell for cell in line if "hidden" not in (cell.get("class"), cell.get("data-order"))]
            read = [("".join(cell.itertext()).strip().partition("\n"), cell) for cell in cells]
            lines.append([(*said[::2], _is_bold(cell)) for said, cell in read])
            marked += [lines[-1][0][0]] * ("marked" in line.get("class", ""))
        (_, *heads), *rows = lines
        index, columns = [row[0][0] for row in rows], [head for head, *_ in heads]
        parts = (pd.DataFrame([[cell[part] for cell in row[1:]] for row in rows], index, columns) for part in range(3))
        found.append(Shown(*parts, tuple(marked)))
    return found


def _is_bold(cell: ElementTree.Element) -> bool:
    return "best" in cell.get("class", "") or cell.find("strong") is not None


def all_items() -> dict[str, Item]:
    """All elements of reports by name."""
    return {item.name: item for item in ITEMS}


def table_of(name: str, data: RunData) -> Table:
    """A table of a report, without rows and columns that have no numbers, and beside the paper's."""
    item = all_items()[name]
    assert isinstance(item, TableItem)
    return item.made(data)


def shown(name: str, data: RunData) -> Shown:
    """The same as its cells are printed, without what the paper prints."""
    return printed(table_of(name, data)).of_run


def printed(table: Table) -> Shown:
    """A table as its cells are printed."""
    lines = [*table.lines()]
    parts = ([[getattr(cell, part) for cell in line.cells] for line in lines] for part in ("text", "beneath", "best"))
    cells, *more = (pd.DataFrame(part, [line.label for line in lines], [*table.columns]) for part in parts)
    return Shown(cells.map(str.strip), *more)


def first_page(data: RunData, folder: Path) -> list[Shown]:
    """The lines of the main table that matter, and its other lines, on the first page of a report of `data`."""
    all_items()["index"].write(data, folder)
    return read_page(folder / "index.html")[:2]


def drawn_as(path: Path, *columns: str) -> pd.DataFrame:
    """The records of a figure that have all of `columns`, each once."""
    data = json.loads(path.read_text(encoding="utf-8"))["datasets"].values()
    rows = [row for records in data for row in records if {*columns} <= row.keys()]
    return pd.DataFrame(rows, columns=list(columns)).drop_duplicates(ignore_index=True)


def verdict(name: str, data: RunData) -> Verdict:
    """The verdict on a claim that can be made of a run."""
    (row,) = (row for row in rows(data.run) if row.name == name)
    own, *others = (data.of_seed(seed) for seed in data.results.by_seed)
    return row.judged(own).among([row.judged(one) for one in others]).verdict


def verdicts(data: RunData) -> dict[str, Verdict]:
    """The verdicts on all claims that can be made of a run."""
    return {claim.name: claim.verdict for claim in claims(data)}


def pairs_of(names: list[str], **columns: Any) -> pd.DataFrame:
    """A line for each of these training domains with each expert, in order, with more columns of numbers."""
    pairs = pd.MultiIndex.from_product([names, names], names=["domain", "expert"]).to_frame(index=False)
    return pairs.assign(kind="training", **columns)


def square_pairs(names: list[str], ratio: np.ndarray, overlap: np.ndarray) -> Pairs:
    """`Pairs` of these training domains from numbers in the order of `pairs_of`."""
    square = (len(names), len(names))
    return Pairs(*(pd.DataFrame(one.reshape(square), index=names, columns=names) for one in (ratio, overlap)))


def drawn(name: str, data: RunData) -> dict[str, Any]:
    """A figure in Vega-Lite's words."""
    item = all_items()[name]
    assert isinstance(item, FigureItem)
    found: dict[str, Any] = item.drawn(data).to_dict()
    return found
