"""What a report is made of: tables, figures and pages, each declared and made by one module of `demix.report.items`.

No pandas, altair or jinja2 is loaded here: the workflow asks what files a report has.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from demix.report.material import Material
from demix.report.needs import Need
from demix.report.table import Table


class Group(StrEnum):
    """The headings under which the first page of a run lists tables and figures, in its order."""

    PAPER = "Tables of the paper"
    FURTHER = "Further tables"
    FIGURES = "Figures"
    FAMILIES = "Families"
    VARIANTS = "Variants"
    TASKS = "Tasks"
    NONE = ""


# The suffixes of files, each with the name of the format on the page of Snakemake; empty for those it does not show.
Formats = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Item(ABC):
    """A table, a figure or a page of a report.

    `heading` is its title. Sorting headings gives the order of the paper: hence the second blank in some, which no page
    shows. `place` orders the items of a group; those of one place stand in the order of their names. A run without what
    it `needs` has no such item. The page of Snakemake has it under `category`, and sorts these.

    The registry fills in what the module says: `name`, the module's, names the files; `caption`, its docstring,
    explains the item on the page of Snakemake; `make`, its function, makes the item.
    """

    heading: str
    group: Group = Group.NONE
    place: int = 99
    needs: tuple[Need, ...] = ()
    category: str = ""
    folder: str = ""
    formats: Formats = (("html", "HTML"),)
    name: str = ""
    caption: str = ""
    make: Callable[[Material], Any] = NotImplemented

    @property
    def title(self) -> str:
        """The heading as a page shows it."""
        return " ".join(self.heading.split())

    @property
    def files(self) -> dict[str, str]:
        """The paths of its files below the folder of a report, by suffix."""
        return {suffix: f"{self.folder}/{self.name}.{suffix}".lstrip("/") for suffix, _ in self.formats}

    @abstractmethod
    def write(self, material: Material, output: Path) -> None:
        """Write its files below `output`, the folder of a report."""


@dataclass(frozen=True)
class TableItem(Item):
    """A table; `make` returns it without name and title. The chart that `above` draws, if it is given, stands above."""

    category: str = "Tables"
    above: Callable[[Material], Any] | None = None
    folder: str = "tables"
    formats: Formats = (("html", "HTML"), ("md", ""), ("tex", "LaTeX"))

    def made(self, material: Material) -> Table:
        """The table, beside the paper's numbers where the paper has such a table, without lines that have no number."""
        from demix.report.paper import beside_paper

        table: Table = self.make(material)
        return beside_paper(table.called(self.name, self.title).filled(), material.run)

    def write(self, material: Material, output: Path) -> None:
        from demix.report.figures import inline
        from demix.report.formats import write_table

        drawing = inline(self.above(material)) if self.above else ""
        write_table(self.made(material).noted(material.scale_note), output / self.folder, drawing)


@dataclass(frozen=True)
class FigureItem(Item):
    """A figure; `make` returns a chart of Vega-Lite and the text below its title."""

    category: str = "Figures"
    folder: str = "figures"
    formats: Formats = (("json", ""), ("html", "Interactive"), ("svg", "SVG"), ("pdf", "PDF"), ("png", ""))

    def drawn(self, material: Material) -> Any:
        """The whole chart, with the look that all figures share."""
        from demix.report.look import finish

        chart, text = self.make(material)
        return finish(chart, self.title, text)

    def write(self, material: Material, output: Path) -> None:
        from demix.report.figures import write_chart

        write_chart(self.name, self.drawn(material), output / self.folder)


class PageItem(Item):
    """A page; `make` returns its text by suffix."""

    def write(self, material: Material, output: Path) -> None:
        from demix.files import write_text

        for suffix, text in self.make(material).items():
            write_text(output / self.files[suffix], text)
