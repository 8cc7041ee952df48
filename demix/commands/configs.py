"""The commands that write, check and pin configs."""

import logging
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from demix.errors import DemixError, printable

if TYPE_CHECKING:
    from demix.config.config import Config
    from demix.run.models import Model
    from demix.run.run import Run

app = typer.Typer()

# Of more passes over the text of an adaptation `demix config` warns: beyond, a text seen again teaches next to nothing
# (Muennighoff et al. 2023).
MOST_PASSES = 10


@app.command()
def init(
    texts: Annotated[
        list[str],
        typer.Argument(help="The text of each training domain: files, folders, globs in quotes."),
    ],
    novel: Annotated[
        list[str] | None, typer.Option(help="The text of a domain to be added after the training.")
    ] = None,
    field: Annotated[str | None, typer.Option(help="The field of the text in records; `text` by default.")] = None,
    run: Annotated[
        str | None,
        typer.Option(help="The name of the run; by default that of the YAML file that the config is written to."),
    ] = None,
) -> None:
    """Print a config for your own texts, a domain each, with sizes that fit them.

    Example: demix init letters.txt recipes.txt > mine.yaml
    """
    from demix.config.names import NAME, NAMED
    from demix.data.init import outline

    if run is not None and not re.fullmatch(NAME, run):
        raise DemixError(f"--run {run}", "is no name of a run", f"use one {NAMED}")

    schema = Path(__file__).parents[2] / "workflow" / "schemas" / "config.schema.yaml"
    known = os.path.relpath(schema) if schema.is_file() else None
    with _silent():
        printed = outline(run or _free_name(), texts, novel or [], field, known)
    print(printed, end="")


def _free_name() -> str:
    """A name that no run in results/ has: that of the YAML file that is written, or mine; a number sets it apart."""
    try:
        written = Path(os.readlink(f"/proc/self/fd/{sys.stdout.fileno()}"))
    # Elsewhere than on Linux, and where the output is no file.
    except OSError:
        written = Path()
    name = re.sub("[^A-Za-z0-9._-]+", "-", written.stem).strip("._-") if written.suffix in (".yaml", ".yml") else ""
    # The number may take the rest of the 100 characters that the name of a run has.
    name = name[:90] or "mine"
    numbered = (f"{name}-{number}" for number in count(2))
    return next(one for one in chain([name], numbered) if not Path("results", one).exists())


@app.command()
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

    from demix.config.adaptation import PASSES
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
        bounded = run.config.adaptation.passes
        key, cure = ("passes", f"to {PASSES}") if bounded else ("tokens", f"or add passes: {PASSES} to adaptation")
        for name, words, passes in _many_passes(run.config):
            cause = f"adapts to {name} in about {passes:,.0f} passes over its {words:,} words"
            logging.getLogger("demix").warning(f"{file}, config key adaptation.{key}: {cause}; lower it, {cure}")
        print(printable(f"demix plan {file} estimates time and disk; demix config --values {file} prints every value."))


def _will_run(run: "Run") -> list[tuple[str, str]]:
    """What a config runs: heads and lines."""
    from demix.plan.jobs import count_jobs

    models: dict[str, list[str]] = {}
    for model in run.trained:
        size = f"of {model.settings.tokens:,} tokens in {model.updates:,} updates, {_begin(model)}"
        models.setdefault(size, []).append(model.name)
    lines = [("run", str(run.folder))]
    for kind, names in run.config.domains.kinds.items():
        lines.append((f"{kind} domains", ": ".join(filter(None, (str(len(names)), ", ".join(names))))))
    lines += [("models", f"{len(names)} {size}: {', '.join(names)}") for size, names in models.items()]
    if run.adaptations:
        lines.append(("adaptations", f"{len(run.adaptations)} of {run.config.adaptation.tokens:,} tokens at most"))
    return [*lines, ("jobs", f"{sum(count_jobs(run).values()):,}, less those that are done")]


def _begin(model: "Model") -> str:
    """With which parameters the training of a model begins."""
    if model.base.initial:
        return f"from {model.base.hub.address if model.base.hub else model.base.initial}"
    if model.mixes:
        return f"from the merged experts of {model.parent}"
    if model.seed_step:
        return f"from {model.parent} after {model.settings.seed_tokens:,} of these tokens"
    return "from scratch"


def _many_passes(config: "Config") -> Iterator[tuple[str, int, float]]:
    """The novel domains of local files over whose train split an adaptation would pass more than MOST_PASSES times.

    Yields the domain, the words of its train split and the number of passes.
    """
    from demix.data.init import MAX_WORDS, read_domain
    from demix.plan.domains import TOKENS_PER_WORD
    from demix.settings import written

    bound = config.adaptation.passes or math.inf
    if bound <= MOST_PASSES:
        return
    words = config.adaptation.tokens / TOKENS_PER_WORD
    # To read more would take long.
    enough = min(math.ceil(words / MOST_PASSES), MAX_WORDS)
    for name, domain in config.domains.kinds["novel"].items():
        if domain.source.kind != "files":
            continue
        held_out = domain.words.dev + domain.words.test
        most = min(enough + held_out, domain.source.words or enough + held_out)
        with _silent():
            found = read_domain(written(domain.source), name, most)
        train = min(max(1, found.words - held_out), domain.words.train or enough)
        if train < enough:
            yield name, train, min(bound, words / train)


@contextmanager
def _silent() -> Iterator[None]:
    """Log errors alone: reading texts logs the steps of a data stage, and that a bound made up here is not reached."""
    logger = logging.getLogger("demix")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _pin(file: Path) -> None:
    """Print what pins a config's sources. A source that cannot be read is named, and the exit status is then 1."""
    import textwrap

    import yaml

    from demix.data.fetch import check_network
    from demix.data.pins import pins
    from demix.data.sources import Source, pinned
    from demix.files import scratch
    from demix.run.check import load_run
    from demix.settings import settings_from, written

    run, failed, above = load_run(file, allow_branches=True), False, list[str]()
    sources = {key: settings_from(Source, written(source)) for key, source in run.config.of_text.items()}
    check_network(source for source in sources.values() if pinned(source, 0) is None)
    with scratch(run.folder / "pins") as folder:
        for key, source in sources.items():
            *heads, name, _ = key.split(".")
            try:
                found = pins(source, folder)
            except DemixError as error:
                failed = True
                logging.getLogger("demix").error("%s: %s", name, error)
                continue
            if found:
                # Each source is printed at once: those after it may take hours.
                for depth, head in enumerate(heads):
                    if above[: depth + 1] != heads[: depth + 1]:
                        print(f"{'  ' * depth}{head}:")
                text = yaml.safe_dump({name: {"source": found}}, width=120)
                print(textwrap.indent(text, "  " * len(heads)), end="", flush=True)
                above = heads
    if failed:
        raise typer.Exit(1)
