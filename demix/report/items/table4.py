"""Table 4 of the paper: test perplexity on each training domain, for the systems of Table 3."""

from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.systems import in_domain
from demix.report.table import Table

ITEM = TableItem("Table  4: perplexity by training domain", Group.PAPER, 4)


def make(material: Material) -> Table:
    from demix.report.cells import by_system, lowest

    systems = {system.label: system for system in in_domain(material.run)}
    frame, beneath, notes = by_system(material.results, systems, material.training)
    return Table(
        "Test perplexity by training domain, for the systems of Table 3. Lower is better; the lowest of each column is "
        "bold.",
        frame,
        notes=notes,
        best=lowest(frame, axis=0),
        beneath=beneath,
    )
