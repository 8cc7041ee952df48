"""The clusters that experts of a run learned from: their documents, and each expert on each cluster."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from demix.files import read_json, read_parquet
from demix.run.run import Run
from demix.run.systems import clustered

SPLITS = ("train", "test")


@dataclass(frozen=True, eq=False)
class Clusters:
    """What a run knows of its clusters.

    `documents` counts documents: columns clustering, cluster, domain,
    split, documents. `losses` sums the test documents of a cluster: columns model, seed, cluster, expert, nll (nats),
    tokens.
    """

    documents: pd.DataFrame
    losses: pd.DataFrame

    def over_own(self, model: str, seed: int, clusters: tuple[str, ...]) -> pd.DataFrame:
        """Perplexity of each expert of a model (columns) on each cluster (rows), over that of the cluster's own expert.

        That is Figure 15. NaN for a cluster without test documents.
        """
        losses = self.losses[(self.losses["model"] == model) & (self.losses["seed"] == seed)]
        nats = (losses["nll"] / losses["tokens"]).astype("float64")
        table = nats.to_frame("nats").assign(cluster=losses["cluster"], expert=losses["expert"])
        table = table.pivot(index="cluster", columns="expert", values="nats").reindex(index=clusters, columns=clusters)
        return np.exp(table.sub(np.diag(table), axis=0))

    def shares(self, clustering: str, domains: list[str], clusters: tuple[str, ...]) -> pd.DataFrame:
        """The share of each domain's training documents (rows) that are in each cluster (columns): Figure 16."""
        found = self.documents[(self.documents["clustering"] == clustering) & (self.documents["split"] == "train")]
        table = found.pivot(index="domain", columns="cluster", values="documents")
        table = table.reindex(index=domains, columns=clusters).astype("float64")
        return table.div(table.sum(axis=1), axis=0)

    def sizes(self) -> pd.DataFrame:
        """The test documents of each cluster over an equal share: columns clustering, cluster, documents, share."""
        held_out = self.documents[self.documents["split"] == "test"]
        found = held_out.groupby(["clustering", "cluster"], as_index=False, sort=False)["documents"].sum()
        return found.assign(share=found["documents"] / found.groupby("clustering")["documents"].transform("mean"))


def read_clusters(run: Run) -> Clusters:
    """What the run in the folder `run` knows of the clusters that its models learn from; tables without rows for none.

    Raises DemixError if a file is missing or damaged.
    """
    documents = [pd.DataFrame(columns=["clustering", "cluster", "domain", "split", "documents"])]
    losses = [pd.DataFrame(columns=["model", "seed", "cluster", "expert", "nll", "tokens"])]
    models = clustered(run)
    for data in dict.fromkeys(model.data for model in models):
        folder = run.folder / "clusters" / data
        names = np.array(read_json(folder / "clusterer.json")["names"])
        rows = [model.row for model in models if model.data == data]
        for domain in run.training:
            for split in SPLITS:
                labels = read_parquet(folder / "assigned" / f"{domain}.{split}.parquet").column("cluster").to_numpy()
                counts = np.bincount(labels, minlength=len(names))
                columns = {"clustering": data, "cluster": names, "domain": domain, "split": split, "documents": counts}
                documents.append(pd.DataFrame(columns))
            found = read_parquet(run.folder / "evaluations" / f"{domain}.losses.parquet").to_pandas()
            found = found[found["model"].isin(rows)]
            losses.append(found.assign(cluster=names[labels[found["document"]]])[losses[0].columns])
    summed = pd.concat(losses[1:] or losses).groupby(["model", "seed", "cluster", "expert"], as_index=False).sum()
    return Clusters(pd.concat(documents[1:] or documents, ignore_index=True), summed)
