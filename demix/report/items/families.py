"""Mean test perplexity of each row of models on the training and on the novel domains, at equal tokens of training:
dense models, DEMix, whole models per domain (BTM) or per cluster (c-BTM), each mixed by the rule of its paper; and the
change from the row that it is compared with.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.systems import BALANCED
from demix.report.table import Table
from demix.run.compared import balanced_pairs
from demix.run.run import Run
from demix.run.systems import System
from demix.run.variants import variant_rows

if TYPE_CHECKING:
    from demix.report.families import Family

ITEM = TableItem("All models: perplexity at equal tokens", Group.FAMILIES, 1)
OF_AVERAGES = "Averaged experts are one model, whose parameters are the mean of theirs."
OF_ROUTED = (
    "Merged-routed: each token chooses two of a row's experts in every layer. The router is a ridge regression of the "
    "domain on the token's state, over dev text; nothing is trained for it. What branches have besides feedforwards is "
    "averaged. FlexOlmo's experts keep their routers and have their anchor beside them."
)


def make(material: Material) -> Table:
    import pandas as pd

    from demix.report.cells import compared, lowest

    lines = [*_lines(material.run)]
    numbers, beneath = compared(material, {label: (one.system, base) for label, one, base in lines}, material.kinds)
    about = {label: _about(family, material) for label, family, _ in lines}
    frame = pd.DataFrame.from_dict(about, orient="index").join(numbers)
    frame["Against"] = [base.label if one.system != base else "" for _, one, base in lines]
    return Table(
        "Mean test perplexity of each row of models over the training and over the novel domains. Each row is mixed as "
        "its paper does, and nothing of the rule is chosen. Experts of domains: cached, a prior from dev text of the "
        "domain, with weights by the block's history. Experts of clusters: cluster, the distance of the text so far to "
        "each cluster, where evaluation.weights names it. Lower is better. % is the change from the row under Against: "
        "Dense (Balanced), the row of as many balanced clusters, or the row of the same kind without other options of "
        "the architecture. Lower: the number of domains where perplexity is below that row's.",
        frame,
        notes=_notes(material),
        formats={"Tokens": "{:,.0f}"} | {name: "{:+.1f}" for name in frame if name.endswith("%")},
        best=lowest(frame[[domains.heading for domains in material.kinds]], axis=0),
        beneath=beneath,
    )


def _lines(run: Run) -> Iterator[tuple[str, "Family", System]]:
    """The label and the family of each line, and the system that it is compared with."""
    from demix.report.families import by_label, families

    known, alike, balanced = families(run), variant_rows(run), dict(balanced_pairs(run))
    for label, family in by_label(run).items():
        row = family.model.row
        plain = known[alike[row]].system if row in alike and family.system.method != "merged" else BALANCED
        yield label, family, balanced.get(family.system, plain)


def _about(family: "Family", material: Material) -> dict[str, Any]:
    system, mixed = family.system, family.model.kind.has_experts
    what = "clusters" if family.clustering else "domains"
    return {
        "Experts": f"{len(family.model.experts)} {what}" if mixed and system.method != "merged" else family.chosen,
        "Mixed by": " ".join(filter(None, (system.method, system.weights))) if mixed else "",
        "Tokens": family.learned(material.tokens_before),
    }


def _notes(material: Material) -> tuple[str, ...]:
    from demix.report.cells import mean_notes
    from demix.report.read import parent_notes

    run, routed = material.run, {one.token_routed for one in material.run.merged}
    return (
        *mean_notes(material.results),
        "Tokens are those of all experts together, the seed phase included.",
        *parent_notes(run, material.tokens_before),
        *([OF_AVERAGES] if False in routed else []),
        *([OF_ROUTED] if True in routed else []),
        *(["Merged models are made of the run's own seed, and compared with the row of this seed."] if routed else []),
        *(["All seeds have the same clusters."] if len(material.results.by_seed) > 1 else []),
    )
