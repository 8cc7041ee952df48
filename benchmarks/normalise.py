"""Clusterings by points of length 1 and by z-scores, on the text of a run; no model is trained or read.

    python benchmarks/normalise.py results/sample [--clusters 8] [--tokens 5120] [--json rows.json]

`ours` is `normalise: unit`, `peer` is `normalise: standard`. Both fit the training documents, from the same first
centres. Agreement with the domains is the adjusted Rand index and the purity of the nearest centres of all training
documents; a cluster's share of them is given in times an equal one. The objective is what is left of the first
round's. Weights are exp(-d²/0.1) of the first tokens of each domain's dev split, by the document so far: how many
experts they come to (exp of the mean entropy), by domain the fewest and the most, and how often the largest weight is
of a cluster most of whose documents are of the token's domain, or, with a cluster for each domain, of that domain.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from scipy.special import softmax
from sklearn.metrics import adjusted_rand_score
from tables import show

from demix.config.clustering import Clustering
from demix.data.cluster import Clusterer, context_distances, fit_clusters
from demix.data.shards import TokenShard
from demix.data.tokenizer import Tokenizer
from demix.files import read_json, read_parquet

TEMPERATURE = 0.1


def nearest(clusterer: Clusterer, documents: dict[str, Path]) -> tuple[np.ndarray, np.ndarray]:
    """The domain and the nearest centre of each training document, by number."""
    found = []
    for number, path in enumerate(documents.values()):
        points = clusterer.embedding.points(read_parquet(path)["text"].to_pylist())
        found.append((np.full(len(points), number), clusterer.distances(points).argmin(1)))
    domains, labels = (np.concatenate(each) for each in zip(*found, strict=True))
    return domains, labels


def weights(clusterer: Clusterer, tokenizer: Tokenizer, shard: Path, tokens: int, length: int) -> np.ndarray:
    """The weights [N, K] of the first tokens of a split."""
    pieces = context_distances(clusterer, tokenizer, TokenShard.open(shard), "document", length, tokens)
    return softmax(-np.concatenate(list(pieces)).astype(np.float64) / TEMPERATURE, axis=1)


def measured(run: Path, folder: Path, normalise: str, clusters: int, tokens: int) -> tuple[dict, np.ndarray]:
    """The figures of one normalisation, and the labels of the training documents."""
    config, tokenizer = read_json(run / "config.json"), Tokenizer.load(run / "tokenizer.json")
    names = sorted(config["domains"]["training"])
    length = config["architecture"].get("context", 1024)
    documents = {name: run / "corpus" / name / "train.parquet" for name in names}
    figures, labels = {}, np.empty(0)
    for kind, clustering in (
        (f"{clusters} clusters", Clustering(clusters=clusters, normalise=normalise)),
        ("by domain", Clustering(method="metadata", normalise=normalise)),
    ):
        clusterer = fit_clusters(documents, clustering, config["seed"], folder / normalise / kind.replace(" ", "_"))
        domains, near = nearest(clusterer, documents)
        counts = np.zeros((len(names), len(clusterer.names)))
        np.add.at(counts, (domains, near), 1)
        # The domain that a centre stands for.
        holds = np.arange(len(names)) if kind == "by domain" else counts.argmax(0)
        if kind != "by domain":
            labels = near
            objectives = read_json(folder / normalise / kind.replace(" ", "_") / "clusterer.json")["objectives"]
            figures |= {
                ("adjusted Rand index", ""): adjusted_rand_score(domains, near),
                ("purity", ""): counts.max(0).sum() / counts.sum(),
                ("objective, last of first", ""): objectives[-1] / objectives[0],
                ("rounds", ""): len(objectives),
                ("smallest cluster, nearest centres", "equal shares"): counts.sum(0).min() * clusters / counts.sum(),
                ("largest cluster, nearest centres", "equal shares"): counts.sum(0).max() * clusters / counts.sum(),
            }
        effective, right = [], []
        for number, name in enumerate(names):
            found = weights(clusterer, tokenizer, run / "tokens" / name / "dev.arrow", tokens, length)
            effective.append(np.exp(-np.where(found > 0, found * np.log(np.maximum(found, 1e-300)), 0).sum(1).mean()))
            right.append((holds[found.argmax(1)] == number).mean())
        figures |= {
            (f"{kind}: experts that weigh, mean of domains", "experts"): np.mean(effective),
            (f"{kind}: experts that weigh, fewest", "experts"): min(effective),
            (f"{kind}: experts that weigh, most", "experts"): max(effective),
            (f"{kind}: the largest weight is of the domain, mean", "of tokens"): np.mean(right),
            (f"{kind}: the largest weight is of the domain, least", "of tokens"): min(right),
        }
    return figures, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--clusters", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=5120)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        (unit, ours), (standard, theirs) = (
            measured(given.run, Path(folder), each, given.clusters, given.tokens) for each in ("unit", "standard")
        )
    rows = [
        {"name": name, "ours": float(unit[name, unit_of]), "peer": float(standard[name, unit_of]), "unit": unit_of}
        for name, unit_of in unit
    ]
    rows.append(
        {"name": "adjusted Rand index of both", "ours": adjusted_rand_score(ours, theirs), "peer": None, "unit": ""}
    )
    show([row | {"ratio": row["ours"] / row["peer"] if row["peer"] else None} for row in rows], given.json)


if __name__ == "__main__":
    main()
