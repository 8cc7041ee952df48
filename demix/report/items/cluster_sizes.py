"""The test documents of each cluster over an equal share, a box for each clustering; as in Figure 14 of the c-BTM
paper.
"""

from typing import Any

from demix.report.item import FigureItem, Group
from demix.report.material import Material
from demix.report.needs import CLUSTERS

ITEM = FigureItem("How unequal the clusters of held-out documents are", Group.FAMILIES, 3, needs=(CLUSTERS,))


def make(material: Material) -> tuple[Any, str]:
    import altair as alt

    from demix.report.look import COLOURS, data_of, finite

    found = material.clusters.sizes()
    names = list(dict.fromkeys(found["clustering"]))
    values = [
        {
            "clustering": row.clustering,
            "cluster": row.cluster,
            "documents": int(row.documents),
            "share": finite(row.share),
        }
        for row in found.itertuples()
    ]
    base = alt.Chart(data_of(values)).encode(
        x=alt.X("clustering:N", sort=names, title=None, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("share:Q", title="test documents of a cluster, over an equal share", scale=alt.Scale(zero=True)),
    )
    boxes = base.mark_boxplot(extent="min-max", size=40, color=COLOURS[0], opacity=0.35)
    points = base.mark_point(size=40, filled=True, color=COLOURS[0], opacity=0.8).encode(
        tooltip=["clustering:N", "cluster:N", "documents:Q", "share:Q"]
    )
    equal = alt.Chart(data_of([{"share": 1}])).mark_rule(strokeDash=[4, 4]).encode(y="share:Q")
    return alt.layer(boxes, points, equal).properties(width=max(400, 110 * len(names)), height=320), (
        "As Figure 14 of the c-BTM paper. One point per cluster: its test documents, over those of a cluster if all "
        "were equal. Boxes hold the middle half, whiskers reach to the smallest and the largest cluster."
    )
