"""Generated text and the posterior over experts, printed to a terminal or a pipe."""

import sys
from collections.abc import Iterable, Sequence

import numpy as np
from rich.table import Column, Table

from demix.model.decode import Drawn

BAR = 40
# A model may generate control codes, and these must not control the terminal.
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def continued(prompt: str, drawn: Iterable[Drawn]) -> None:
    """Print the continuation of `prompt`, token by token.

    In a terminal, the prompt is also printed, and control codes are replaced. A pipe gets only the unchanged
    continuation.
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
