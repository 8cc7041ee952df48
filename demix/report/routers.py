"""Routers of token-routed models: which experts the tokens of each domain choose, and what a choice tells of it."""

from typing import Any

import altair as alt
import numpy as np
import pandas as pd
from scipy.stats import entropy

from demix.files import read_parquet
from demix.report import title_of
from demix.report.cells import mean_of
from demix.report.heatmaps import heat_maps
from demix.report.look import CELL_RANGE, finish, finite
from demix.report.read import novel_domains, read_metrics, training_domains
from demix.report.render import Table
from demix.run.run import Run
from demix.run.systems import token_routed

# A figure has this many layers of a model at most: the first, the last and those between at equal distances.
LAYERS_SHOWN = 3


def read_loads(run: Run) -> dict[str, pd.DataFrame]:
    """The share of a domain's choices (rows) that fall on each expert (columns), by model and layer of the routed rows.

    Keys are the labels of rows; the frames have the index (layer, domain), and domains in the config's order. Raises
    DemixError if a file loads/<model>.parquet is missing or damaged.
    """
    domains = [*training_domains(run), *novel_domains(run)]
    shares = {}
    for routers in token_routed(run):
        table = read_parquet(run.folder / "loads" / f"{routers.name}.parquet").to_pandas()
        counts = table.pivot(index=["layer", "domain"], columns="expert", values="choices").astype("float64")
        places = pd.MultiIndex.from_product([sorted(set(table["layer"])), domains], names=counts.index.names)
        counts = counts.reindex(places).set_axis(list(routers.experts), axis=1)
        shares[routers.label] = counts.div(counts.sum(axis=1), axis=0)
    return shares


def told(shares: pd.DataFrame, top_k: int) -> float:
    """The share of a domain's identity that one choice of an expert tells, from `shares` [domains, experts]; 0 to 1.

    The mutual information of expert and domain, where all domains are equally likely, over the most that so many
    experts could tell of so many domains: the logarithm of the number of domains or, if that is less, of E / `top_k`,
    as the `top_k` experts of a token differ and count alike. NaN where no choice could tell anything.
    """
    information = entropy(shares.mean(axis=0)) - np.mean(entropy(shares.to_numpy(), axis=1))
    domains, experts = shares.shape
    most = np.log(min(domains, experts / top_k))
    return float(information / most) if most > 0 else float("nan")


def routers_table(loads: dict[str, pd.DataFrame], run: Run) -> Table:
    """What each router's choices tell of the domain, and how equal the loads of its experts are."""
    training, rows = training_domains(run), dict[str, dict[str, Any]]()
    for model in token_routed(run):
        by_layer = [shares.droplevel("layer").loc[training] for _, shares in loads[model.label].groupby("layer")]
        information = [100 * told(shares, model.top_k) for shares in by_layer]
        means = [shares.mean(axis=0) for shares in by_layer]
        lines = list(read_metrics(run.folder / "metrics" / f"{model.name}.jsonl"))
        last = [line["router_dropped"] for line in lines[-max(1, len(lines) // 10) :] if "router_dropped" in line]
        rows[model.label] = {
            "A token chooses": f"{model.top_k} of {len(model.experts)}",
            "Routed layers": float(len(by_layer)),
            "Told of the domain, %": mean_of(information),
            "in the layer that tells most, %": max(information),
            "Busiest expert, times an equal share": max(float(mean.max() * len(mean)) for mean in means),
            "Effective experts": mean_of(float(np.exp(entropy(mean))) for mean in means),
            "Dropped in training, %": 100 * mean_of(last),
        }
    frame = pd.DataFrame.from_dict(rows, orient="index")
    return Table(
        "routers",
        title_of("routers"),
        "Which experts the test tokens of the training domains choose, in models whose tokens choose their experts. "
        "Told of the domain: the mutual information of a chosen expert and the domain of its token, over the most "
        "that such a choice could tell; 0% if all domains choose alike, 100% if each domain has experts of its own. "
        "A mean over routed layers. Then the load of the busiest expert of any layer, the exponential of the entropy "
        "of loads (a mean over layers), and the choices that no expert took in the last tenth of the updates.",
        frame,
        notes=(
            "Tests have no capacity, so that no choice is dropped there. Merged-routed models are not trained: their "
            "routers know the mean state of each expert's dev text.",
        ),
        formats={name: "{:.1f}" for name in frame if name.endswith("%")}
        | {"Routed layers": "{:.0f}", "Busiest expert, times an equal share": "{:.2f}", "Effective experts": "{:.1f}"},
    )


def router_loads(loads: dict[str, pd.DataFrame], run: Run) -> alt.TopLevelMixin:
    """The share of each domain's choices that fall on each expert, a heat map for each model and layer."""
    training, novel = training_domains(run), novel_domains(run)
    maps = []
    for model in token_routed(run):
        label, of_model = model.label, loads[model.label]
        layers = list(dict.fromkeys(of_model.index.get_level_values("layer")))
        shown = np.unique(np.linspace(0, len(layers) - 1, min(LAYERS_SHOWN, len(layers))).round().astype(int))
        for layer in (layers[index] for index in shown):
            shares = of_model.loc[layer]
            tells = 100 * told(shares.loc[training], model.top_k)
            heading = f"{label}, layer {layer}: tells {tells:.1f}% of the domain"
            cells = [
                {"kind": "all", "domain": domain, "expert": expert, "value": finite(value)}
                for domain, values in shares.iterrows()
                for expert, value in values.items()
            ]
            maps.append(
                heat_maps(
                    cells,
                    {"all": ([*training, *novel], heading)},
                    list(shares.columns),
                    alt.Scale(domain=[0, 1], range=CELL_RANGE, interpolate="lab"),
                    legend=alt.Legend(title="share", format=".0%", titlePadding=8),
                    form=".0%",
                )
            )
    last = "; novel domains stand last" if novel else ""
    return finish(
        alt.concat(*maps, columns=2, spacing=24, align="each"),
        title_of("router_loads"),
        "The share of the choices of a domain's test tokens (row) that fall on each expert (column) of a layer, in "
        f"models whose tokens choose their experts{last}. Each row sums to 1. Experts with numbers have nothing in "
        "common with those of other layers; experts with names are those of a domain or cluster. Above each map: the "
        "mutual information of expert and training domain, over the most that such a choice could tell.",
    )
