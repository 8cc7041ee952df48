"""All models of a run, and the figures of models that learn from clusters."""

from dataclasses import replace
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from demix.report.cells import compared
from demix.report.charts import (
    CELL_RANGE,
    COLOURS,
    SHARE_LEGEND,
    by_line,
    data_of,
    finite,
    heading_of,
    heat_maps,
    share_scale,
)
from demix.report.run_data import RunData
from demix.report.systems import BALANCED, by_label, one_clusters
from demix.report.systems import families as families_of
from demix.report.table import Table
from demix.run.evaluated import balanced_pairs, variant_rows
from demix.run.systems import System, clustered

ONE = "1 cluster"
GRID = {"columns": 3, "spacing": 24, "align": "each"}


def families(data: RunData) -> Table:
    """Mean test perplexity of each model (rows; lower is better) over the training domains and over the novel domains.
    The columns “%” and “lower” compare the model with the baseline in the column “Against”: the change in percent, and
    the number of domains where perplexity is lower. The baseline is Dense (Balanced): no experts, equal tokens of each
    domain. There are two exceptions. A model of other than balanced clusters is compared with the model of as many
    balanced ones; a model with architecture options of its own, with the same model without them.

    Each model mixes its experts by the rule of its paper, if the run evaluates it. “cached prior”: the weights at the
    start of a block (context window) were estimated on the domain's dev split; the weight at a later token is the
    expert's posterior probability after the earlier tokens of the block. “cluster”: the weights depend on the distance
    of the text so far to each expert's cluster. Experts of clusters use this rule if the config's key
    evaluation.weights lists it, and otherwise the cached prior.

    Tokens: the training tokens of all experts together, including those of a dense warm start. In a dense warm start,
    one dense model is trained first, and every expert starts from its parameters.
    """
    run = data.run
    known, alike, balanced = families_of(run), variant_rows(run), dict(balanced_pairs(run))
    pairs: dict[str, tuple[System, System]] = {}
    about: dict[str, dict[str, Any]] = {}
    for label, family in by_label(run).items():
        system, row = family.system, family.model.row
        mixed, merged = family.model.kind.has_experts, family.system.method == "merged"
        base = balanced.get(system, known[alike[row]].system if row in alike and not merged else BALANCED)
        what, merges = "clusters" if family.clustering else "domains", family.model.parent if family.model.mixes else ""
        pairs[label], about[label] = (
            (system, base),
            {
                "Experts": f"{len(family.model.experts)} {what}" if mixed and not merged else family.chosen,
                "Mixed by": system.label.rpartition(" (")[2].removesuffix(")") if mixed and not merged else "",
                "Tokens": float(family.tokens + sum(one.tokens for one in known.values() if one.model.name == merges)),
            },
        )
    table = compared(data, pairs, data.kinds)
    frame = pd.DataFrame.from_dict(about, orient="index").join(table.frame)
    frame["Against"] = [base.label if system != base else "" for system, base in pairs.values()]
    routed = {one.token_routed for one in run.merged}
    notes = ["Tokens of a merged model include its experts' tokens."] * any(one.model.mixes for one in known.values())
    begun = [one.model.label for one in known.values() if one.model.base.initial]
    notes += [f"Tokens of the imported models from which {', '.join(begun)} started do not count."] * bool(begun)
    if False in routed:
        notes.append("Averaged: one model whose parameters are the weighted mean of the experts' parameters.")
    if True in routed:
        notes.append(
            "Merged-routed: in every layer each token chooses two experts, one of which may be the anchor (the frozen "
            "feedforward of the parent). The routers were trained with the experts; the merge trains nothing."
        )
    if routed:
        notes.append("Merged models exist only for the run's own seed and are compared with models of this seed.")
    if len(data.results.by_seed) > 1:
        notes.append("All random seeds have the same clusters.")
    return replace(table.noted(*notes), frame=frame)


def by_clusters(data: RunData) -> tuple[Any, str]:
    """Mean test perplexity (lower is better) by the number of clusters, as in Figures 5, 6 and 13 of the c-BTM paper.
    Each cluster has one expert. Clusters are made by k-means, balanced or unbalanced, or at random. All models of a
    line have the same number of training tokens. Models with one expert per domain (BTM) are shown at the number of
    domains.
    """
    points = by_clusters_points(data)
    several = points["tokens"].nunique() > 1
    points["series"] = points["made"] + (points["tokens"].map(", {:,} tokens".format) if several else "")
    single = points["made"] == ONE
    # The model of one cluster is the first point of every line of its budget.
    of_several = points[~single & ~points["made"].str.startswith("domains")]
    starts = (
        of_several[["series", "tokens"]].drop_duplicates().merge(points[single].drop(columns="series"), on="tokens")
    )
    joined, series = pd.concat([starts, of_several]), list(dict.fromkeys(points["series"]))
    legend = alt.Legend(title=None, symbolSize=200, symbolType="stroke")

    def base(rows: pd.DataFrame) -> alt.Chart:
        chart: alt.Chart = alt.Chart(data_of(rows[["series", "row", "clusters", "perplexity"]])).encode(
            x=alt.X(
                "clusters:Q",
                title="clusters",
                scale=alt.Scale(type="log", base=2, nice=False, padding=16),
                axis=alt.Axis(values=sorted(set(points["clusters"])), format=".3~s", grid=False),
            ),
            y=alt.Y("perplexity:Q", title="test perplexity", scale=alt.Scale(zero=False)),
            **by_line("series", series, legend),
            tooltip=["row:N", "series:N", "clusters:Q", "perplexity:Q"],
        )
        return chart

    panels = []
    for domains in data.kinds:
        of_kind, own = (rows[rows["kind"] == domains.heading] for rows in (points, joined))
        drawn = base(own).mark_line(strokeWidth=2) + base(of_kind).mark_point(size=60, filled=True, opacity=1)
        panels.append(drawn.properties(width=340, height=260, title=heading_of(f"{domains.heading} domains")))
    labels = " or ".join(one.label for one in one_clusters(data.run).values())
    return alt.vconcat(alt.hconcat(*panels, spacing=30)), f"The point at one cluster is {labels}, trained on all text."


