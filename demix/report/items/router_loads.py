"""The share of the choices of each domain's test tokens that fall on each expert of a layer, in models whose tokens
choose their experts.
"""

from typing import Any

from demix.report.item import FigureItem, Group
from demix.report.material import Material
from demix.report.needs import ROUTERS
from demix.run.systems import token_routed

ITEM = FigureItem("Which experts the tokens of each domain choose", Group.FAMILIES, 4, needs=(ROUTERS,))
# A figure has this many layers of a model at most: the first, the last and those between at equal distances.
LAYERS_SHOWN = 3


def make(material: Material) -> tuple[Any, str]:
    import altair as alt
    import numpy as np

    from demix.report.heatmaps import SHARE_LEGEND, cells_of, heat_maps
    from demix.report.look import share_scale
    from demix.report.routers import told

    maps = []
    for model in token_routed(material.run):
        of_model = material.loads[model.label]
        layers = list(dict.fromkeys(of_model.index.get_level_values("layer")))
        shown = np.unique(np.linspace(0, len(layers) - 1, min(LAYERS_SHOWN, len(layers))).round().astype(int))
        for layer in (layers[index] for index in shown):
            shares = of_model.loc[layer]
            tells = 100 * told(shares.loc[material.training], model.top_k)
            heading = f"{model.label}, layer {layer}: tells {tells:.1f}% of the domain"
            halves = {"all": ([*material.training, *material.novel], heading)}
            experts = list(shares.columns)
            cells = cells_of(shares, "all")
            maps.append(heat_maps(cells, halves, experts, share_scale(), legend=SHARE_LEGEND, form=".0%"))
    last = "; novel domains stand last" if material.novel else ""
    return alt.concat(*maps, columns=2, spacing=24, align="each"), (
        "The share of the choices of a domain's test tokens (row) that fall on each expert (column) of a layer, in "
        f"models whose tokens choose their experts{last}. Each row sums to 1. Experts with numbers have nothing in "
        "common with those of other layers; experts with names are those of a domain or cluster. Above each map: the "
        "mutual information of expert and training domain, over the most that such a choice could tell."
    )
