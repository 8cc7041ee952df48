"""The command that shows runs side by side."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from demix.commands.options import terminal

app = typer.Typer()


@app.command(rich_help_panel="Results")
def compare(
    runs: Annotated[list[Path], typer.Argument(help="The runs' folders, results/<run>: first the base, then others.")],
    html: Annotated[Path | None, typer.Option(help="A page to write, with all tables.")] = None,
    format: Annotated[Literal["table", "markdown", "json"], typer.Option(help="How to print.")] = "table",
) -> None:
    """Print runs side by side: settings that differ, and the main table with intervals.

    Example: demix compare results/sample results/families
    """
    from demix.report.compare import compare as run
    from demix.report.compared import as_json, as_markdown, tables, write_page
    from demix.report.table import terminal as printed

    compared = run(runs)
    if format == "table":
        for table in tables(compared):
            terminal().print(printed(table))
    else:
        print(as_json(compared) if format == "json" else as_markdown(compared))
    if html is not None:
        write_page(compared, html)
