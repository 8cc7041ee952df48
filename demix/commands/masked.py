"""The command for masked language models."""

from pathlib import Path
from typing import Annotated

import typer

from demix.commands.options import Tokens, terminal

app = typer.Typer()


@app.command()
def fill(
    model: Annotated[Path, typer.Argument(help="The directory of a masked model, results/<run>/models/<model>.")],
    text: Annotated[str, typer.Argument(help="A text in which <mask> stands for each token to fill in.")],
    experts: Annotated[
        str | None, typer.Option(help="The experts to mix, separated by commas; by default all.")
    ] = None,
    prior: Annotated[
        str,
        typer.Option(help="uniform, weights (law=2,news=1), a domain of the run, or a <domain>.priors.parquet."),
    ] = "uniform",
    top: Annotated[int, typer.Option(min=1, help="Fillings to print for each mask.")] = 5,
    tokenizer: Tokens = None,
) -> None:
    """Fill in the masks of a text with a mixture of masked experts: the likeliest tokens, with probabilities.

    The experts' weights are fixed (docs/variants.md). After the mixture's probability stands that under each expert.
    """
    from rich.table import Table

    from demix.model.checkpoint import load_experts
    from demix.model.decode import named_prior, weights_of
    from demix.model.filling import fillings
    from demix.model.tokenizer import tokenizer_of

    _, encoder = tokenizer_of(model, tokenizer)
    trunks = load_experts(model, tuple(experts.split(",")) if experts else None)
    names = [name for trunk in trunks for name in trunk.experts]
    log_prior, _ = named_prior(prior, model, names, weights_of("average", model))
    for number, found in enumerate(fillings(trunks, encoder, text, log_prior, top), 1):
        table = Table(title=f"Mask {number}", title_justify="left", box=None)
        table.add_column("filling")
        table.add_column("probability", justify="right")
        for name in names if len(names) > 1 else ():
            table.add_column(name, justify="right")
        for one in found:
            each = [f"{value:.1%}" for value in one.by_expert] if len(names) > 1 else []
            table.add_row(repr(one.text), f"{one.probability:.1%}", *each)
        terminal().print(table)
