"""The elements of a report: tables, figures and pages. `demix.report.items` declares them; one function makes each.

This module does not load pandas, altair or jinja2, since the workflow reads it to know the files of a report.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demix.report.needs import Need

if TYPE_CHECKING:
    from demix.report.run_data import RunData
    from demix.report.table import Table


# Suffixes of files, each with the name of the format in Snakemake's report; empty for files that it does not show.
Formats = tuple[tuple[str, str], ...]
# The note below every table and below the claims. The first page has the whole text, `demix.report.paper.scale_note`.
SCALE = "Compare only rankings with the paper, not values: the report's first page (index.html) says why."


def paragraphs(function: "Callable[[RunData], Any]") -> list[str]:
    """The paragraphs of a function's docstring, each as one line."""
    return [" ".join(paragraph.split()) for paragraph in cleandoc(function.__doc__ or "").split("\n\n")]


def defined(note: str, shown: str) -> str:
    """`note` without its definitions (sentences that begin with “term”:) of terms that `shown` does not contain.

    A definition ends where the next one begins. The last letter of “top-k” and “last n” stands for a number.
    """
    parts = [(re.match("“(.+?)”:", part), part) for part in re.split(r"(?<=\.) (?=“)", note)]
    return " ".join(part for term, part in parts if not term or term[1].rstrip("kn").lower() in shown.lower())


@dataclass(frozen=True)
class Item(ABC):
    """A table, a figure or a page of a report, made by the function `name` of a module of `demix.report.items`.

    `heading` is its title. Some headings have a second blank, which no page shows, so that sorting the headings gives
    the order of the paper. A run that lacks one of its `needs` has no such item. Snakemake's report lists it under
    `category`, in sorted order. Its files are called `name`, below `folder` of a report.
    """

    module: str
    name: str
    heading: str
    needs: tuple[Need, ...] = ()
    category: str = ""
    folder: str = ""
    formats: Formats = (("html", "HTML"),)

    @property
    def make(self) -> "Callable[[RunData], Any]":
        """The function that makes the item."""
        found: Callable[[RunData], Any] = getattr(import_module(f"demix.report.items.{self.module}"), self.name)
        return found

    @property
    def caption(self) -> str:
        """The docstring of the item's function. The paragraphs after the first are notes in the case of a table."""
        return "\n\n".join(paragraphs(self.make))

    @property
    def title(self) -> str:
        """The heading as a page shows it."""
        return " ".join(self.heading.split())

    @property
    def files(self) -> dict[str, str]:
        """The paths of its files, by suffix, relative to the folder of a report."""
        return {suffix: f"{self.folder}/{self.name}.{suffix}".lstrip("/") for suffix, _ in self.formats}

    @abstractmethod
    def write(self, data: "RunData", output: Path) -> None:
        """Write its files below `output`, the folder of a report."""


@dataclass(frozen=True)
class TableItem(Item):
    """A table; its function returns the numbers and notes."""

    category: str = "Tables"
    folder: str = "tables"
    formats: Formats = (("html", "HTML"), ("md", ""), ("tex", "LaTeX"))

    def made(self, data: "RunData") -> "Table":
        """The table without empty lines, with the paper's numbers if the paper has this table.

        Its notes define only the terms that are in its rows, columns or cells of text.
        """
        from demix.report.paper import with_paper

        caption, *notes = paragraphs(self.make)
        table = replace(self.make(data), name=self.name, title=self.title, caption=caption).filled()
        notes = [defined(note, table.frame.to_string()) for note in notes]
        return with_paper(table.noted(*filter(None, notes)), data.run)

    def write(self, data: "RunData", output: Path) -> None:
        from demix.report.table import write_table

        write_table(self.made(data).noted(SCALE), output / self.folder)


@dataclass(frozen=True)
class FigureItem(Item):
    """A figure; its function returns a Vega-Lite chart, and the part of the caption about this run (may be empty)."""

    category: str = "Figures"
    folder: str = "figures"
    formats: Formats = (("json", ""), ("html", "Interactive"), ("svg", "SVG"), ("pdf", "PDF"))

    def drawn(self, data: "RunData") -> Any:
        """The whole chart, with the style of all figures."""
        from demix.report.charts import finish

        chart, of_run = self.make(data)
        return finish(chart, self.title, f"{self.caption} {of_run}".strip())

    def write(self, data: "RunData", output: Path) -> None:
        from demix.report.charts import write_chart

        write_chart(self.name, self.drawn(data), output / self.folder)


@dataclass(frozen=True)
class PageItem(Item):
    """A page; its function returns the page's text by suffix."""

    def write(self, data: "RunData", output: Path) -> None:
        from demix.files import write_text

        for suffix, text in self.make(data).items():
            write_text(output / self.files[suffix], text)
