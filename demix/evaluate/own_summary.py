"""The summary of a user's own texts, in a terminal and on pages: an answer in sentences, tables, and explanations."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from demix.errors import DemixError
from demix.evaluate.own_text import DENSE_OF_RUN, FEW_TOKENS, TEMPERED, UNLIKE, Line, OwnText
from demix.progress import so_many

if TYPE_CHECKING:
    import rich.table


def answer(result: OwnText) -> list["str | rich.table.Table"]:
    """The parts that `demix eval` prints of one text: the answer in sentences, the tables, and remarks.

    The remarks explain the columns of the experts' table, say why there is no dense model, and add the text of `doubt`.
    """
    shown = tables(result)
    if len(result.experts) < 2:
        return [*shown]
    columns = (
        "usual: the expert's perplexity on test text of its own domain; behind: loss above that of the best expert, in "
        "nats per token; weight: mean over all tokens, by tempered; posterior: probability that the text is from the "
        "expert's domain, if it is from one of these (updating prior after the last block). It sums to 1 over these "
        "experts, so one of them wins even if none fits."
    )
    return [headline(result), *shown, columns, *filter(None, [without_dense(result), doubt(result)])]


def tables(result: OwnText) -> list["rich.table.Table"]:
    """Tables for the terminal: the mixtures, and the experts, best first.

    Each table has its lowest perplexity in bold.
    """
    from rich.table import Column, Table

    def numbers(*heads: str) -> list[Column]:
        # A Column stores the cells of its table, so each table needs new columns.
        return [Column(head, justify="right") for head in ("perplexity", "bits per byte", *heads)]

    counted = {"token": result.tokens, "byte": result.bytes, "document": result.documents, "block": result.blocks}
    size = ", ".join(so_many(number, noun) for noun, number in counted.items())
    mixtures = Table("method", *numbers(), title=size, title_justify="left")
    least = min((line.perplexity for line in result.mixtures), default=None)
    for line in result.mixtures:
        mixtures.add_row(*_cells(line), style="bold" if line.perplexity == least else None)
    several = len(result.experts) > 1
    shown = numbers("usual", "behind", "weight", "posterior") if several else numbers()
    experts = Table("expert", *shown, title=None if several else size, title_justify="left")
    for line in result.ranked:
        usual = "unknown" if line.usual is None else f"{line.usual.perplexity:.2f}"
        more = [usual, f"{line.behind:.3f}", f"{line.weight:.3f}", f"{line.posterior:.3f}"] if several else []
        experts.add_row(*_cells(line), *more, style="bold" if several and not experts.rows else None)
    return [mixtures, experts] if several else [experts]


def headline(result: OwnText) -> str:
    """The answer in sentences: the best expert, its lead and weight, the dense model, and a note on a short text."""
    if len(result.experts) < 2:
        return ""
    first, second, *_ = result.ranked
    said = (
        f"{first.name} is {second.behind:.3f} nats per token ahead of {second.name} and has {first.weight:.2f} of the "
        "weight in the mixture (tempered)."
    )
    if DENSE_OF_RUN in result.by_mixture:
        mixed, dense = result.by_mixture[TEMPERED], result.by_mixture[DENSE_OF_RUN]
        said += f" The dense model is {_against(dense, mixed)} (perplexity {dense:.2f} against {mixed:.2f})."
    few = f" A text of {so_many(result.tokens, 'token')} says little; give {FEW_TOKENS} or more."
    return said + (few if result.tokens < FEW_TOKENS else "")


def _against(dense: float, mixed: float) -> str:
    """How the dense model's perplexity compares with the mixture's, at the two decimals printed."""
    less = round(dense, 2) - round(mixed, 2)
    return "as good as the mixture" if not less else f"{'better' if less < 0 else 'worse'} than the mixture"


def without_dense(result: OwnText) -> str:
    """A line if there is no dense model to compare several experts with, as in a copied folder; else nothing."""
    if len(result.experts) < 2 or DENSE_OF_RUN in result.by_mixture:
        return ""
    return f"No dense model is compared: {result.model} lies in no run that has one of its recipe."


def doubt(result: OwnText) -> str:
    """A warning if the text is unlike the domains of all experts, or if that is unknown; else nothing."""
    first = result.ranked[0]
    if len(result.experts) < 2 or result.unlike is False:
        return ""
    if first.usual is None:
        return f"Whether the text is like that of {first.name} is unknown: its scores on its own domain are missing."
    return (
        f"WARNING: the text is unlike the text of all these experts. {first.name}, the best of them, needs "
        f"{first.bits_per_byte:.2f} bits per byte, and {first.usual.bits_per_byte:.2f} on its own domain: more "
        f"than {UNLIKE} times as many."
    )


# The columns of a table of several texts.
HEADS = ("text", "best expert", "tokens", "perplexity", "weight", "lead", "but")


def answers(results: Sequence[OwnText | DemixError]) -> list["str | rich.table.Table"]:
    """The output of `demix eval` for several texts: a table with a line for each, and the meaning of its columns.

    A line has the best expert of a text, and caveats.
    """
    from rich.table import Column, Table

    text, best, *numbers, but = HEADS
    shown = Table(text, best, *(Column(head, justify="right") for head in numbers), but)
    read = [result for result in results if isinstance(result, OwnText)]
    for result in results:
        if isinstance(result, OwnText):
            shown.add_row(result.text, *cells(result))
        else:
            shown.add_row(result.subject, *[""] * len(HEADS[1:-1]), result.cause)
    return [shown, FILES_NOTE, *filter(None, map(without_dense, read[:1]))]


def cells(result: OwnText) -> list[str]:
    """The line of a text in a table of several, without its name."""
    first, *others = result.ranked
    but = ["unlike all these experts"] if result.unlike else []
    if others and DENSE_OF_RUN in result.by_mixture:
        how = _against(result.by_mixture[DENSE_OF_RUN], result.by_mixture[TEMPERED])
        but += ["dense is better"] if how.startswith("better") else []
    but += ["few tokens"] if result.tokens < FEW_TOKENS else []
    among = [f"{first.weight:.2f}", f"{others[0].behind:.3f}"] if others else ["", ""]
    return [first.name, f"{result.tokens:,}", f"{first.perplexity:.2f}", *among, ", ".join(but)]


FILES_NOTE = (
    "perplexity: that of the best expert; weight: the expert's in the mixture (tempered), mean over all tokens; lead: "
    "nats per token ahead of the second; unlike: the best expert needs more than "
    f"{UNLIKE} times the bits per byte of its own domain; dense: the run's dense model has a lower perplexity than the "
    f"mixture; few: under {FEW_TOKENS} tokens."
)


def _cells(line: Line) -> tuple[str, str, str]:
    return line.name, f"{line.perplexity:.2f}", f"{line.bits_per_byte:.3f}"
