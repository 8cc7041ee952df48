"""Table 4 of the paper: test perplexity on each training domain, for the systems of Table 3."""

from demix.report.domains import mean_of
from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.systems import in_domain
from demix.report.table import Table

ITEM = TableItem("Table  4: perplexity by training domain", Group.PAPER, 4)


def make(material: Material) -> Table:
    import numpy as np

    from demix.report.cells import COUNTED, by_domain, lowest

    systems = list(in_domain(material.run))
    frame, beneath, notes = by_domain(material.results, {one.label: one for one in systems}, material.training)
    label = f"Mean of {len(material.training)}"
    frame.loc[label] = [*(mean_of(frame[system.label]) for system in systems), np.nan, np.nan]
    return Table(
        "Test perplexity on each training domain, for the systems of Table 3. Lower is better; the lowest of each "
        "domain is bold.",
        frame,
        notes=notes,
        formats=COUNTED,
        summaries=frozenset({label}),
        best=lowest(frame.drop(columns=list(COUNTED)), axis=1),
        beneath=beneath,
    )
