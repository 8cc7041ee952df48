"""How much of a removed domain's documents the models continue word for word: the model with the domain's expert, the
model without that expert, and a model never trained on the domain; merged models with and without the expert. Documents
of train stand beside documents of test.
"""

from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import WITHOUT_DOMAIN
from demix.report.table import Table
from demix.run.systems import merged_whole

ITEM = TableItem("What is left of a removed domain, word for word", Group.FURTHER, 9, needs=(WITHOUT_DOMAIN,))
AUDITED = {
    "own": "own expert",
    "mixture": "all experts",
    "minus": "without its expert",
    "without": "never trained on it",
    "merged": "{}",
    "merged_minus": "{} without its expert",
}


def make(material: Material) -> Table:
    import numpy as np
    import pandas as pd

    from demix.report.cells import seed_note

    audit, splits = material.audit, ("train", "test")
    merged = {folder: whole.label for folder, whole in merged_whole(material.run).items()}
    columns = {"matched": "Tokens word for word, {}", "share": "Tokens right, {} (%)", "nll": "Nats, {}"}
    rows = {}
    for domain in material.training:
        audited = audit[audit["domain"] == domain]
        for (system, model), found in audited.groupby(["system", "model"], sort=False):
            means = found.groupby("split")[list(columns)].mean()
            rows[f"{domain}, {AUDITED[system].format(merged.get(model))}"] = {
                heading.format(split): means[name].get(split, np.nan) * (100 if name == "share" else 1)
                for name, heading in columns.items()
                for split in splits
            } | {f"Documents, {split}": float((found["split"] == split).sum()) for split in splits}
    headings = [heading.format(split) for heading in columns.values() for split in splits]
    counts = [f"Documents, {split}" for split in splits]
    return Table(
        "Documents of a removed domain, continued greedily from 50 of their tokens. Tokens word for word: how many of "
        "the next 50 are the document's before the first that is not. Tokens right: the share of all 50 that are the "
        "document's. Nats: the loss of the document's own 50 tokens. Means over documents that were trained on and "
        "over test documents, which no model saw.",
        pd.DataFrame.from_dict(rows, orient="index", columns=[*headings, *counts]),
        notes=(
            "Train above test by more than chance: training documents were memorized. If that is so without the "
            "domain's expert, what all experts share has memorized them.",
            *seed_note(material.run),
        ),
        formats=dict.fromkeys(counts, "{:.0f}"),
    )
