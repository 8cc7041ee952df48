"""A table of a report, its printed lines, its formats (HTML, Markdown, LaTeX, terminal), and pages."""

import base64
import gzip
import html
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from tabulate import tabulate

from demix.files import write_text

if TYPE_CHECKING:
    import rich.table


# The number formats of columns, by the end of their headings.
FORMATS = {"%": "{:+.1f}", **dict.fromkeys(("Documents", "Pieces", "Tokens"), "{:,.0f}")}


@dataclass(frozen=True)
class Cell:
    """A printed cell: its text, the second line (may be empty), whether it is bold, and the key for sorting."""

    text: str
    beneath: str
    best: bool
    is_text: bool
    key: str


@dataclass(frozen=True)
class Line:
    """A printed line of a table; `summary` is True if it is the mean of the lines above."""

    label: str
    cells: list[Cell]
    summary: bool
    position: int


@dataclass(frozen=True)
class Table:
    """A table of numbers, with caption and notes, and a name and title of its own.

    `frame` has one row per label, and NaN (or "") if the run has no such evaluation. `formats` maps a column, or the
    end of its heading, to a format. Other columns have the format of `FORMATS`, or else two decimals. `summaries` are
    the labels of rows with the mean of the rows above. `best` is True for bold cells. `beneath` has the second lines of
    cells. A `long` table may span several pages.
    """

    frame: pd.DataFrame
    caption: str = ""
    notes: tuple[str, ...] = ()
    formats: dict[str, str] = field(default_factory=dict)
    summaries: frozenset[str] = frozenset()
    best: pd.DataFrame = field(default_factory=pd.DataFrame)
    beneath: pd.DataFrame = field(default_factory=pd.DataFrame)
    long: bool = False
    name: str = ""
    title: str = ""

    def renamed(self, columns: dict[str, str]) -> "Table":
        """This table with renamed columns."""
        frames = {name: getattr(self, name).rename(columns=columns) for name in ("frame", "best", "beneath")}
        return replace(self, **frames)

    def noted(self, *notes: str) -> "Table":
        """This table with more notes below it."""
        return replace(self, notes=(*self.notes, *notes))

    def filled(self) -> "Table":
        """This table without the rows and columns that have no numbers, and with a note that names them."""
        numbers = self.frame.select_dtypes("number").notna()
        if not numbers.to_numpy().any():
            return replace(self, notes=("This run has no numbers for this table.", *self.notes))
        rows = [str(label) for label in numbers.index[~numbers.any(axis=1)]]
        columns = list(numbers.columns[~numbers.any(axis=0)])
        kept = replace(self, frame=self.frame.drop(index=rows, columns=columns))
        return kept.noted(f"Without numbers in this run: {', '.join([*rows, *columns])}.") if rows or columns else kept

    @property
    def columns(self) -> dict[str, bool]:
        """The headings of the columns, each with True if the column contains text."""
        return {str(name): values.dtype.kind not in "fi" for name, values in self.frame.items()}

    def _format(self, column: str) -> str:
        known = self.formats | {end: form for end, form in FORMATS.items() if end not in self.formats}
        return known.get(column) or next((known[end] for end in known if column.endswith(end)), "{:.2f}")

    def lines(self) -> Iterator[Line]:
        """The lines as every format prints them."""
        columns, like = self.columns, {"index": self.frame.index, "columns": self.frame.columns}
        best = self.best.reindex(**like, fill_value=False).astype(bool)
        beneath = self.beneath.reindex(**like, fill_value="").fillna("")
        forms = [self._format(name) for name in columns]
        known = (frame.itertuples(index=False, name=None) for frame in (self.frame, beneath, best))
        for position, (label, *values) in enumerate(zip(self.frame.index, *known, strict=True)):
            cells = [
                Cell(cell(value, form), str(below), bold, is_text, _key(value))
                for value, below, bold, form, is_text in zip(*values, forms, columns.values(), strict=True)
            ]
            yield Line(str(label), cells, label in self.summaries, position)


