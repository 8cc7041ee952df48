"""Table 13 of the paper: change of perplexity by adaptation to a novel domain, with the perplexities before and after:
on the training domains (forgetting) and on the novel domain, for Dense-DAPT, for DEMix-DAPT's expert alone, and for the
mixture of the training experts and the new one. The caption says which of them ends lower.
"""

from dataclasses import replace
from typing import Any

from demix.progress import so_many
from demix.report.domains import mean_of, percent
from demix.report.item import Group, TableItem
from demix.report.items import figure6
from demix.report.material import Material
from demix.report.needs import NOVEL
from demix.report.systems import before_dense_dapt
from demix.report.table import Table


def _figure6(material: Material) -> Any:
    return replace(figure6.ITEM, make=figure6.make).drawn(material)


ITEM = TableItem(
    "Table 13: adapting to a novel domain, and forgetting", Group.PAPER, 13, needs=(NOVEL,), above=_figure6
)


def make(material: Material) -> Table:
    from demix.report.adapting import ADAPTATIONS, adapting, changed_bytes
    from demix.report.cells import ends_lower

    novel, trained = material.novel, len(material.training)
    before, after = adapting(material)
    frame, label = percent(before, after), f"Mean of {len(novel)}"
    for rows in (frame, before, after):
        rows.loc[label] = [mean_of(rows[column]) for column in rows]
    beneath = before.map("{:.2f}".format) + " to " + after.map("{:.2f}".format)
    sizes = changed_bytes(material.run)
    formats = dict.fromkeys(frame, "{:+.1f}")
    shown = {name: "average" if parent.averaged else parent.likeliest for name, parent in material.parents.items()}
    frame["Parent expert"] = [*(shown.get(name, "") for name in novel), " "]
    own, old = (
        ends_lower(*(after.loc[novel, f"{kind}: {part}"] for kind in ADAPTATIONS[:2]))
        for part in ("own domain", "training domains")
    )
    return Table(
        "Change of test perplexity in percent (negative is better) by adapting to the domain of each row, and below it "
        f"the perplexities before and after: averaged over {so_many(trained, 'training domain')}, which shows "
        f"forgetting, and on the domain adapted to. On the domain adapted to, {own}; on the training domains, {old}.",
        frame,
        notes=(
            f"Dense-DAPT starts from {before_dense_dapt(material.run).label} and is compared with it.",
            (
                "DEMix-DAPT's expert began as the average of the training experts by posterior, and is compared with "
                "the likeliest of them."
                if material.averaged
                else "DEMix-DAPT's expert is compared with the parent expert that it was copied from."
            )
            + " On training domains it is each domain's own expert before and after the experts were added, the same "
            "by construction: no file of theirs is written.",
            f"One expert added: the mixture of {so_many(trained, 'training expert')} and the new one with a cached "
            f"prior (6.2, Figure 6), compared with the mixture of the {trained}.",
            f"Dense-DAPT changes every parameter of a model, {sizes['Dense-DAPT']:,} bytes per domain; DEMix-DAPT "
            f"those of one expert, {sizes['DEMix-DAPT']:,} bytes.",
            "Per cents of the last row are means of those above it.",
        ),
        formats=formats,
        summaries=frozenset({label}),
        beneath=beneath.where(frame[beneath.columns].notna(), ""),
    )
