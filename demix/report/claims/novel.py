"""Claims about novel domains."""

from functools import partial

from demix.report.claims.row import Row, Versus, below_dense
from demix.report.needs import DOMAIN_TOKEN as HAS_DOMAIN_TOKEN
from demix.report.needs import NOVEL
from demix.report.systems import AVERAGE, CACHED, DOMAIN_TOKEN, NAIVE, UNIFORM, UPDATING

_row = partial(Row, needs=(NOVEL,))
ROWS = (
    _row(
        "novel_against_best_expert",
        "On novel domains a mixture of experts (cached prior) beats the best single expert, chosen by an oracle",
        "Table 5",
        (Versus(CACHED, NAIVE, "novel"),),
    ),
    _row(
        "novel_against_dense",
        "On novel domains a mixture of experts with a cached prior, for which it reads dev text of the domain, beats "
        "{dense}",
        "Table 5",
        below_dense(CACHED, on="novel"),
    ),
    _row(
        "novel_untold_against_dense",
        "On novel domains a mixture of experts with an updating prior, which does not know the domain, beats {dense}",
        "Table 5, for 125M to 760M; at 1.3B it equals Dense (Balanced)",
        below_dense(UPDATING, on="novel"),
    ),
    _row(
        "novel_against_domain_token",
        "On novel domains mixtures of experts (updating and cached prior) beat the model with domain tokens",
        "Table 5",
        (Versus(UPDATING, DOMAIN_TOKEN, "novel"), Versus(CACHED, DOMAIN_TOKEN, "novel")),
        needs=(NOVEL, HAS_DOMAIN_TOKEN),
    ),
    _row(
        "order_of_priors",
        "On novel domains perplexity falls from the average of experts to a uniform, an updating and a cached prior",
        "Table 5",
        (Versus(UNIFORM, AVERAGE, "novel"), Versus(UPDATING, UNIFORM, "novel"), Versus(CACHED, UPDATING, "novel")),
    ),
)
