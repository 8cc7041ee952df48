"""Mean test perplexity of DEMix by the decay of the updating prior and of the cached prior. The lowest value is chosen
on the test data.
"""

from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.table import Table

ITEM = TableItem("The decay λ of the prior", Group.FURTHER, 2)


def make(material: Material) -> Table:
    from demix.report.cells import grid_frame, lowest

    frame = grid_frame(material.own, "decay", ("updating", "cached"), material.kinds)
    best = "; ".join(
        f"{column}: {values.idxmin() if values.round(2).nunique() > 1 else 'all alike'}"
        for column, values in frame.items()
        if values.notna().any()
    )
    return Table(
        "Mean test perplexity of DEMix over its training experts by the decay λ of Eq. 7, for the updating prior and "
        "for the cached one. Lower is better; the lowest of each column is bold.",
        frame,
        notes=(
            f"The other tables use {material.run.config.evaluation.decay}.",
            *([f"Lowest: {best}. Read off the test data, so no choice that a system could have made."] if best else []),
        ),
        best=lowest(frame, axis=0) if len(frame) else None,
    )
