"""Mean test perplexity by the position of a token in its block, by row of models, in the longest blocks on which each
is evaluated. The dotted line is the length of a block in training.
"""

from typing import TYPE_CHECKING, Any

from demix.report.item import FigureItem, Group
from demix.report.material import Material
from demix.report.needs import CONTEXTS
from demix.run.contexts import labels

if TYPE_CHECKING:
    import altair as alt
    import pandas as pd

ITEM = FigureItem("Perplexity by the position in the block", Group.VARIANTS, 1, needs=(CONTEXTS,))


def make(material: Material) -> tuple[Any, str]:
    import altair as alt

    from demix.report.contexts import MIXED
    from demix.report.look import data_of, heading_of

    trained, points = material.run.context, positions_points(material)
    end = (
        alt.Chart(data_of([{"position": trained}])).mark_rule(color="#666666", strokeDash=[2, 2]).encode(x="position:Q")
    )
    panels = [
        (end + _lines(points[points["kind"] == domains.kind], [model.label for model in material.run.own])).properties(
            width=380, height=280, title=heading_of(f"{domains.heading} domains")
        )
        for domains in material.kinds
        if (points["kind"] == domains.kind).any()
    ]
    return alt.hconcat(*panels, spacing=30), (
        "Mean test perplexity of tokens by their position, in bins, each row of models in its longest blocks. The "
        f"dotted line is the length of a block in training ({trained:,}), where learned positions end. {MIXED}"
    )


def positions_points(material: Material) -> "pd.DataFrame":
    """Mean perplexity by bin of positions, of each row of `models` in its longest blocks.

    Columns row, label, kind, context, begin, end, perplexity. A bin has a point where every domain has tokens in it.
    """
    import numpy as np
    import pandas as pd

    rows = material.contexts
    longest = rows[rows["context"] == rows.groupby("model")["context"].transform("max")]
    longest = longest.assign(perplexity=np.exp((longest["nll"] / longest["tokens"]).astype("float64")))
    points = []
    for model, label in labels(material.run).items():
        own = longest[longest["model"] == model]
        for domains in material.kinds:
            by_domain = own.pivot_table("perplexity", ["context", "begin", "end"], "domain")
            means = by_domain.reindex(columns=domains.names).dropna().mean(axis=1)
            points += [(model, label, domains.kind, *place, perplexity) for place, perplexity in means.items()]
    names = ["row", "label", "kind", "context", "begin", "end", "perplexity"]
    return pd.DataFrame(points, columns=names).dropna()


def _lines(points: "pd.DataFrame", series: list[str]) -> "alt.Chart":
    import altair as alt

    from demix.report.look import coloured, dashed, data_of, finite

    # A model has the same colour in each figure.
    shown = [name for name in series if (points["label"] == name).any()]
    legend = alt.Legend(title=None, symbolSize=200, symbolType="stroke", values=shown)
    values = [
        {
            "row": row.label,
            "positions": f"{row.begin} to {row.end - 1}",
            "position": (row.begin + row.end) / 2,
            "block": row.context,
            "perplexity": finite(row.perplexity),
        }
        for row in points.itertuples()
    ]
    chart: alt.Chart = (
        alt.Chart(data_of(values))
        .mark_line(strokeWidth=2, point=alt.OverlayMarkDef(size=30, filled=True))
        .encode(
            x=alt.X("position:Q", title="position in the block", axis=alt.Axis(grid=False)),
            y=alt.Y("perplexity:Q", title="test perplexity", scale=alt.Scale(zero=False)),
            color=coloured("row", series, legend, sort=series),
            strokeDash=dashed("row", series, legend, sort=series),
            tooltip=["row:N", "block:Q", "positions:N", "perplexity:Q"],
        )
    )
    return chart
