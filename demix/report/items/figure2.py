"""Figure 2 of the paper: test perplexity of each training expert on each domain, divided by the perplexity of the
domain's own expert, or of the best expert where the domain is novel; colours on a log scale. Below: the share of the
bigrams of each domain's test split that occur in each expert's training text, and the relation of the two.
"""

import textwrap
from typing import TYPE_CHECKING, Any

from demix.progress import so_many
from demix.report.item import FigureItem, Group
from demix.report.material import Material

if TYPE_CHECKING:
    import altair as alt
    import pandas as pd

    from demix.report.affinity import Relation

ITEM = FigureItem(
    "Figure 2: how well each expert predicts each domain, and the bigrams that they share", Group.FIGURES, 2
)
SHARE_RANGE = ("#f7fcf5", "#a1d99b", "#41ab5d")


def make(material: Material) -> tuple[Any, str]:
    import altair as alt

    pairs, known = material.pairs, material.pairs["ratio"].notna().any()
    panels = [_ratios(material)]
    if pairs["overlap"].notna().any():
        panels += [_shares(material), alt.hconcat(*(_scatter(pairs, one) for one in material.relations), spacing=60)]
    return alt.vconcat(*panels, spacing=28).resolve_scale(color="independent"), (
        "Top: test perplexity of an expert (column) on a domain (row), over that of the domain's own expert (training "
        "domains) or of the best expert (novel domains). 1 is best; colours follow the logarithm. Middle: share of the "
        "bigrams of a domain's test split that occur in the expert's training text. Bottom: that ratio against this "
        "share, one point per pair of those above." + ("" if known else " This run has none of these numbers.")
    )


def _ratios(material: Material) -> "alt.HConcatChart":
    import altair as alt
    import numpy as np

    from demix.report.heatmaps import heat_maps
    from demix.report.look import CELL_RANGE

    top = max([1.1, *material.pairs["ratio"].dropna()])
    ticks = [float(f"{x:.6g}") for x in np.geomspace(1, top, 5)]
    return heat_maps(
        _cells(material, "ratio"),
        {domains.kind: (domains.names, f"Perplexity ratio, {domains.kind} domains") for domains in material.kinds},
        material.training,
        alt.Scale(type="log", domain=[1, top], range=CELL_RANGE, interpolate="lab", clamp=True),
        legend=alt.Legend(title=["perplexity ratio", "(log scale)"], titlePadding=8, values=ticks, format=".2f"),
    )


def _shares(material: Material) -> "alt.HConcatChart":
    import altair as alt

    from demix.report.heatmaps import heat_maps
    from demix.report.look import share_scale

    return heat_maps(
        _cells(material, "overlap"),
        {domains.kind: (domains.names, f"Bigram overlap, {domains.kind} domains") for domains in material.kinds},
        material.training,
        share_scale(SHARE_RANGE, max([0.1, *material.pairs["overlap"].dropna()])),
        legend=alt.Legend(title="bigrams shared", titlePadding=8, format=".0%", tickCount=5),
        form=".0%",
    )


def _cells(material: Material, column: str) -> list[dict[str, Any]]:
    from demix.report.look import finite

    return [
        {"kind": row.kind, "domain": row.domain, "expert": row.expert, "value": finite(getattr(row, column))}
        for row in _drawn(material.pairs).itertuples()
    ]


def _drawn(pairs: "pd.DataFrame") -> "pd.DataFrame":
    """The pairs of the domains and experts that are shown, of which there may be many more."""
    from demix.report.heatmaps import MOST_SHOWN

    experts = pairs["expert"].unique()[:MOST_SHOWN]
    domains = [name for _, rows in pairs.groupby("kind") for name in rows["domain"].unique()[:MOST_SHOWN]]
    return pairs[pairs["domain"].isin(domains) & pairs["expert"].isin(experts)]


def _scatter(pairs: "pd.DataFrame", relation: "Relation") -> "alt.Chart":
    """Perplexity ratio against bigram overlap, one point per pair; the title states the correlation."""
    import altair as alt
    import numpy as np

    from demix.report.look import COLOURS, data_of, finite, small_heading

    points = _drawn(pairs[pairs["kind"] == relation.kind]).dropna()
    if relation.kind == "training":
        points = points[points["domain"] != points["expert"]]
    values = [
        {"domain": row.domain, "expert": row.expert, "overlap": finite(row.overlap), "ratio": finite(row.ratio)}
        for row in points.itertuples()
    ]
    told = f"{relation.kind} domains" + (", own expert left out" if relation.kind == "training" else "")
    if np.isfinite(relation.spearman):
        told += f": Spearman {relation.spearman:+.2f} over {so_many(relation.pairs, 'pair')} of "
        told += so_many(relation.domains, "domain")
        told = told.replace("-0.", "−0.")
    if np.isfinite(relation.permutation_p):
        told += f" (p = {relation.permutation_p:.2g}, domains permuted)"
    percents = alt.Axis(format=".0%", tickCount=6)
    chart: alt.Chart = (
        alt.Chart(data_of(values))
        .mark_point(size=45, filled=True, opacity=0.75, color=COLOURS[0])
        .encode(
            x=alt.X("overlap:Q", title="bigrams shared", axis=percents, scale=alt.Scale(zero=False)),
            y=alt.Y("ratio:Q", title="perplexity ratio (log)", scale=alt.Scale(type="log", nice=False)),
            tooltip=["domain:N", "expert:N", "overlap:Q", "ratio:Q"],
        )
        .properties(width=400, height=200, title=small_heading(textwrap.wrap(told, 70)))
    )
    return chart
