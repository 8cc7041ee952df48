"""The commands that write, check and pin configs."""

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demix.errors import DemixError, printable

if TYPE_CHECKING:
    from demix.run.run import Run

app = typer.Typer()


@app.command(rich_help_panel="Data")
def init(
    texts: Annotated[
        list[str],
        typer.Argument(help="The text of each training domain: files, folders, globs in quotes."),
    ],
    novel: Annotated[
        list[str] | None, typer.Option(help="The text of a domain to be added after the training.")
    ] = None,
    field: Annotated[str | None, typer.Option(help="The field of the text in records; `text` by default.")] = None,
    run: Annotated[str, typer.Option(help="The name of the run.")] = "mine",
) -> None:
    """Print a config for your own texts, a domain each, with sizes that fit them.

    Example: demix init letters.txt recipes.txt > mine.yaml
    """
    from demix.config.names import NAME, NAMED
    from demix.data.init import outline

    if not re.fullmatch(NAME, run):
        raise DemixError(f"--run {run}", "is not a valid name", f"use one {NAMED}")

    schema = Path(__file__).parents[2] / "workflow" / "schemas" / "config.schema.yaml"
    known = os.path.relpath(schema) if schema.is_file() else None
    # Reading texts logs the steps of a data stage, which are noise here.
    logging.getLogger("demix").setLevel(logging.ERROR)
    print(outline(run, texts, novel or [], field, known), end="")


@app.command(rich_help_panel="Data")
def config(
    file: Annotated[Path | None, typer.Argument(help="A config file.")] = None,
    values: Annotated[bool, typer.Option("--values", help="Print every value, defaults included, instead.")] = False,
    reference: Annotated[bool, typer.Option("--reference", help="Print the reference of all keys instead.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of configs instead.")] = False,
    pin: Annotated[
        bool,
        typer.Option(
            "--pin",
            help="Print what pins the sources instead, ready to paste: digests of files, which are fetched once, and "
            "commits.",
        ),
    ] = False,
) -> None:
    """Check a config file and say what it will run.

    Example: demix config config/sample.yaml
    """
    import yaml

    from demix.config.reference import editor_schema
    from demix.config.reference import reference as keys
    from demix.run.check import load_run

    if reference:
        print(keys(), end="")
    elif schema:
        print(editor_schema(), end="")
    elif file is None:
        raise DemixError("FILE", "is missing", "name a config file, such as config/sample.yaml")
    elif pin:
        _pin(file)
    elif values:
        print(yaml.safe_dump(load_run(file).config.values, sort_keys=False, allow_unicode=True), end="")
    else:
        run = load_run(file)
        run.config.refuse_missing_files(file)
        print(printable(f"{file} is valid. It runs:"))
        for head, text in _will_run(run):
            print(f"  {head:17} {text}")
        print(printable(f"demix plan {file} estimates time and disk; demix config --values {file} prints every value."))


def _will_run(run: "Run") -> list[tuple[str, str]]:
    """What a config runs: heads and lines."""
    from demix.plan.jobs import count_jobs

    lines = [("run", str(run.folder))]
    named = {f"{kind} domains": list(names) for kind, names in run.config.domains.kinds.items()}
    for head, names in (named | {"models": [model.name for model in run.trained]}).items():
        lines.append((head, ": ".join(filter(None, (str(len(names)), ", ".join(names))))))
    if run.adaptations:
        lines.append(("adaptations", f"{len(run.adaptations)} of {run.config.adaptation.tokens:,} tokens at most"))
    return [*lines, ("jobs", f"{sum(count_jobs(run).values()):,}, less those that are done")]


def _pin(file: Path) -> None:
    """Print what pins a config's sources. A source that cannot be read is named, and the exit status is then 1."""
    import yaml

    from demix.data.fetch import check_network
    from demix.data.pins import pins
    from demix.data.sources import Source, pinned
    from demix.files import scratch
    from demix.run.check import load_run
    from demix.settings import settings_from, written

    run, failed, printed = load_run(file, allow_branches=True), False, dict[str, Any]()
    sources = {key: settings_from(Source, written(source)) for key, source in run.config.of_text.items()}
    check_network(source for source in sources.values() if pinned(source, 0) is None)
    with scratch(run.folder / "pins") as folder:
        for key, source in sources.items():
            try:
                found = pins(source, folder)
            except DemixError as error:
                failed = True
                logging.getLogger("demix").error("%s: %s", key, error)
                continue
            section = printed
            for name in key.split(".") if found else ():
                section = section.setdefault(name, {})
            section.update(found)
    if printed:
        print(yaml.safe_dump(printed, width=120, sort_keys=False), end="")
    if failed:
        raise typer.Exit(1)
