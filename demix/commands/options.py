"""The options that several commands share, and the console that they print tables to."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demix.errors import printable
from demix.files import read_json
from demix.files.json_files import SEAL, read_unsealed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def _of_file(text: str) -> str:
    """The JSON that an option gives: `text` itself, or for @FILE that of the file, whose seal is checked if it has one.

    Linux passes at most 128 KiB as one argument; `demix.run.rules.RunRules.argument` writes such files.
    """
    if not text.startswith("@"):
        return text
    values = read_unsealed(text[1:])
    return json.dumps(read_json(text[1:]) if SEAL in values else values)


Ranks = Annotated[int, typer.Option(min=1, help="Processes of this machine that train together.")]
Settings = Annotated[str, typer.Option(callback=_of_file, help="The settings of the stage, as JSON or @FILE.")]
Files = Annotated[list[Path], typer.Argument(help="Input files.")]
Output = Annotated[Path, typer.Option(help="Path of the result.")]
TrainShards = Annotated[
    list[Path],
    typer.Argument(
        help="tokens/<domain>/train.arrow of each training domain, or "
        "clusters/<clustering>/shards/<cluster>/train.arrow of each cluster; dev.arrow to evaluate on dev."
    ),
]
Metrics = Annotated[Path, typer.Option(help="Path of the metrics (JSON lines).")]
Checkpoints = Annotated[Path, typer.Option(help="Folder of the checkpoints from which a killed run resumes.")]
ExecutionOverrides = Annotated[
    str, typer.Option(help="Settings that change only time and memory, such as compile=true,keep_checkpoints=3.")
]
Site = Annotated[
    str,
    typer.Option(
        "--cluster",
        callback=_of_file,
        help="The config's section cluster, as JSON or @FILE: where and how ranks are started.",
    ),
]
Live = Annotated[
    str, typer.Option("--live", help="Where metrics go while training: JSON with uri, experiment, run, config.")
]
Tokens = Annotated[
    Path | None, typer.Option("--tokenizer", help="tokenizer.json; by default that of the model's folder or its run.")
]
WeightsRule = Annotated[
    str,
    typer.Option(
        "--weights",
        help="Rule for the experts' weights: tempered, switching, history, released, cluster, cluster+history or "
        "average (the prior alone). tempered takes the parameters that were chosen for the model; others are given as "
        "in tempered(0.2,0.98), switching(0.2) or cluster(0.3).",
    ),
]
Prior = Annotated[
    str,
    typer.Option(
        "--prior",
        help="uniform, updating (the default with history and released), weights (law=2,news=1), a domain of the "
        "run, or a <domain>.priors.parquet.",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", min=1, help="Mix only this many likeliest experts at each token, and equal ones."),
]


def terminal() -> "Console":
    """A console that shows names and values of files as they are, never as markup or as codes for the terminal."""
    from rich.console import Console

    class Plain(Console):
        def render_str(self, text: str, **how: Any) -> "Text":
            return super().render_str(printable(text), **how | {"markup": False, "emoji": False})

    return Plain(width=None if sys.stdout.isatty() else 150)
