"""The options that several commands share, and the console that they print tables to."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demix.errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


Tokens = Annotated[
    Path | None, typer.Option("--tokenizer", help="tokenizer.json; by default that of the model's folder or its run.")
]
WeightsRule = Annotated[
    str,
    typer.Option(
        "--weights",
        help="Rule for the experts' weights: tempered, switching, history, released, cluster, cluster+history or "
        "average (only the prior). tempered uses the parameters that were chosen for the model; others are given as "
        "in tempered(0.2,0.98), switching(0.2) or cluster(0.3).",
    ),
]
Prior = Annotated[
    str,
    typer.Option(
        "--prior",
        help="uniform, updating (the default with history and released), weights (law=2,news=1), or a domain of "
        "the run.",
    ),
]
Experts = Annotated[str | None, typer.Option(help="The experts to mix, separated by commas; by default all.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:<number>; by default the GPU where there is one.")]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", min=1, help="Mix only this many highest-weighted experts at each token (ties are kept)."),
]


def terminal() -> "Console":
    """A console that shows names and values of files as they are, never as markup or as codes for the terminal."""
    from rich.console import Console

    class Plain(Console):
        def render_str(self, text: str, **how: Any) -> "Text":
            return super().render_str(printable(text), **how | {"markup": False, "emoji": False})

    return Plain(width=None if sys.stdout.isatty() else 150)
