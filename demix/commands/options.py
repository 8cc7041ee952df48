"""The options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Ranks = Annotated[int, typer.Option(min=1, help="Processes of this machine that train together.")]
Settings = Annotated[str, typer.Option(help="The stage's part of the config, as JSON.")]
Files = Annotated[list[Path], typer.Argument(help="Input files.")]
Output = Annotated[Path, typer.Option(help="Where the result goes.")]
Kind = Annotated[str, typer.Argument(help="demix, dense, dense_unbalanced or domain_token.")]
TrainShards = Annotated[
    list[Path], typer.Argument(help="tokens/<domain>/train.arrow of each training domain (and dev.arrow, for dev).")
]
Metrics = Annotated[Path, typer.Option(help="Where the metrics go (JSON lines).")]
Checkpoints = Annotated[Path, typer.Option(help="Folder for the state that a killed run resumes from.")]
How = Annotated[
    str, typer.Option(help="Settings that change nothing but time and memory: compile=true,keep_checkpoints=3.")
]
Site = Annotated[
    str, typer.Option("--cluster", help="The config's section cluster as JSON: where and how the ranks are started.")
]
Replicas = Annotated[str, typer.Option(help="Ranks of single domains, such as legal=2,novels=3.")]