def cell(value: Any, form: str) -> str:
    """A printed value: "–" if it is missing; a minus sign instead of a hyphen; no sign if it rounds to zero."""
    if isinstance(value, str):
        return value or "–"
    if pd.isna(value):
        return "–"
    text = form.format(value)
    return (text if any(digit in text for digit in "123456789") else text.lstrip("+-")).replace("-", "−")


def _key(value: Any) -> str:
    """The key by which a page sorts a cell."""
    if isinstance(value, str):
        return value
    return "" if pd.isna(value) else f"{value:.10g}"


_ENVIRONMENT = Environment(
    loader=PackageLoader("demix.report", "pages"),
    autoescape=True,
    undefined=StrictUndefined,
    keep_trailing_newline=True,
)
_MARKDOWN = _ENVIRONMENT.overlay(autoescape=False, trim_blocks=True, lstrip_blocks=True)


@cache
def _packed(name: str) -> str:
    """A file of DataTables, as the package itables bundles it: compressed, in base64."""
    from itables.utils import read_package_file

    return base64.b64encode(gzip.compress(read_package_file("html", name).encode(), mtime=0)).decode()


_ENVIRONMENT.globals |= {
    "datatables": lambda: _packed("dt_bundle.js"),
    "datatables_style": lambda: _packed("dt_bundle.css"),
}


def render(template: str, **values: Any) -> str:
    """The HTML page made from pages/`template`.html. Values are escaped, except Vega's code, charts and drawings.

    The chart is JSON text in which "<" is written as \\u003c.
    """
    return _ENVIRONMENT.get_template(f"{template}.html").render(**values)


def render_markdown(template: str, **values: Any) -> str:
    """The text made from pages/`template`.md; values are not escaped, and several empty lines become one."""
    return re.sub(r"\n{3,}", "\n\n", _MARKDOWN.get_template(f"{template}.md").render(**values)).strip() + "\n"


