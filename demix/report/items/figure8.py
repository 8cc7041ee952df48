"""Figure 8 of the paper: the posterior over the training experts after each block of a novel domain's dev split, with
the updating prior.
"""

from typing import Any

from demix.report.item import FigureItem, Group
from demix.report.material import Material
from demix.report.needs import NOVEL

ITEM = FigureItem(
    "Figure 8: the posterior over experts, block by block, on the novel domains", Group.FIGURES, 8, needs=(NOVEL,)
)


def make(material: Material) -> tuple[Any, str]:
    from demix.report.heatmaps import posterior_figure

    return posterior_figure(material, "novel")
