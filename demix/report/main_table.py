"""The main table of a run, for the terminal and for the first page."""

import numpy as np
import rich.table

from demix.report.material import Material
from demix.report.systems import main_systems
from demix.report.table import cell


def main_table(material: Material) -> rich.table.Table:
    """Mean test perplexity of every system on the training and on the novel domains.

    Each mixture of the paper has one row per rule of weights: all earlier tokens of the block (`history`, the paper)
    and the previous token only (`released`, the code released with the paper). The rules beyond the paper come last.
    """
    table = rich.table.Table(title="Mean test perplexity (lower is better)", title_justify="left")
    table.add_column("system")
    table.add_column("weights")
    for domains in material.kinds:
        table.add_column(domains.said, justify="right")
    for named, system in main_systems(material.run):
        means = [material.own.mean(system, domains.names) for domains in material.kinds]
        # The config may ask for some of the rules alone.
        if np.isnan(means).all():
            continue
        oracle = [domains.kind == "novel" and system.method == "naive" for domains in material.kinds]
        cells = [cell(mean, "{:.2f}") + (" *" if marked else "  ") for mean, marked in zip(means, oracle, strict=True)]
        table.add_row(named.label, system.weights, *cells)
    if material.novel:
        table.caption = "* oracle: the best single token or expert, chosen on the test data"
    return table
