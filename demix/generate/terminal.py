"""Generated text, the posterior over experts and filled masks, printed to a terminal or a pipe."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.table import Column, Table

from demix.data.tokenizer import Tokenizer
from demix.model.continuations import MixedModel
from demix.model.decode import continuation, named_prior, weights_of
from demix.model.directory import load_experts, tokenizer_of
from demix.model.filling import fillings
from demix.model.scoring import columns_of

BAR = 40
# A model may generate control codes, and these must not control the terminal.
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def continued(
    mixture: MixedModel,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> np.ndarray:
    """Print the continuation of `prompt`, token by token; returns log g [E] after the last token.

    A terminal gets the prompt too, and control codes are replaced. A pipe gets the continuation as it is.
    """
    shown = sys.stdout.isatty()
    decoder = mixture.after(tokenizer, prompt)
    if shown:
        print(prompt.translate(CONTROLS), end="", flush=True)
    for drawn in continuation(decoder, tokenizer, tokens, temperature, top_p, seed):
        print(drawn.piece.translate(CONTROLS) if shown else drawn.piece, end="", flush=True)
    print()
    log_weights: np.ndarray = decoder.posterior.log_weights[0]
    return log_weights


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
