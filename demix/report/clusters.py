"""The clusters that experts of a run learned from: their terms, their documents, and each expert on each cluster."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from demix.data.cluster import Clusterer
from demix.files import read_parquet
from demix.report import title_of
from demix.report.heatmaps import heat_maps
from demix.report.look import CELL_RANGE, COLOURS, finish, finite, heading_of
from demix.report.read import training_domains
from demix.report.render import Table
from demix.run.run import Run
from demix.run.systems import clustered

TOP_TERMS = 5
SPLITS = ("train", "test")
# Orange says that another expert is better.
OVER_OWN = ["#fdae6b", "#ffffff", CELL_RANGE[-1]]
GRID = {"columns": 3, "spacing": 24, "align": "each"}


@dataclass(frozen=True, eq=False)
class Clusters:
    """What a run knows of its clusters.

    `terms` has each cluster's terms by clustering. `documents` counts documents: columns clustering, cluster, domain,
    split, documents. `losses` sums the test documents of a cluster: columns model, seed, cluster, expert, nll (nats),
    tokens.
    """

    terms: Mapping[str, Mapping[str, list[str]]]
    documents: pd.DataFrame
    losses: pd.DataFrame


def read_clusters(run: Run) -> Clusters:
    """What the run in the folder `run` knows of the clusters that its models learn from; tables without rows for none.

    Raises DemixError if a file is missing or damaged.
    """
    documents = [pd.DataFrame(columns=["clustering", "cluster", "domain", "split", "documents"])]
    losses = [pd.DataFrame(columns=["model", "seed", "cluster", "expert", "nll", "tokens"])]
    terms: dict[str, dict[str, list[str]]] = {}
    models = clustered(run)
    for data in dict.fromkeys(model.data for model in models):
        folder = run.folder / "clusters" / data
        clusterer = Clusterer.open(folder)
        names = np.array(clusterer.names)
        terms[data] = {
            name: clusterer.embedding.top_terms(centre, TOP_TERMS)
            for name, centre in zip(clusterer.names, clusterer.centres, strict=True)
        }
        rows = [model.row for model in models if model.data == data]
        for domain in training_domains(run):
            for split in SPLITS:
                labels = read_parquet(folder / "assigned" / f"{domain}.{split}.parquet").column("cluster").to_numpy()
                counts = np.bincount(labels, minlength=len(names))
                columns = {"clustering": data, "cluster": names, "domain": domain, "split": split, "documents": counts}
                documents.append(pd.DataFrame(columns))
            found = read_parquet(run.folder / "evaluations" / f"{domain}.losses.parquet").to_pandas()
            found = found[found["model"].isin(rows)]
            losses.append(found.assign(cluster=names[labels[found["document"]]])[losses[0].columns])
    summed = pd.concat(losses[1:] or losses).groupby(["model", "seed", "cluster", "expert"], as_index=False).sum()
    return Clusters(terms, pd.concat(documents[1:] or documents, ignore_index=True), summed)


def over_own(losses: pd.DataFrame, clusters: tuple[str, ...]) -> pd.DataFrame:
    """Perplexity of each expert (columns) on each cluster (rows), over that of the cluster's own expert: Figure 15.

    `losses` are those of one model and seed. NaN for a cluster without test documents.
    """
    nats = (losses["nll"] / losses["tokens"]).astype("float64")
    table = nats.to_frame("nats").assign(cluster=losses["cluster"], expert=losses["expert"])
    table = table.pivot(index="cluster", columns="expert", values="nats").reindex(index=clusters, columns=clusters)
    return np.exp(table.sub(np.diag(table), axis=0))


def shares(documents: pd.DataFrame, domains: list[str], clusters: tuple[str, ...]) -> pd.DataFrame:
    """The share of each domain's training documents (rows) that are in each cluster (columns): Figure 16."""
    table = documents[documents["split"] == "train"].pivot(index="domain", columns="cluster", values="documents")
    table = table.reindex(index=domains, columns=clusters).astype("float64")
    return table.div(table.sum(axis=1), axis=0)


def clusters_table(clusters: Clusters) -> Table:
    """The terms of each cluster (Tables 2 to 7 of c-BTM's paper), its documents, and the domain that most are of."""
    rows: dict[str, dict[str, Any]] = {}
    for data, terms in clusters.terms.items():
        own = clusters.documents[clusters.documents["clustering"] == data]
        for cluster, most in terms.items():
            found = own[own["cluster"] == cluster]
            trained_on, held_out = (found[found["split"] == split].set_index("domain")["documents"] for split in SPLITS)
            domain = str(trained_on.idxmax())
            rows[f"{data} {cluster}"] = {
                "Terms": ", ".join(most),
                "Training documents": float(trained_on.sum()),
                "Test documents": float(held_out.sum()),
                "Most are of": domain,
                "of which, %": 100 * trained_on[domain] / max(1, trained_on.sum()),
            }
    return Table(
        "clusters",
        title_of("clusters"),
        f"The {TOP_TERMS} terms that weigh most in each cluster's centre, mapped back by the inverse of the SVD (as in "
        "Tables 2 to 7 of the c-BTM paper); its documents; and the domain that most of its training documents are of.",
        pd.DataFrame.from_dict(rows, orient="index"),
        notes=("A balanced clustering has equal clusters in its sample; every document then goes to the nearest one.",),
        formats=dict.fromkeys(("Training documents", "Test documents", "of which, %"), "{:,.0f}"),
    )


