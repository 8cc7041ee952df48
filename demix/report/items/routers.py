"""What the choice of an expert tells of a token's domain, how equal the loads of experts are, and the share of choices
dropped in training, in models whose tokens choose their experts.
"""

from typing import Any

from demix.report.domains import mean_of
from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import ROUTERS
from demix.report.table import Table
from demix.run.systems import token_routed

ITEM = TableItem(
    "Routers of tokens: what an expert tells of the domain, and loads", Group.FAMILIES, 7, needs=(ROUTERS,)
)


def make(material: Material) -> Table:
    import numpy as np
    import pandas as pd
    from scipy.stats import entropy

    from demix.report.read import read_metrics
    from demix.report.routers import by_layer, told

    rows: dict[str, dict[str, Any]] = {}
    for model in token_routed(material.run):
        layers = by_layer(material.loads[model.label], material.training)
        information = [100 * told(shares, model.top_k) for shares in layers]
        means = [shares.mean(axis=0) for shares in layers]
        lines = list(read_metrics(material.metrics / f"{model.name}.jsonl"))
        last = [line["router_dropped"] for line in lines[-max(1, len(lines) // 10) :] if "router_dropped" in line]
        rows[model.label] = {
            "A token chooses": f"{model.top_k} of {len(model.experts)}",
            "Routed layers": float(len(layers)),
            "Told of the domain, %": mean_of(information),
            "in the layer that tells most, %": max(information),
            "Busiest expert, times an equal share": max(float(mean.max() * len(mean)) for mean in means),
            "Effective experts": mean_of(float(np.exp(entropy(mean))) for mean in means),
            "Dropped in training, %": 100 * mean_of(last),
        }
    frame = pd.DataFrame.from_dict(rows, orient="index")
    return Table(
        "Which experts the test tokens of the training domains choose, in models whose tokens choose their experts. "
        "Told of the domain: the mutual information of a chosen expert and the domain of its token, over the most that "
        "such a choice could tell (a mean over routed layers): 0% if all domains choose alike, 100% if each domain has "
        "experts of its own. Busiest expert: that of any layer. Effective experts: the exponential of the entropy of "
        "loads (a mean over layers). Dropped: the choices that no expert took in the last tenth of the updates.",
        frame,
        notes=(
            "In tests experts have no capacity, so that no choice is dropped. Merged-routed models are not trained: "
            "their routers are solved from each expert's dev text, or are those that FlexOlmo's experts learned.",
        ),
        formats={name: "{:.1f}" for name in frame if name.endswith("%")}
        | {"Routed layers": "{:.0f}", "Busiest expert, times an equal share": "{:.2f}", "Effective experts": "{:.1f}"},
    )
