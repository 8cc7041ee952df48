"""Tables as HTML, Markdown and LaTeX, and for a terminal."""

import html
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from demix.files import write_text
from demix.report.page import render
from demix.report.table import Cell, Line, Table

if TYPE_CHECKING:
    import rich.table

_ESCAPED: dict[str, str | int | None] = {character: f"\\{character}" for character in "&%_#{}$"}
_ESCAPED["\\"] = "\\textbackslash "
_TYPESET: dict[str, str | int | None] = {"λ": r"$\lambda$", "τ": r"$\tau$", "±": r"$\pm$", "×": r"$\times$"}
_TYPESET |= {"“": "``", "”": "''", "’": "'", "…": r"\ldots{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}
# The most columns of a page that shows intervals before it is asked for them.
WIDE = 7


def write_table(table: Table, output_dir: Path, drawing: str = "") -> None:
    """Write `<name>.html`, `.md` and `.tex` into `output_dir`; `drawing`, an SVG, leads the page."""
    for suffix, text in (("html", page(table, drawing)), ("md", markdown(table)), ("tex", latex(table))):
        write_text(output_dir / f"{table.name}.{suffix}", text)


def page(table: Table, drawing: str = "") -> str:
    """`table` as a page of its own."""
    return render("table", paragraphs=[table.caption], drawing=drawing, **part_of_page(table))


def part_of_page(table: Table) -> dict[str, Any]:
    """`table` as the templates of pages take it; averages are in one group with the lines above them."""
    groups: list[list[Line]] = [[]]
    for line in table.lines():
        if groups[-1] and groups[-1][-1].summary and not line.summary:
            groups.append([])
        groups[-1].append(line)
    headings = {"text_headings": [name for name, is_text in table.columns.items() if is_text]}
    about = {"title": table.title, "caption": table.caption, "notes": table.notes}
    # So many intervals would press other columns out of the screen.
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
        # Without lines there are no labels, and no column of them.
        headers=[*([""] if rows else []), *map(as_markdown, table.columns)],
        tablefmt="pipe",
        colalign=["left", *("left" if is_text else "right" for is_text in table.columns.values())],
        disable_numparse=True,
    )
    caption, *notes = (as_markdown(line) for line in (table.caption, *table.notes))
    return "\n\n".join([f"**{table.title}.** {caption}", body, *(f"*{note}*" for note in notes)]) + "\n"


def as_markdown(text: object) -> str:
    """`text` as plain text in Markdown: no markup, no HTML, no link, no end of a line or cell."""
    line = html.escape(" ".join(str(text).split()), quote=False)
    # Without a break GitHub makes links of addresses.
    line = re.sub(r"(?<=:)(?=//)|(?<=www)(?=\.)|(?=@)", "\u200b", line, flags=re.IGNORECASE)
    return re.sub(r"([\\`*_\[\]|#~$!])", r"\\\1", line)


def markdown_rows(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Rows of texts as a table of Markdown; empty without rows."""
    head, *body = ([as_markdown(cell) for cell in line] for line in (heads, *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body)) if body else ""


def terminal(table: Table) -> "rich.table.Table":
    """`table` for a terminal; the second line of a cell stands behind the first."""
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
    caption = _typeset(" ".join([f"{table.title}. {table.caption}", *table.notes]))
    layout = "l" + "".join("l" if is_text else "r" for is_text in table.columns.values())
    head = "\\toprule\n" + " & ".join(["", *map(_typeset, table.columns)]) + " \\\\\n\\midrule\n"
    rows = "".join(
        ("\\midrule\n" if line.summary and not table.long else "")
        + " & ".join([_typeset(line.label), *map(_latex_cell, line.cells)])
        + " \\\\\n"
        for line in table.lines()
    )
    label = f"\\label{{tab:demix-{table.name}}}"
    if table.long:
        # The whole caption stands on the first page alone.
        text = (
            f"% needs \\usepackage{{booktabs,longtable}}\n{{\\small\n\\begin{{longtable}}{{{layout}}}\n"
            f"\\caption{{{caption}}} {label} \\\\\n{head}\\endfirsthead\n"
            f"\\caption[]{{{_typeset(table.title)}, continued}} \\\\\n{head}\\endhead\n"
            f"\\midrule\n\\multicolumn{{{len(layout)}}}{{r}}{{Continued on next page}} \\\\\n\\midrule\n\\endfoot\n"
            f"\\bottomrule\n\\endlastfoot\n{rows}\\end{{longtable}}\n}}\n"
        )
    else:
        text = (
            "% needs \\usepackage{booktabs}\n\\begin{table}\n\\centering\n\\small\n"
            f"\\caption{{{caption}}}\n{label}\n"
            f"\\begin{{tabular}}{{{layout}}}\n{head}{rows}\\bottomrule\n\\end{{tabular}}\n\\end{{table}}\n"
        )
    return text.replace("−", "$-$").replace("–", "--")


def _latex_cell(cell: Cell) -> str:
    text = rf"\textbf{{{_typeset(cell.text)}}}" if cell.best else _typeset(cell.text)
    # Without braces LaTeX would read a bracket after the line break as the length of the break.
    return rf"\shortstack[r]{{{text}\\{{\tiny {_typeset(cell.beneath)}}}}}" if cell.beneath else text


def _typeset(text: str) -> str:
    return text.translate(str.maketrans(_ESCAPED | _TYPESET))
