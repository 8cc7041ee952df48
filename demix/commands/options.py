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
    Path | None, typer.Option("--tokenizer", help="tokenizer.json; default: the one in the model's folder or its run.")
]
WeightsRule = Annotated[
    str,
    typer.Option(
        "--weights",
        help="Mixing rule: tempered, switching, history, released, cluster, cluster+history or average (the weights "
        "stay at the prior). Parameters are given as in tempered(0.2,0.98), switching(0.2) or cluster(0.3); tempered "
        "without parameters uses the model's, which were chosen on dev.",
    ),
]
Prior = Annotated[
    str,
    typer.Option(
        "--prior",
        help="Prior over experts: updating (default for the rules history and released), uniform (default for other "
        "rules), a weight for each expert (law=2,news=1), or a domain of the run: the prior from its dev split.",
    ),
]
Experts = Annotated[str | None, typer.Option(help="The experts to mix, separated by commas; default: all.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:<number>; default: a GPU if there is one.")]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", min=1, help="Mix only this many highest-weighted experts at each token (ties are kept)."),
]


def terminal() -> "Console":
    """A console that prints text from files as it is, and never interprets it as markup or terminal codes."""
    from rich.console import Console

    class Plain(Console):
        def render_str(self, text: str, **how: Any) -> "Text":
            return super().render_str(printable(text), **how | {"markup": False, "emoji": False})

    return Plain(width=None if sys.stdout.isatty() else 150)
