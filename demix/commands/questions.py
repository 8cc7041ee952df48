"""The command that asks finished runs, or runs under way, in SQL."""

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from demix.commands.options import terminal
from demix.errors import DemixError, printable

app = typer.Typer()


@app.command()
def sql(
    asked: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN …] [QUERY]",
            help="Folders results/<run>, by default the only run; then one SELECT. The last argument is the query "
            "unless it is a folder or a single word. Without a query, standard input has it.",
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(help="table, csv, json, markdown or parquet; by default as the suffix of --output, or table."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="The file to write, instead of standard output.")] = None,
    tables: Annotated[bool, typer.Option("--tables", help="List the tables and their columns instead.")] = False,
) -> None:
    """Ask runs in SQL: one SELECT over tables of results, documents, scores, losses, metrics, lineage, jobs.

    Example: demix sql results/sample "select domain, perplexity from results where model = 'dense'"
    """
    from demix.query.ask import Answers, named_runs
    from demix.query.output import columns_table, format_of, show, write_file, write_parquet, write_text

    folders, query = parted(asked or [])
    form, runs = format_of(format, output), named_runs(folders)
    for run in runs:
        if output and output.resolve().is_relative_to(run.folder.resolve()):
            raise DemixError(output, f"lies in the run {run.name}", "name a file outside of it")
    if form == "parquet" and not output and sys.stdout.isatty():
        raise DemixError("--format parquet", "is nothing for a terminal", "give --output FILE, or a pipe")

    # Codes in a text must not control a terminal.
    shown: Any = sys.stdout
    if sys.stdout.isatty():
        shown = SimpleNamespace(write=lambda text: sys.stdout.write(printable(text)))

    def answered(query: str) -> None:
        with answers.ask(query) as reader:
            if output:
                write_file(reader, form, output)
            elif form == "parquet":
                write_parquet(reader, sys.stdout.buffer)
            elif form == "table":
                show(reader, terminal())
            else:
                write_text(reader, form, shown)

    def answer(query: str) -> None:
        # Python learns of Ctrl-C in its main thread, once that is not in DuckDB.
        with ThreadPoolExecutor(1) as pool:
            task = pool.submit(answered, query)
            try:
                task.result()
            except KeyboardInterrupt:
                answers.interrupt()
                raise

    with Answers(runs) as answers:
        if tables:
            terminal().print(columns_table(answers.described()))
        elif query is None and sys.stdin.isatty():
            raise DemixError("QUERY", "is missing", 'give one SELECT: demix sql RUN "select …", or list the --tables')
        else:
            answer(sys.stdin.read() if query is None else query)


def parted(asked: list[str]) -> tuple[list[Path], str | None]:
    """The folders of runs and the query among the arguments.

    The last argument is the query if it has a space or a bracket and is no folder: a name that is spelt wrong is
    then told from a query.
    """
    if asked and re.search(r"[\s(]|^$", asked[-1]) and not os.path.isdir(asked[-1]):
        return [Path(name) for name in asked[:-1]], asked[-1]
    return [Path(name) for name in asked], None
