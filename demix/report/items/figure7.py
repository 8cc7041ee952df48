"""Figure 7 of the paper: the posterior over the training experts after each block of a training domain's dev split,
with the updating prior.
"""

from typing import Any

from demix.report.item import FigureItem, Group
from demix.report.material import Material

ITEM = FigureItem("Figure 7: the posterior over experts, block by block, on the training domains", Group.FIGURES, 7)


def make(material: Material) -> tuple[Any, str]:
    from demix.report.heatmaps import posterior_figure

    return posterior_figure(material, "training")
