"""Generated text and the posterior over experts, printed to a terminal or a pipe."""

import sys
from collections.abc import Sequence

import numpy as np
import torch
from rich.table import Table

from demix.data.tokenizer import Tokenizer
from demix.mix.stream import Posterior
from demix.model.decode import Decoder, decoded, generate
from demix.model.gpt import GPT

BAR = 40
# A model may generate control codes, and these must not control the terminal.
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def continued(
    trunks: Sequence[GPT],
    tokenizer: Tokenizer,
    prompt: str,
    posterior: Posterior,
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> np.ndarray:
    """Print the continuation of `prompt`, token by token; returns log g [E] after the last token.

    A terminal gets the prompt too, and control codes are replaced. A pipe gets the continuation as it is.
    """
    shown = sys.stdout.isatty()
    decoder = Decoder(trunks, torch.tensor([tokenizer.end_of_text]), posterior)
    decoder.read(torch.from_numpy(tokenizer.encode(prompt).astype("int64"))[None])
    if shown:
        print(prompt.translate(CONTROLS), end="", flush=True)
    drawn = generate(
        decoder,
        tokens,
        temperature=temperature,
        top_p=top_p,
        generator=torch.Generator().manual_seed(seed),
        end=tokenizer.end_of_text,
    )
    for piece in decoded(tokenizer, (int(token) for token, _, _ in drawn)):
        print(piece.translate(CONTROLS) if shown else piece, end="", flush=True)
    print()
    log_weights: np.ndarray = decoder.posterior.log_weights[0]
    return log_weights


def posterior_table(experts: Sequence[str], log_weights: np.ndarray) -> Table:
    """A table of the posterior over experts, likeliest first, with bars."""
    table = Table(title="Posterior over the experts", title_justify="left", box=None)
    table.add_column("expert")
    table.add_column("share", justify="right")
    table.add_column("")
    for weight, expert in sorted(zip(np.exp(log_weights).tolist(), experts, strict=True), reverse=True):
        table.add_row(expert, f"{weight:.1%}", "█" * round(BAR * weight))
    return table
