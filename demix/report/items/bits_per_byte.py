"""Bits per byte of the test text, mean over the training and over the novel domains, of every trained system."""

from demix.report.domains import mean_of
from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.systems import trained_systems
from demix.report.table import Table

ITEM = TableItem("Bits per byte by system", Group.FURTHER)


def make(material: Material) -> Table:
    import pandas as pd

    rows = {
        system.label: {
            domains.heading: mean_of(material.own.of(system, domains.names)["bits_per_byte"])
            for domains in material.kinds
        }
        for system in trained_systems(material.run)
    }
    frame = pd.DataFrame.from_dict(rows, orient="index")
    return Table("Lower is better. These compare across tokenizers.", frame, formats=dict.fromkeys(frame, "{:.3f}"))
