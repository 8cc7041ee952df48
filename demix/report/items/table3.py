"""Table 3 of the paper: mean test perplexity over the training domains of two dense baselines, of a dense model with
domain tokens, and of DEMix with the domain known (naive) or mixed with a cached prior.
"""

from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.systems import BALANCED, in_domain
from demix.report.table import Table

ITEM = TableItem("Table  3: perplexity on the training domains", Group.PAPER, 3)
HEADINGS = {
    "Training": "Perplexity",
    "Training, %": "Against Dense (Balanced), %",
    "Training, lower": "Domains better than Dense (Balanced)",
}


def make(material: Material) -> Table:
    from demix.report.cells import compared, lowest, mean_notes

    domains = material.kinds[0]
    lines = {system.label: (system, BALANCED) for system in in_domain(material.run)}
    frame, beneath = (found.rename(columns=HEADINGS) for found in compared(material, lines, [domains]))
    return Table(
        f"Test perplexity averaged over {domains.said}, for two dense baselines, a dense "
        "model with domain tokens, and DEMix with the domain known (naive) or mixed with a cached prior. Lower is "
        "better.",
        frame,
        notes=mean_notes(material.results),
        formats={"Against Dense (Balanced), %": "{:+.1f}"},
        best=lowest(frame[["Perplexity"]], axis=0),
        beneath=beneath,
    )
