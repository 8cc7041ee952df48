"""Generated text, the posterior over experts and filled masks, printed to a terminal or a pipe."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.table import Column, Table

from demix.model.decode import Drawn, named_prior, weights_of
from demix.model.directory import load_experts, tokenizer_of
from demix.model.filling import fillings
from demix.model.scoring import columns_of

BAR = 40
# A model may generate control codes, and these must not control the terminal.
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def continued(prompt: str, drawn: Iterable[Drawn]) -> None:
    """Print the continuation of `prompt`, token by token.

    A terminal gets the prompt too, and control codes are replaced. A pipe gets the continuation as it is.
    """
    shown = sys.stdout.isatty()
    if shown:
        print(prompt.translate(CONTROLS), end="", flush=True)
    for one in drawn:
        print(one.piece.translate(CONTROLS) if shown else one.piece, end="", flush=True)
    print()


def posterior_table(experts: Sequence[str], log_weights: np.ndarray) -> Table:
    """A table of the posterior over experts, likeliest first, with bars."""
    share = Column("share", justify="right")
    table = Table("expert", share, "", title="Posterior over the experts", title_justify="left", box=None)
    for weight, expert in sorted(zip(np.exp(log_weights).tolist(), experts, strict=True), reverse=True):
        table.add_row(expert, f"{weight:.1%}", "█" * round(BAR * weight))
    return table


def filled(
    model: Path, experts: Sequence[str] | None, prior: str, tokenizer: Path | None, text: str
) -> Iterator[Table]:
    """A table for each mask of `text`: its likeliest fillings by a mixture of masked experts, and by each of them."""
    _, encoder = tokenizer_of(model, tokenizer)
    trunks = load_experts(model, None if experts is None else tuple(experts))
    names = columns_of(trunks)
    log_prior, _ = named_prior(prior, model, names, weights_of("average", model))
    for number, found in enumerate(fillings(trunks, encoder, text, log_prior), 1):
        numbers = [Column(head, justify="right") for head in ("probability", *(names if len(names) > 1 else ()))]
        table = Table("filling", *numbers, title=f"Mask {number}", title_justify="left", box=None)
        for one in found:
            each = [f"{value:.1%}" for value in one.by_expert] if len(names) > 1 else []
            table.add_row(repr(one.text), f"{one.probability:.1%}", *each)
        yield table
