"""Routers of token-routed models: which experts the tokens of each domain choose, and what a choice tells of it."""

import numpy as np
import pandas as pd
from scipy.stats import entropy

from demix.files import read_parquet
from demix.run.run import Run
from demix.run.systems import token_routed


def read_loads(run: Run) -> dict[str, pd.DataFrame]:
    """The share of a domain's choices (rows) that fall on each expert (columns), by model and layer of the routed rows.

    Keys are the labels of rows; the frames have the index (layer, domain), and domains in the config's order. Raises
    DemixError if a file loads/<model>.parquet is missing or damaged.
    """
    domains = [*run.training, *run.novel]
    shares = {}
    for routers in token_routed(run):
        table = read_parquet(run.folder / "loads" / f"{routers.name}.parquet").to_pandas()
        counts = table.pivot(index=["layer", "domain"], columns="expert", values="choices").astype("float64")
        places = pd.MultiIndex.from_product([sorted(set(table["layer"])), domains], names=counts.index.names)
        counts = counts.reindex(places).set_axis(list(routers.experts), axis=1)
        shares[routers.label] = counts.div(counts.sum(axis=1), axis=0)
    return shares


def by_layer(loads: pd.DataFrame, domains: list[str]) -> list[pd.DataFrame]:
    """The shares [domains, experts] of each layer, of the loads of a model (`read_loads`)."""
    return [shares.droplevel("layer").loc[domains] for _, shares in loads.groupby("layer")]


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
