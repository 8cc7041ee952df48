"""Test perplexity of each expert on the documents of each cluster, over that of the cluster's own expert, and the share
of each domain's documents in each cluster; as in Figures 15 and 16 of the c-BTM paper.
"""

from typing import TYPE_CHECKING, Any

from demix.report.item import FigureItem, Group
from demix.report.material import Material
from demix.report.needs import CLUSTERS
from demix.run.systems import clustered

if TYPE_CHECKING:
    import altair as alt

ITEM = FigureItem("Experts of clusters on clusters, and clusters against domains", Group.FAMILIES, 2, needs=(CLUSTERS,))
GRID = {"columns": 3, "spacing": 24, "align": "each"}


def make(material: Material) -> tuple[Any, str]:
    import altair as alt

    parts = alt.vconcat(_own(material), _by_domain(material), spacing=28)
    return parts.resolve_scale(color="independent"), (
        "As Figures 15 and 16 of the c-BTM paper. Top: test perplexity of each expert (column) on the test documents "
        "of each cluster (row), over that of the cluster's own expert: above 1 the own expert is better. Bottom: how "
        "the training documents of each domain (row) are divided among the clusters (columns)."
    )


def _own(material: Material) -> "alt.ConcatChart":
    """Each expert on each cluster, a heat map for each model."""
    import altair as alt
    import numpy as np

    from demix.report.heatmaps import cells_of, heat_maps
    from demix.report.look import CELL_RANGE, finite, heading_of

    ratios = {
        model.label: material.clusters.over_own(model.row, material.run.seed, model.domains)
        for model in clustered(material.run)
    }
    found = np.concatenate([table.to_numpy().ravel() for table in ratios.values()])
    ends = (min(0.9, np.nanmin(found, initial=1)), max(1.1, np.nanmax(found, initial=1)))
    # Orange says that another expert is better.
    colours = ["#fdae6b", "#ffffff", CELL_RANGE[-1]]
    scale = alt.Scale(type="log", domain=[finite(ends[0]), 1, finite(ends[1])], range=colours, interpolate="rgb")
    legend = alt.Legend(title=["perplexity ratio", "(log scale)"], titlePadding=8, format=".2f", tickCount=5)
    return alt.concat(
        *(
            heat_maps(cells_of(table, row), {row: (list(table.index), row)}, list(table.columns), scale, legend=legend)
            for row, table in ratios.items()
        ),
        title=heading_of("Test perplexity on a cluster (row) over that of its own expert"),
        **GRID,
    )


def _by_domain(material: Material) -> "alt.ConcatChart":
    """The share of each domain's documents in each cluster, a heat map for each clustering."""
    import altair as alt

    from demix.report.heatmaps import SHARE_LEGEND, cells_of, heat_maps
    from demix.report.look import heading_of, share_scale

    clusterings = {model.data: model.domains for model in clustered(material.run)}
    return alt.concat(
        *(
            heat_maps(
                cells_of(material.clusters.shares(data, material.training, names), data),
                {data: (material.training, data)},
                list(names),
                share_scale(),
                legend=SHARE_LEGEND,
                form=".0%",
                over="cluster",
            )
            for data, names in clusterings.items()
        ),
        title=heading_of("Share of a domain's training documents (row) in each cluster"),
        **GRID,
    )