def cluster_experts(clusters: Clusters, run: Run) -> alt.TopLevelMixin:
    """Figures 15 and 16 of c-BTM's paper: each expert on each cluster, and the clusters of each domain's documents."""
    models, domains = clustered(run), training_domains(run)
    ratios = {
        model.row: over_own(
            clusters.losses[(clusters.losses["model"] == model.row) & (clusters.losses["seed"] == run.seed)],
            model.domains,
        )
        for model in models
    }
    found = np.concatenate([table.to_numpy().ravel() for table in ratios.values()])
    ends = (min(0.9, np.nanmin(found, initial=1)), max(1.1, np.nanmax(found, initial=1)))
    own = alt.concat(
        *(
            heat_maps(
                _cells(table, row),
                {row: (list(table.index), row)},
                list(table.columns),
                alt.Scale(type="log", domain=[finite(ends[0]), 1, finite(ends[1])], range=OVER_OWN, interpolate="rgb"),
                legend=alt.Legend(title=["perplexity ratio", "(log scale)"], titlePadding=8, format=".2f", tickCount=5),
            )
            for row, table in ratios.items()
        ),
        title=heading_of("Test perplexity on a cluster (row) over that of its own expert"),
        **GRID,
    )
    by_domain = alt.concat(
        *(
            heat_maps(
                _cells(shares(clusters.documents[clusters.documents["clustering"] == data], domains, names), data),
                {data: (domains, data)},
                list(names),
                alt.Scale(domain=[0, 1], range=CELL_RANGE, interpolate="lab"),
                legend=alt.Legend(title="share", format=".0%", titlePadding=8),
                form=".0%",
                over="cluster",
            )
            for data, names in {model.data: model.domains for model in models}.items()
        ),
        title=heading_of("Share of a domain's training documents (row) in each cluster"),
        **GRID,
    )
    return finish(
        alt.vconcat(own, by_domain, spacing=28).resolve_scale(color="independent"),
        title_of("cluster_experts"),
        "As Figures 15 and 16 of the c-BTM paper. Top: test perplexity of each expert (column) on the test documents "
        "of each cluster (row), over that of the cluster's own expert: above 1 the own expert is better. Bottom: how "
        "the training documents of each domain (row) are divided among the clusters (columns).",
    )


def _cells(table: pd.DataFrame, kind: str) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "domain": row, "expert": column, "value": finite(value)}
        for row, values in table.iterrows()
        for column, value in values.items()
    ]


def sizes(clusters: Clusters) -> pd.DataFrame:
    """The test documents of each cluster over an equal share: columns clustering, cluster, documents, share."""
    held_out = clusters.documents[clusters.documents["split"] == "test"]
    found = held_out.groupby(["clustering", "cluster"], as_index=False, sort=False)["documents"].sum()
    return found.assign(share=found["documents"] / found.groupby("clustering")["documents"].transform("mean"))


def cluster_sizes(clusters: Clusters) -> alt.TopLevelMixin:
    """Figure 14 of c-BTM's paper: how unequal the clusters of the test documents are, a box for each clustering."""
    found = sizes(clusters)
    names = list(dict.fromkeys(found["clustering"]))
    values = [
        {
            "clustering": row.clustering,
            "cluster": row.cluster,
            "documents": int(row.documents),
            "share": finite(row.share),
        }
        for row in found.itertuples()
    ]
    base = alt.Chart(alt.InlineData(values=values)).encode(
        x=alt.X("clustering:N", sort=names, title=None, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("share:Q", title="test documents of a cluster, over an equal share", scale=alt.Scale(zero=True)),
    )
    boxes = base.mark_boxplot(extent="min-max", size=40, color=COLOURS[0], opacity=0.35)
    points = base.mark_point(size=40, filled=True, color=COLOURS[0], opacity=0.8).encode(
        tooltip=["clustering:N", "cluster:N", "documents:Q", "share:Q"]
    )
    equal = alt.Chart(alt.InlineData(values=[{"share": 1}])).mark_rule(strokeDash=[4, 4]).encode(y="share:Q")
    return finish(
        alt.layer(boxes, points, equal).properties(width=max(400, 110 * len(names)), height=320),
        title_of("cluster_sizes"),
        "As Figure 14 of the c-BTM paper. One point per cluster: its test documents, over those of a cluster if all "
        "were equal. Boxes hold the middle half, whiskers reach to the smallest and the largest cluster.",
    )
