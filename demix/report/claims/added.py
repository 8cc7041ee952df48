"""Claims about the experts that adaptation adds to the mixture."""

from functools import partial

from demix.report.claims.row import HARM, Parts, Row, Versus
from demix.report.needs import NOVEL
from demix.report.systems import before_adding, dense_adapted
from demix.run.main_systems import added


def _more(on: str, allowance: float = 0.0) -> Parts:
    """All experts against the training experts, both with a cached prior."""
    labels = ("All experts", "training experts")
    return lambda material: [
        Versus(added(material.run)[1], before_adding(material.run)[1], on, labels, allowance=allowance)
    ]


_row = partial(Row, needs=(NOVEL,))
ROWS = (
    _row(
        "added_experts_help",
        "Adding the adapted experts to the mixture lowers perplexity on the novel domains",
        "Table 6",
        _more("novel"),
    ),
    _row(
        "added_experts_against_dense_dapt",
        "On the novel domains all experts, the adapted ones among them, have lower perplexity than Dense-DAPT to each",
        "",
        lambda material: [
            Versus(added(material.run)[1], dense_adapted(material.run), "novel", ("All experts", "Dense-DAPT"))
        ],
    ),
    _row(
        "added_experts_reduce",
        "Adding the adapted experts to the mixture lowers perplexity on the training domains too",
        "Table 6",
        _more("training"),
    ),
    _row(
        "added_experts_do_no_harm",
        "Ours, weaker than the paper's: adding experts does no harm on the training domains (at most "
        f"{100 * HARM:g}% higher)",
        "",
        _more("training", HARM),
    ),
)
