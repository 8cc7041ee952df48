"""The files of a report as other programs read them: cells of tables, data of charts, verdicts on claims."""

import json
import math
import re
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
from markdown_it import MarkdownIt

from demix.report.claims import claims, rows
from demix.report.item import FigureItem
from demix.report.items import all_items
from demix.report.material import Material
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

    def keyed(self, *columns: str) -> "Shown":
        """The same with its lines named by the cells of some columns."""
        index = self.cells[[*columns]].agg(", ".join, axis=1)
        cells, beneath, bold = (frame.set_index(index) for frame in (self.cells, self.beneath, self.bold))
        return Shown(cells, beneath, bold)

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


Cells = list[list[tuple[str, str, bool]]]


def tables_of(text: str) -> dict[str, list[Shown]]:
    """The tables of a text in Markdown by the headings above them."""
    found: dict[str, list[Cells]] = {}
    heading = opened = ""
    for token in MarkdownIt("commonmark", {"html": True}).enable("table").parse(text):
        opened = token.type if token.type.endswith("_open") else opened
        children = token.children or []
        if opened == "heading_open" and token.type == "inline":
            heading = "".join(child.content for child in children)
        elif token.type == "table_open":
            found.setdefault(heading, []).append([])
        elif token.type == "tr_open":
            found[heading][-1].append([])
        elif token.type == "inline" and opened in ("th_open", "td_open"):
            lines = "".join("\n" if child.content == "<br>" else child.content for child in children).split("\n")
            bold = any(child.type == "strong_open" for child in children)
            found[heading][-1][-1].append((lines[0], "".join(lines[1:]), bold))
    return {heading: [_shown(table) for table in tables] for heading, tables in found.items()}


def read_table(path: Path) -> Shown:
    """The table of a Markdown file of a report, without what the paper prints."""
    (found,) = tables_of(path.read_text(encoding="utf-8"))[""]
    return found.of_run


def read_page(path: Path) -> list[Shown]:
    """The tables of numbers of a page."""
    found = []
    for text in re.findall('<table class="compact.*?</table>', path.read_text(encoding="utf-8"), re.DOTALL):
        lines: Cells = []
        marked = []
        for line in ElementTree.fromstring(text.replace(" hidden", ' class="hidden"')).iter("tr"):
            cells = [cell for cell in line if cell.get("class") != "hidden" and cell.get("data-order") != "hidden"]
            lines.append(
                [
                    (
                        (cell.text or "").strip(),
                        "".join(below.text or "" for below in cell),
                        "best" in cell.get("class", ""),
                    )
                    for cell in cells
                ]
            )
            marked += [lines[-1][0][0]] * ("marked" in line.get("class", ""))
        found.append(_shown(lines, *marked).of_run)
    return found


def _shown(lines: Cells, *marked: str) -> Shown:
    (_, *heads), *rows = lines
    index, columns = [row[0][0] for row in rows], [head for head, *_ in heads]
    frames = (pd.DataFrame([[cell[part] for cell in row[1:]] for row in rows], index, columns) for part in range(3))
    return Shown(*frames, marked)


def shown(name: str, material: Material, folder: Path) -> Shown:
    """The table `name` of a report of `material`, which is written below `folder`."""
    all_items()[name].write(material, folder)
    return read_table(folder / "tables" / f"{name}.md")


def first_page(material: Material, folder: Path) -> list[Shown]:
    """The lines of the main table that matter, and its other lines, on the first page of a report of `material`."""
    all_items()["index"].write(material, folder)
    return read_page(folder / "index.html")


def drawn_as(path: Path, *columns: str) -> pd.DataFrame:
    """The records of a figure that have all of `columns`, each once."""
    data = json.loads(path.read_text(encoding="utf-8"))["datasets"].values()
    rows = [row for records in data for row in records if {*columns} <= row.keys()]
    return pd.DataFrame(rows, columns=list(columns)).drop_duplicates(ignore_index=True)


def verdict(name: str, material: Material) -> Verdict:
    """The verdict on a claim that can be made of a run."""
    (row,) = (row for row in rows(material.run) if row.name == name)
    own, *others = (material.of_seed(seed) for seed in material.results.by_seed)
    return row.judged(own).among([row.judged(one) for one in others]).verdict


def verdicts(material: Material) -> dict[str, Verdict]:
    """The verdicts on all claims that can be made of a run."""
    return {claim.name: claim.verdict for claim in claims(material)}


def pairs_of(names: list[str], **columns: Any) -> pd.DataFrame:
    """A line for each of these training domains with each expert, in order, with more columns of numbers."""
    pairs = pd.MultiIndex.from_product([names, names], names=["domain", "expert"]).to_frame(index=False)
    return pairs.assign(kind="training", **columns)


def table_of(name: str, material: Material) -> Table:
    """A table as its function makes it: with rows and columns that have no numbers, and without the paper's."""
    item = all_items()[name]
    return replace(item.make(material), name=name, title=item.title)


def drawn(name: str, material: Material) -> dict[str, Any]:
    """A figure in Vega-Lite's words."""
    item = all_items()[name]
    assert isinstance(item, FigureItem)
    found: dict[str, Any] = item.drawn(material).to_dict()
    return found