def by_clusters_points(data: RunData) -> pd.DataFrame:
    """Perplexity by number of clusters. The columns are made (how the text was divided among experts), clusters,
    tokens, kind, perplexity, row."""
    singles, points = one_clusters(data.run).values(), []
    for family in families_of(data.run).values():
        whole = family.model.kind.expert_scope == "model"
        if family.clustering:
            made = family.made if whole else f"{family.model.kind.label}, {family.made}"
        elif whole:
            made = "domains (BTM)"
        elif family.system in singles:
            made = ONE
        else:
            continue
        made += f", {family.begun}" if family.begun else ""
        for domains in data.kinds:
            perplexity = data.own.mean(family.system, domains.names)
            points.append((made, family.experts, family.tokens, domains.heading, perplexity, family.model.label))
    return pd.DataFrame(points, columns=["made", "clusters", "tokens", "kind", "perplexity", "row"]).dropna()


def cluster_experts(data: RunData) -> tuple[Any, str]:
    """Top: the test perplexity of each expert (column) on the test documents of each cluster (row), divided by the test
    perplexity of the cluster's own expert. Above 1, the own expert is better. Bottom: the share of each domain's
    training documents (row) in each cluster (column). As in Figures 15 and 16 of the c-BTM paper.
    """
    models, known = clustered(data.run), data.clusters
    ratios = {model.label: known.over_own(model, data.run.seed) for model in models}
    found = np.concatenate([table.to_numpy().ravel() for table in ratios.values()])
    ends = (min(0.9, np.nanmin(found, initial=1)), max(1.1, np.nanmax(found, initial=1)))
    # Orange says that another expert is better.
    colours = ["#fdae6b", "#ffffff", CELL_RANGE[-1]]
    scale = alt.Scale(type="log", domain=[finite(ends[0]), 1, finite(ends[1])], range=colours, interpolate="rgb")
    legend = alt.Legend(title=["perplexity ratio", "(log scale)"], titlePadding=8, format=".2f", tickCount=5)
    own = alt.concat(
        *(heat_maps({row: table}, scale, legend=legend) for row, table in ratios.items()),
        title=heading_of("Test perplexity on a cluster (row), divided by that of the cluster's own expert"),
        **GRID,
    )
    divided = alt.concat(
        *(
            heat_maps(
                {clustering: known.shares(clustering, data.training, names)},
                share_scale(),
                legend=SHARE_LEGEND,
                form=".0%",
                over="cluster",
            )
            for clustering, names in {model.data: model.domains for model in models}.items()
        ),
        title=heading_of("Share of a domain's training documents (row) in each cluster"),
        **GRID,
    )
    return alt.vconcat(own, divided, spacing=28).resolve_scale(color="independent"), ""


def cluster_sizes(data: RunData) -> tuple[Any, str]:
    """The number of test documents in each cluster (points), divided by the mean over the clusters. If all clusters
    were equally large, all points would be on the dashed line. Boxes contain the middle half of the clusters; whiskers
    end at the smallest and the largest cluster. As in Figure 14 of the c-BTM paper.
    """
    found = data.clusters.sizes
    names = list(dict.fromkeys(found["clustering"]))
    base = alt.Chart(data_of(found[["clustering", "cluster", "documents", "share"]])).encode(
        x=alt.X("clustering:N", sort=names, title=None, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("share:Q", title="test documents of a cluster / mean over clusters", scale=alt.Scale(zero=True)),
    )
    boxes = base.mark_boxplot(extent="min-max", size=40, color=COLOURS[0], opacity=0.35)
    points = base.mark_point(size=40, filled=True, color=COLOURS[0], opacity=0.8).encode(
        tooltip=["clustering:N", "cluster:N", "documents:Q", "share:Q"]
    )
    equal = alt.Chart(data_of([{"share": 1}])).mark_rule(strokeDash=[4, 4]).encode(y="share:Q")
    return alt.layer(boxes, points, equal).properties(width=max(400, 110 * len(names)), height=320), ""
