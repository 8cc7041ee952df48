"""The command that queries runs in SQL. Runs need not be finished."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from demix.commands.options import terminal
from demix.errors import DemixError, printable

app = typer.Typer()


@app.command(rich_help_panel="Results")
def sql(
    asked: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN …] [QUERY]",
            help="Folders results/<run> (default: the only run), then one SELECT. The last argument is the query, "
            "unless it is a folder or a single word. Without a query, it is read from standard input.",
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="table, csv, json, markdown or (only to a file) parquet; default: by --output's suffix, else table."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="The file to write, instead of standard output.")] = None,
    tables: Annotated[bool, typer.Option("--tables", help="List the tables and their columns instead.")] = False,
) -> None:
    """Query runs in SQL: one SELECT over tables of results, documents, scores, losses, metrics, lineage and jobs.

    Example: demix sql results/sample "select domain, perplexity from results where model = 'dense'"
    """
    from demix.query.ask import Answers, named_runs
    from demix.query.output import format_of, show, write_file, write_text

    folders, query = parted(asked or [])
    form, runs = format_of(format, output), named_runs(folders)
    for run in runs:
        if output and output.resolve().is_relative_to(run.folder.resolve()):
            raise DemixError(output, f"lies in the run {run.name}", "name a file outside the run")
    if form == "parquet" and not output:
        raise DemixError("--format parquet", "needs a file", "give --output FILE")

    # Control codes in a text must not reach a terminal.
    shown: Any = sys.stdout
    if sys.stdout.isatty():
        shown = SimpleNamespace(write=lambda text: sys.stdout.write(printable(text)))
    with Answers(runs) as answers:
        if tables:
            for name, holds, columns in answers.described():
                terminal().print(f"{name}: {holds}", f"    {columns}", sep="\n")
            return
        if query is None and sys.stdin.isatty():
            raise DemixError("QUERY", "is missing", 'give one SELECT: demix sql RUN "select …", or list the --tables')
        try:
            with answers.ask(sys.stdin.read() if query is None else query) as reader:
                if output:
                    write_file(reader, form, output)
                elif form == "table":
                    show(reader, terminal())
                else:
                    write_text(reader, form, shown)
        except RuntimeError as error:
            # DuckDB raises RuntimeError at Ctrl-C.
            raise KeyboardInterrupt from error


def parted(asked: list[str]) -> tuple[list[Path], str | None]:
    """The folders of runs and the query among the arguments.

    The last argument is the query if it has a space or a bracket and is not a folder. A misspelt folder is therefore
    reported as an unknown run.
    """
    if asked and re.search(r"[\s(]|^$", asked[-1]) and not os.path.isdir(asked[-1]):
        return [Path(name) for name in asked[:-1]], asked[-1]
    return [Path(name) for name in asked], None
