"""Change of dev perplexity by each learning rate of adaptation that the run tried, for DEMix-DAPT and Dense-DAPT, on
the training domains and on the domain adapted to.
"""

from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import NOVEL
from demix.report.table import Table

ITEM = TableItem("Learning rates of adaptation", Group.FURTHER, 6, needs=(NOVEL,))


def make(material: Material) -> Table:
    import pandas as pd

    rows = {
        f"{kind}, {factor:g} of the rate": {
            "Training domains": found["training"].mean(),
            "Own domain": found["own"].mean(),
            "Adaptations": len(found),
            "Chosen": int(found["chosen"].sum()),
        }
        for (kind, factor), found in material.trials.groupby(["kind", "factor"])
    }
    columns = ["Training domains", "Own domain", "Adaptations", "Chosen"]
    return Table(
        "Change of dev perplexity in percent (negative is better) by adapting with a fraction of the learning rate of "
        "training, averaged over the novel domains: on the training domains, which shows forgetting, and on the domain "
        "adapted to. The last column counts the adaptations that the run kept: those of the lowest loss on the own "
        "domain's dev split, or those of the only factor.",
        pd.DataFrame.from_dict(rows, orient="index", columns=columns).astype("float64"),
        notes=("The paper takes a tenth of the rate for both kinds.",),
        formats=dict.fromkeys(columns[:2], "{:+.1f}") | dict.fromkeys(columns[2:], "{:.0f}"),
    )
