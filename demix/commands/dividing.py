"""The stages of a source that several domains share: one pass over it, and its card."""

from pathlib import Path
from typing import Annotated

import typer

from demix.commands.options import Files, Output, Settings

app = typer.Typer()


@app.command()
def divide(
    source: str,
    settings: Settings,
    raw: Annotated[Path, typer.Option(help="The run's folder of raw text; what is written there is private.")],
    output: Annotated[Path, typer.Option(help="Path of the counts by domain and by value.")],
    part: Annotated[int, typer.Option(help="Number of the part, from 0 to source.parts - 1.")] = 0,
) -> None:
    """Read one part of a source that several domains share, once, and leave the text of each domain for `read`."""
    from demix.data.divide import Division
    from demix.data.divide import divide as run
    from demix.settings import settings_from

    run(source, settings_from(Division, settings), raw, output, part)


@app.command("source-card")
def source_card(
    counts: Files,
    settings: Settings,
    output: Output,
) -> None:
    """Add up the documents of a source by domain and by value (sources/<source>/<part>.json)."""
    from demix.data.divide import Sharing, write_source_card
    from demix.settings import settings_from

    write_source_card(counts, settings_from(Sharing, settings).domains, output)
