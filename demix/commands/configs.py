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
        typer.Argument(help="One text for each training domain: a file, a folder, or a glob in quotes."),
    ],
    novel: Annotated[list[str] | None, typer.Option(help="The text of a novel domain, added after training.")] = None,
    field: Annotated[str | None, typer.Option(help="The field of records that holds the text; default `text`.")] = None,
    run: Annotated[str, typer.Option(help="The name of the run.")] = "mine",
) -> None:
    """Print a config for your own texts: one domain per text, and model sizes that fit the amount of text.

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
            help="Print pins of all sources instead, ready to paste: commits, and digests of files, each of which is "
            "fetched once.",
        ),
    ] = False,
) -> None:
    """Check a config file and print what it will run.

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
    """What a config runs, as pairs of heading and text."""
    from demix.plan.jobs import count_jobs

    lines = [("run", str(run.folder))]
    named = {f"{kind} domains": list(names) for kind, names in run.config.domains.kinds.items()}
    for head, names in (named | {"models": [model.name for model in run.trained]}).items():
        lines.append((head, ": ".join(filter(None, (str(len(names)), ", ".join(names))))))
    if run.adaptations:
        lines.append(("adaptations", f"{len(run.adaptations)} of {run.config.adaptation.tokens:,} tokens at most"))
    return [*lines, ("jobs", f"{sum(count_jobs(run).values()):,}, minus those already done")]


def _pin(file: Path) -> None:
    """Print the pins of a config's sources. Log an error for each source that cannot be read, and then exit with 1."""
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
