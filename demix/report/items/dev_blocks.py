"""Mean test perplexity of DEMix with a cached prior, by the number of dev blocks from which the prior is computed."""

from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.table import Table

ITEM = TableItem("How much dev text the cached prior needs", Group.FURTHER, 3)


def make(material: Material) -> Table:
    from demix.report.cells import grid_frame, lowest

    settings = material.run.config.evaluation
    frame = grid_frame(material.own, "dev_blocks", ("cached",), material.kinds)
    return Table(
        "Mean test perplexity of DEMix over its training experts with a cached prior, by the number of dev blocks that "
        "the prior is taken from. Lower is better; the lowest of each column is bold.",
        frame,
        notes=(
            f"The other tables use {settings.dev_blocks}; the paper 100.",
            f"The prior weighs a block λ times as much as the next: at λ = {decay:g} the last block alone weighs "
            f"{1 - decay:.2f}, so that more blocks can hardly matter."
            if (decay := settings.decay) < 1
            else "At λ = 1 all blocks weigh alike.",
        ),
        best=lowest(frame, axis=0) if len(frame) else None,
    )
