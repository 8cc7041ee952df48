"""Mean test perplexity by the number of clusters, for clusters by k-means (balanced or not) and random ones, with one
model of all text as one cluster and experts of domains beside; as in Figures 5, 6 and 13 of the c-BTM paper.
"""

from typing import TYPE_CHECKING, Any

from demix.report.item import FigureItem, Group
from demix.report.material import Material
from demix.report.needs import CLUSTERS

if TYPE_CHECKING:
    import altair as alt
    import pandas as pd

ITEM = FigureItem("Perplexity by the number of clusters", Group.FAMILIES, 1, needs=(CLUSTERS,))
ONE = "1 cluster"


def make(material: Material) -> tuple[Any, str]:
    import altair as alt
    import pandas as pd

    from demix.report.families import one_clusters

    points = by_clusters_points(material)
    several = points["tokens"].nunique() > 1
    points["series"] = points["made"] + (points["tokens"].map(", {:,} tokens".format) if several else "")
    single = points["made"] == ONE
    # The model of one cluster is the first point of every line of its budget.
    lines = points[~single & ~points["made"].str.startswith("domains")]
    starts = lines[["series", "tokens"]].drop_duplicates().merge(points[single].drop(columns="series"), on="tokens")
    parts = [_panels(points, pd.concat([starts, lines]), "clusters", material)]
    budgets = points.groupby(["made", "clusters", "kind"])["tokens"].transform("nunique") > 1
    if budgets.any():
        grown = points[budgets]
        made = grown["made"] + ", K = " + grown["clusters"].astype(str)
        grown = grown.assign(series=made.where(grown["made"] != ONE, ONE))
        parts.append(_panels(grown, grown, "tokens", material))
    labels = " or ".join(one.label for one in one_clusters(material.run).values())
    return alt.vconcat(*parts, spacing=28).resolve_scale(color="independent", strokeDash="independent"), (
        "As Figures 5, 6 and 13 of the c-BTM paper: mean test perplexity by the number of clusters"
        + (", and by the tokens of training" if budgets.any() else "")
        + f". Experts of domains (BTM) stand at the number of domains. One cluster is {labels}, which learns from all "
        "text."
    )


def by_clusters_points(material: Material) -> "pd.DataFrame":
    """Perplexity by number of clusters: columns made (how experts came by their text), clusters, tokens, kind,
    perplexity, row."""
    import pandas as pd

    from demix.report.families import families, one_clusters

    singles, points = one_clusters(material.run).values(), []
    for family in families(material.run).values():
        whole = family.model.kind.expert_scope == "model"
        if family.clustering:
            made = family.made if whole else f"{family.model.kind.label}, {family.made}"
        elif whole:
            made = "domains (BTM)"
        elif family.system in singles:
            made = ONE
        else:
            continue
        made += f", {family.begun}" if family.begun else ""
        for domains in material.kinds:
            perplexity = material.own.mean(family.system, domains.names)
            points.append((made, family.experts, family.tokens, domains.heading, perplexity, family.model.label))
    return pd.DataFrame(points, columns=["made", "clusters", "tokens", "kind", "perplexity", "row"]).dropna()


def _panels(points: "pd.DataFrame", lines: "pd.DataFrame", over: str, material: Material) -> "alt.HConcatChart":
    """Points and lines of perplexity over `over` (clusters or tokens), one panel per kind of domain."""
    import altair as alt

    from demix.report.look import coloured, dashed, data_of, finite, heading_of

    series = list(dict.fromkeys(points["series"]))
    legend = alt.Legend(title=None, symbolSize=200, symbolType="stroke")

    def base(rows: "pd.DataFrame") -> alt.Chart:
        values = [
            {"series": row.series, "row": row.row, over: getattr(row, over), "perplexity": finite(row.perplexity)}
            for row in rows.itertuples()
        ]
        chart: alt.Chart = alt.Chart(data_of(values)).encode(
            x=alt.X(
                f"{over}:Q",
                title=over,
                scale=alt.Scale(type="log", base=2, nice=False, padding=16),
                axis=alt.Axis(values=sorted(set(points[over])), format=".3~s", grid=False),
            ),
            y=alt.Y("perplexity:Q", title="test perplexity", scale=alt.Scale(zero=False)),
            color=coloured("series", series, legend, sort=series),
            tooltip=["row:N", "series:N", f"{over}:Q", "perplexity:Q"],
        )
        return chart

    by_dash = dashed("series", series, legend, sort=series)
    panels = []
    for domains in material.kinds:
        of_kind, own = (rows[rows["kind"] == domains.heading] for rows in (points, lines))
        line = base(own).mark_line(strokeWidth=2).encode(strokeDash=by_dash)
        dots = base(of_kind).mark_point(size=60, filled=True, opacity=1)
        heading = heading_of(f"{domains.heading} domains")
        panels.append((line + dots).properties(width=340, height=260, title=heading))
    return alt.hconcat(*panels, spacing=30)