_ESCAPED: dict[str, str | int | None] = {character: f"\\{character}" for character in "&%_#{}$"}
_ESCAPED["\\"] = "\\textbackslash "
_TYPESET: dict[str, str | int | None] = {"λ": r"$\lambda$", "τ": r"$\tau$", "±": r"$\pm$", "×": r"$\times$"}
_TYPESET |= {"“": "``", "”": "''", "’": "'", "…": r"\ldots{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}
# A page of a table with more columns shows intervals only on request.
WIDE = 7


def write_table(table: Table, output_dir: Path) -> None:
    """Write `<name>.html`, `.md` and `.tex` into `output_dir`."""
    page = render("table", paragraphs=[table.caption], **part_of_page(table))
    for suffix, text in (("html", page), ("md", markdown(table)), ("tex", latex(table))):
        write_text(output_dir / f"{table.name}.{suffix}", text)


def part_of_page(table: Table) -> dict[str, Any]:
    """`table` in the form for templates of pages; a mean is in one group with the lines above it."""
    groups: list[list[Line]] = [[]]
    for line in table.lines():
        if groups[-1] and groups[-1][-1].summary and not line.summary:
            groups.append([])
        groups[-1].append(line)
    headings = {"text_headings": [name for name, is_text in table.columns.items() if is_text]}
    about = {"title": table.title, "caption": table.caption, "notes": table.notes}
    # In a wide table, intervals would push columns off the screen.
    wide = len(table.columns) > WIDE and any(cell.beneath for line in table.lines() for cell in line.cells)
    return about | headings | {"headings": ["", *table.columns], "groups": groups, "wide": wide}


def markdown(table: Table) -> str:
    """`table` as Markdown: title and caption, the cells, the notes."""

    def shown(cell: Cell) -> str:
        text = f"**{as_markdown(cell.text)}**" if cell.best else as_markdown(cell.text)
        return f"{text}<br>{cell.beneath}" if cell.beneath else text

    rows = [[as_markdown(line.label), *map(shown, line.cells)] for line in table.lines()]
    body = tabulate(
        rows,
        # Without lines there is no column of labels.
        headers=[*([""] if rows else []), *map(as_markdown, table.columns)],
        tablefmt="pipe",
        colalign=["left", *("left" if is_text else "right" for is_text in table.columns.values())],
        disable_numparse=True,
    )
    caption, *notes = (as_markdown(line) for line in (table.caption, *table.notes))
    return "\n\n".join([f"**{table.title}.** {caption}", body, *(f"*{note}*" for note in notes)]) + "\n"


def as_markdown(text: object) -> str:
    """`text` as plain text in Markdown, without markup, HTML, links, line ends or ends of cells."""
    line = html.escape(" ".join(str(text).split()), quote=False)
    # Without this invisible break GitHub turns addresses into links.
    line = re.sub(r"(?<=:)(?=//)|(?<=www)(?=\.)|(?=@)", "\u200b", line, flags=re.IGNORECASE)
    return re.sub(r"([\\`*_\[\]|#~$!])", r"\\\1", line)


def markdown_rows(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Rows of texts as a table of Markdown; empty without rows."""
    head, *body = ([as_markdown(cell) for cell in line] for line in (heads, *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body)) if body else ""


def terminal(table: Table) -> "rich.table.Table":
    """`table` for a terminal; the second line of a cell follows the first."""
    import rich.table

    shown = rich.table.Table(title=table.title, title_justify="left", caption="\n".join((table.caption, *table.notes)))
    shown.caption_justify = "left"
    lines = list(table.lines())
    numbered = [line.label for line in lines] == [str(number) for number in range(1, len(lines) + 1)]
    if not numbered:
        shown.add_column("")
    for name, is_text in table.columns.items():
        shown.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for line in lines:
        cells = [f"{cell.text} {cell.beneath}".strip() for cell in line.cells]
        shown.add_row(*([] if numbered else [line.label]), *cells)
    return shown


def latex(table: Table) -> str:
    """`table` for LaTeX with booktabs; a long one as a longtable."""
    rule = "" if table.long else "\\midrule\n"
    lines = list(table.lines())
    shown = pd.DataFrame(
        [[_latex_cell(cell) for cell in line.cells] for line in lines],
        [rule * line.summary + _typeset(line.label) for line in lines],
        [*map(_typeset, table.columns)],
    )
    caption = _typeset(" ".join([f"{table.title}. {table.caption}", *table.notes]))
    text = shown.style.to_latex(
        hrules=True,
        column_format="l" + "".join("l" if is_text else "r" for is_text in table.columns.values()),
        position_float=None if table.long else "centering",
        environment="longtable" if table.long else None,
        caption=caption,
        label=f"tab:demix-{table.name}",
    )
    # Further pages have only the title, and a float ignores the type size around it.
    text = text.replace(rf"\caption[]{{{caption}}}", rf"\caption[]{{{_typeset(table.title)}, continued}}")
    text = f"{{\\small\n{text}}}\n" if table.long else text.replace("\\centering\n", "\\centering\n\\small\n")
    packages = "booktabs,longtable" if table.long else "booktabs"
    return f"% needs \\usepackage{{{packages}}}\n{text}".replace("−", "$-$").replace("–", "--")


def _latex_cell(cell: Cell) -> str:
    text = rf"\textbf{{{_typeset(cell.text)}}}" if cell.best else _typeset(cell.text)
    # Without braces LaTeX would read a bracket after the line break as the length of the break.
    return rf"\shortstack[r]{{{text}\\{{\tiny {_typeset(cell.beneath)}}}}}" if cell.beneath else text


def _typeset(text: str) -> str:
    return text.translate(str.maketrans(_ESCAPED | _TYPESET))
