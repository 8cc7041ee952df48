"""Figure 4 of the paper: the cached prior over the training experts for each domain, as it stands after the first
blocks of the domain's dev split. It is the mean of the posteriors after each of these blocks, in which a block weighs λ
times as much as the next. Below: the same for each novel domain by λ.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from demix.report.item import FigureItem, Group
from demix.report.material import Material

if TYPE_CHECKING:
    import altair as alt
    import pandas as pd

ITEM = FigureItem("Figure 4: which experts the cached prior chooses for each domain", Group.FIGURES, 4)
DECAYS_SHOWN = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
BY_DECAY = "By λ, from the same posteriors: at λ = 0 the last dev block alone would count, at λ = 1 all count alike"


def make(material: Material) -> tuple[Any, str]:
    import altair as alt

    from demix.report.heatmaps import PROBABILITY_LEGEND, TRACE_COLUMNS, cells_of, heat_maps
    from demix.report.look import heading_of, share_scale
    from demix.report.results import prior_table

    settings = material.run.config.evaluation
    rows = [
        cell
        for domains in material.kinds
        for cell in cells_of(prior_table(material.priors, "demix", material.training, domains.names), domains.kind)
    ]
    halves = {domains.kind: (domains.names, f"{domains.heading} domains") for domains in material.kinds}
    parts: list[Any] = [heat_maps(rows, halves, material.training, share_scale(), legend=PROBABILITY_LEGEND)]
    if panels := _by_decay(material):
        parts.append(alt.concat(*panels, columns=TRACE_COLUMNS, spacing=18, title=heading_of(BY_DECAY)))
    return alt.vconcat(*parts, spacing=28), (
        f"The cached prior over the training experts for each domain (rows; each sums to 1 over all experts), after "
        f"the first {settings.dev_blocks} blocks of the domain's dev split. The prior is the mean of the posteriors "
        f"after each of these blocks. A block weighs λ = {settings.decay:g} times as much as the next"
        + (f", the last one alone {1 - settings.decay:.2f}." if settings.decay < 1 else ".")
        + ("" if any(row["value"] is not None for row in rows) else " This run has none of these numbers.")
    )


def _by_decay(material: Material) -> list["alt.Chart"]:
    """A small heat map for each novel domain: its prior by λ."""
    import altair as alt

    from demix.report.heatmaps import MOST_SHOWN, panel, posteriors_on_dev
    from demix.report.look import finite

    settings = material.run.config.evaluation
    found = posteriors_on_dev(material, settings.dev_blocks)
    panels = []
    shown = [name for name in material.novel if (found["domain"] == name).any()][:MOST_SHOWN]
    for index, domain in enumerate(shown):
        by_decay = priors_by_decay(found[found["domain"] == domain], (*DECAYS_SHOWN, settings.decay))
        values = [
            {"decay": each, "expert": expert, "value": finite(prior)}
            for each, row in by_decay.iterrows()
            for expert, prior in row.items()
        ]
        x = alt.X("decay:O", title="λ", axis=alt.Axis(labelAngle=0))
        panels.append(panel(values, domain, material.training, index, gap=1, x=x))
    return panels


def priors_by_decay(posteriors: "pd.DataFrame", decays: Iterable[float]) -> "pd.DataFrame":
    """The cached prior of one domain by λ (Eq. 7), from its posteriors after each dev block: a row per λ.

    The posteriors are those of the run's own λ, which hardly touches them: a block outweighs its prior.
    """
    import numpy as np
    import pandas as pd

    table = posteriors.pivot(index="block", columns="expert", values="posterior").sort_index()
    ages = np.arange(len(table))[::-1]
    weights = {decay: np.float64(decay) ** ages for decay in sorted(set(decays))}
    return pd.DataFrame({decay: (table.T * own / own.sum()).sum(axis=1) for decay, own in weights.items()}).T
