"""How many times as many FLOPs of training a dense model takes to the same perplexity, by budget; as in Figure 12 and
appendix A.3 of the c-BTM paper.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import BUDGETS, FAMILIES
from demix.report.table import Table

if TYPE_CHECKING:
    from demix.report.domains import Domains
    from demix.report.families import Family

ITEM = TableItem("Speed-up of training over a dense model", Group.FAMILIES, 3, needs=(FAMILIES, BUDGETS))
# A model of a line, its FLOPs of training, and its perplexity.
Runs = list[tuple["Family", float, float]]
# The columns of each kind of domains.
TOLD = ("perplexity", "FLOPs", "FLOPs of dense", "speed-up")


def make(material: Material) -> Table:
    import pandas as pd

    from demix.report.families import lines

    every = lines(material.run)
    pairs = [
        (line, dense)
        for dense in every
        if dense[0].dense and len(dense) > 1
        for line in every
        if not line[0].dense and _alike(line[0], dense[0])
    ]
    rows: dict[str, dict[str, float]] = {}
    for line, dense in pairs:
        for domains in material.kinds:
            for label, perplexity, own, of_dense in _speeds(*(_runs(material, one, domains) for one in (line, dense))):
                found = (perplexity, own, of_dense, of_dense / own)
                named = {f"{domains.heading}, {told}": value for told, value in zip(TOLD, found, strict=True)}
                rows.setdefault(label, {}).update(named)
    columns = [f"{domains.heading}, {told}" for domains in material.kinds for told in TOLD]
    frame = pd.DataFrame.from_dict(rows, orient="index").reindex(columns=columns)
    return Table(
        "The FLOPs of training that a row, and a dense model, take to one perplexity, and how many times as many the "
        "dense one takes (c-BTM, Figure 12 and appendix A.3). Rows of several budgets are one line. Between two of its "
        "budgets the logarithm of FLOPs is linear in perplexity.",
        frame,
        notes=(
            "A line tells of the mean test perplexity of the row that it names. Nothing is said of perplexities that "
            "one of the two reaches at none of its budgets, or beyond them. FLOPs include those of the seed phase.",
        ),
        formats={name: "{:.3g}" for name in frame if "FLOPs" in name}
        | {name: "{:.2f}×" for name in frame if name.endswith("speed-up")},
    )


def cost_at(perplexity: float, costs: Sequence[float], perplexities: Sequence[float]) -> float:
    """The cost of training to `perplexity`, by those of runs (c-BTM, appendix A.3); NaN beyond the runs' perplexities.

    Between two runs, neighbours in perplexity, log cost is linear in perplexity.
    """
    import numpy as np

    order = np.argsort(perplexities)
    known, logs = np.asarray(perplexities)[order], np.log(costs)[order]
    return float(np.exp(np.interp(perplexity, known, logs, left=np.nan, right=np.nan)))


def _alike(line: "Family", dense: "Family") -> bool:
    """Whether both begin alike and have one decoder, but for its routed layers."""
    return line.begun == dense.begun and line.architecture.unrouted == dense.architecture.unrouted


def _runs(material: Material, line: Sequence["Family"], domains: "Domains") -> Runs:
    """The runs of a line whose cost and perplexity are known."""
    import math

    from demix.report.families import all_training_flops

    found = [
        (
            family,
            all_training_flops(family.model, material.run, material.tokens_before),
            material.own.mean(family.system, domains.names),
        )
        for family in line
    ]
    return [run for run in found if not (math.isnan(run[1]) or math.isnan(run[2]))]


def _speeds(line: Runs, dense: Runs) -> Iterator[tuple[str, float, float, float]]:
    """At the perplexity of each run that both reach: label, perplexity, the cost of the line, that of the dense one."""
    import math

    if not (line and dense):
        return
    costs = [([cost for _, cost, _ in runs], [perplexity for *_, perplexity in runs]) for runs in (line, dense)]
    for family, _, perplexity in (*line, *dense):
        own, of_dense = (cost_at(perplexity, *known) for known in costs)
        if not (math.isnan(own) or math.isnan(of_dense)):
            name, other = family.model.label, dense[-1][0].model.label
            yield (
                f"{line[-1][0].model.label} at the perplexity of {name}" if family.dense else f"{name} against {other}",
                perplexity,
                own,
                of_dense,
            )
