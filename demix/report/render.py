"""A table of a report: its numbers (pandas), what a reader must know of them, and it as HTML, Markdown and LaTeX."""

import html
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from demix.files import write_text
from demix.report.page import render


@dataclass(frozen=True)
class Table:
    """A table of numbers, with title, caption and notes.

    `frame` has one row per label, and NaN (or "") where the run has no such evaluation. `formats` maps a column to a
    format; the default is two decimals. `summaries` are the labels of rows that average the rows above. `best` is True
    for the cells to print bold. `beneath` holds the second lines of cells. A `long` table may span several pages.
    """

    name: str
    title: str
    caption: str
    frame: pd.DataFrame
    notes: tuple[str, ...] = ()
    formats: dict[str, str] = field(default_factory=dict)
    summaries: frozenset[str] = frozenset()
    best: pd.DataFrame | None = None
    beneath: pd.DataFrame | None = None
    long: bool = False

    def text(self) -> pd.DataFrame:
        """The cells as printed."""
        columns = {
            column: [cell(value, self.formats.get(column, "{:.2f}")) for value in values]
            for column, values in self.frame.items()
        }
        return pd.DataFrame(columns, index=self.frame.index, dtype=object)

    def bold(self) -> pd.DataFrame:
        """True for the cells that are printed bold."""
        if self.best is None:
            return pd.DataFrame(False, index=self.frame.index, columns=self.frame.columns)
        return self.best.reindex(index=self.frame.index, columns=self.frame.columns, fill_value=False).astype(bool)

    def second_lines(self) -> pd.DataFrame:
        """The second line of each cell; empty text without one."""
        beneath = self.beneath if self.beneath is not None else pd.DataFrame()
        return (
            beneath.reindex(index=self.frame.index, columns=self.frame.columns, fill_value="").fillna("").astype(object)
        )

    def noted(self, *notes: str) -> "Table":
        """This table with more notes below it."""
        return replace(self, notes=(*self.notes, *notes))


def write_table(table: Table, output_dir: Path) -> None:
    """Write `<name>.html`, `.md` and `.tex` into `output_dir`."""
    for suffix, text in (("html", _html), ("md", markdown), ("tex", _latex)):
        write_text(output_dir / f"{table.name}.{suffix}", text(table))


def cell(value: Any, form: str) -> str:
    """A value as printed: "–" for a missing one, a minus sign for a hyphen, no sign for a value that rounds to zero."""
    if isinstance(value, str):
        return value or "–"
    if pd.isna(value):
        return "–"
    text = form.format(value)
    return (text if any(digit in text for digit in "123456789") else text.lstrip("+-")).replace("-", "−")


def _html(table: Table) -> str:
    return render("table", title=table.title, paragraphs=[table.caption], notes=table.notes, **_cells(table))


def parts_of_page(table: Table) -> dict[str, Any]:
    """`table` as the template "comparison" takes it."""
    return {"title": table.title, "caption": table.caption, "notes": table.notes, **_cells(table)}


def _cells(table: Table) -> dict[str, Any]:
    text, bold, beneath = table.text(), table.bold(), table.second_lines()
    text_columns = [column for column, values in table.frame.items() if values.dtype.kind not in "fi"]
    groups: list[list[dict[str, Any]]] = [[]]
    for position, (label, values) in enumerate(table.frame.iterrows()):
        summary = label in table.summaries
        if groups[-1] and groups[-1][-1]["summary"] and not summary:
            groups.append([])
        cells = [
            {
                "text": text.at[label, column],
                "best": bold.at[label, column],
                "beneath": beneath.at[label, column],
                "is_text": column in text_columns,
                "key": value if isinstance(value, str) else "" if pd.isna(value) else f"{value:.10g}",
            }
            for column, value in values.items()
        ]
        groups[-1].append({"label": label, "summary": summary, "position": position, "cells": cells})
    return {"headings": ["", *table.frame.columns], "text_headings": text_columns, "groups": groups}


def markdown(table: Table) -> str:
    """`table` as Markdown: title and caption, the cells, the notes."""
    text, bold, beneath = table.text().map(as_markdown), table.bold(), table.second_lines()
    text = text.mask(bold, "**" + text + "**") + beneath.mask(beneath != "", "<br>" + beneath)
    text.index = [as_markdown(label) for label in text.index]
    text.columns = [as_markdown(column) for column in text.columns]
    alignment = ["left", *("left" if values.dtype.kind not in "fi" else "right" for _, values in table.frame.items())]
    body = text.to_markdown(colalign=alignment, disable_numparse=True)
    caption, *notes = (as_markdown(line) for line in (table.caption, *table.notes))
    return "\n\n".join([f"**{table.title}.** {caption}", body, *(f"*{note}*" for note in notes)]) + "\n"


def as_markdown(text: object) -> str:
    """`text` as plain text in Markdown: no markup, no HTML, no link, no end of a line or cell."""
    line = html.escape(" ".join(str(text).split()), quote=False)
    # Without a break GitHub makes links of addresses.
    line = re.sub(r"(?<=:)(?=//)|(?<=www)(?=\.)|(?=@)", "\u200b", line, flags=re.IGNORECASE)
    return re.sub(r"([\\`*_\[\]|#~$!])", r"\\\1", line)


def _latex(table: Table) -> str:
    text, bold, beneath = table.text(), table.bold(), table.second_lines()
    cells = text.map(_escape)
    cells = cells.mask(bold, r"\textbf{" + cells + "}")
    # Without braces LaTeX would read a bracket after the line break as the length of the break.
    two_lines = r"\shortstack[r]{" + cells + r"\\{\tiny " + beneath.map(_escape) + "}}"
    style = cells.mask(beneath != "", two_lines).style
    style = style.format_index(escape="latex", axis=0).format_index(escape="latex", axis=1)
    layout = "l" + "".join("l" if values.dtype.kind not in "fi" else "r" for _, values in table.frame.items())
    caption = _escape(" ".join([f"{table.title}. {table.caption}", *table.notes]))
    if table.long:
        body: str = style.to_latex(
            hrules=True, column_format=layout, environment="longtable", caption=caption, label=f"tab:demix-{table.name}"
        )
        # Styler would print the whole caption on every page.
        body = body.replace(rf"\caption[]{{{caption}}}", rf"\caption[]{{{_escape(table.title)}, continued}}")
        text = "% needs \\usepackage{booktabs,longtable}\n{\\small\n" + body + "}\n"
        return text.replace("−", "$-$").replace("–", "--")
    body = style.to_latex(hrules=True, column_format=layout)
    lines = [r"\toprule", r"\midrule", r"\bottomrule"]
    assert all(line in body for line in lines)
    for label in sorted(table.summaries):
        start = f"\n{_escape(label)} &"
        body = body.replace(start, "\n\\midrule" + start)
    text = (
        "% needs \\usepackage{booktabs}\n\\begin{table}\n\\centering\n\\small\n"
        f"\\caption{{{caption}}}\n\\label{{tab:demix-{table.name}}}\n{body}\\end{{table}}\n"
    )
    return text.replace("−", "$-$").replace("–", "--")


def _escape(text: str) -> str:
    for character, command in (("\\", r"\textbackslash "), *((each, f"\\{each}") for each in "&%_#{}$")):
        text = text.replace(character, command)
    for character, command in (
        ("λ", r"$\lambda$"),
        ("±", r"$\pm$"),
        ("“", "``"),
        ("”", "''"),
        ("’", "'"),
        ("…", r"\ldots{}"),
        ("^", r"\textasciicircum{}"),
        ("~", r"\textasciitilde{}"),
    ):
        text = text.replace(character, command)
    return text
