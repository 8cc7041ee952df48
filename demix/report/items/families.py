"""Mean test perplexity of each row of models on the training and on the novel domains, at equal tokens of training:
dense models, DEMix, whole models per domain (BTM) or per cluster (c-BTM), each mixed by the rule of its paper.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from demix.report.domains import percent
from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import FAMILIES
from demix.report.systems import BALANCED
from demix.report.table import Table
from demix.run.run import Run
from demix.run.systems import System, routed_weights

if TYPE_CHECKING:
    from demix.report.families import Family

ITEM = TableItem("Families of models: perplexity at equal tokens", Group.FAMILIES, 1, needs=(FAMILIES,))
OF_RELEASED = (
    "Released scorer: weights by clusters as in the code released with c-BTM, at the same temperature: distances are "
    "squared twice, and the context lacks the last token."
)
OF_AVERAGES = (
    "Averaged experts are one model, whose parameters are the mean of theirs. It is made of the run's own seed, and "
    "compared with Dense (Balanced) of this seed."
)
OF_ROUTED = (
    "Merged-routed: each token chooses two of a row's experts in every layer. The router is a ridge regression of the "
    "domain on the token's state, over dev text; nothing is trained for it. What branches have besides feedforwards is "
    "averaged. FlexOlmo's experts keep their routers and have their anchor beside them. The model is made of the run's "
    "own seed, and compared with Dense (Balanced) of this seed."
)

OF_TOP_K = (
    "k: the number of experts that each token chooses in a layer, without another training. Gates sum to 1 where they "
    "do in training. These numbers are of the run's own seed."
)


def make(material: Material) -> Table:
    import pandas as pd

    from demix.report.cells import lowest
    from demix.report.families import by_label

    rows, beneath = {}, {}
    for label, family in by_label(material.run).items():
        system, mixed = family.system, family.model.kind.has_experts
        what = "clusters" if family.clustering else "domains"
        experts = f"{len(family.model.experts)} {what}"
        about: dict[str, Any] = {
            "Family": family.name,
            "Experts": experts if mixed and system.method != "merged" else family.chosen,
            "Mixed by": " ".join(filter(None, (system.method, system.weights))) if mixed else "",
            "Tokens": family.learned(material.tokens_before),
        }
        numbers, beneath[label] = _numbers(material, system)
        rows[label] = about | numbers | _by_top_k(material, family)
        for rule, ruled in _other_rules(system, material.run).items() if mixed and system.method != "merged" else ():
            for domains in material.kinds:
                rows[label][f"{domains.heading}, {rule}"] = material.results.mean(ruled, domains.names)
    frame = pd.DataFrame.from_dict(rows, orient="index")
    return Table(
        "Mean test perplexity of each row of models over the training and over the novel domains. Each row is mixed as "
        "its paper does, and nothing of the rule is chosen. Experts of domains: cached, a prior from dev text of the "
        "domain, with weights by the block's history. Experts of clusters: cluster, the distance of the text so far to "
        "each cluster, where evaluation.weights names it. Lower is better. % is the change from Dense (Balanced).",
        frame,
        notes=_notes(material),
        formats={"Tokens": "{:,.0f}"} | {name: "{:+.1f}" for name in frame if name.endswith("%")},
        best=lowest(frame[[domains.heading for domains in material.kinds]], axis=0),
        beneath=pd.DataFrame.from_dict(beneath, orient="index"),
    )


def _by_top_k(material: Material, family: "Family") -> dict[str, float]:
    """By column, the means of a token-routed model by the number of experts that a token chooses in a layer."""
    routed, row = family.architecture.routed, {}
    if not routed:
        return {}
    for k in material.run.config.evaluation.experts_top_k or ():
        number = routed.experts if k == "all" else k
        system = replace(family.system, top_k=None if number == routed.top_k else number)
        for domains in material.kinds:
            row[f"{domains.heading}, k = {k}"] = material.own.mean(system, domains.names)
    return row


def _numbers(material: Material, system: System) -> tuple[dict[str, float], dict[str, str]]:
    """By column, the means of a system with their change from Dense (Balanced), and what stands below them."""
    import numpy as np

    from demix.report.cells import beneath_mean

    row, lines = {}, {}
    # Merged models are made of the run's own seed alone.
    beside = material.own if system.method == "merged" else material.results
    for domains in material.kinds:
        mean, dense = material.results.mean(system, domains.names), beside.mean(BALANCED, domains.names)
        row[domains.heading] = mean
        row[f"{domains.heading}, %"] = percent(dense, mean) if system != BALANCED else np.nan
        lines[domains.heading] = beneath_mean(material.results, system, domains.names)
    return row, lines


def _other_rules(system: System, run: Run) -> dict[str, System]:
    """`system` by rules of weights whose parameters are chosen on dev, and by that of the code released with c-BTM."""
    rules = {
        "tempered": replace(system, method="uniform", weights="tempered"),
        "switching": replace(system, method="fitted", weights="switching"),
    }
    if routed := routed_weights(run):
        near = replace(system, method="uniform", weights=routed)
        rules["cluster on dev"] = replace(near, variant="dev_temperature")
        rules["released scorer"] = near.released_scorer()
    return rules


def _notes(material: Material) -> tuple[str, ...]:
    from demix.report.read import parent_notes

    run, seeds = material.run, len(material.results.by_seed)
    return (
        "Further columns are by rules whose parameters are chosen on dev: those of tempered on dev of the training "
        "domains, those of switching (its prior too) and of cluster (temperature and top-k) on dev of the domain "
        "itself. So switching and cluster are told the domain there, as cached is.",
        *([OF_RELEASED] if routed_weights(run) else []),
        "Tokens are those of all experts together, the seed phase included.",
        *parent_notes(run, material.tokens_before),
        *([OF_TOP_K] if run.config.evaluation.experts_top_k else []),
        *([OF_AVERAGES] if not all(one.token_routed for one in run.merged) else []),
        *([OF_ROUTED] if any(one.token_routed for one in run.merged) else []),
        f"Means over {seeds} seeds, ± the standard deviation of a seed's mean. All seeds have the same clusters."
        if seeds > 1
        else "Below a mean its 95% interval from resampling test documents, where every domain has 20 of them.",
    )
