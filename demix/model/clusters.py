"""The clusters of a model's experts, as its run has them: for weights by distance outside of the workflow."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from demix.config.mixing import DEFAULTS
from demix.config.run import read_run_config
from demix.config.systems import planned
from demix.data.cluster import Clusterer, Context, Contexts, context_distances
from demix.data.shards import TokenShard
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.model.description import run_of


@dataclass(frozen=True)
class Clusters:
    """The clustering `name`, in the folder `folder`, whose distances weight a model's experts.

    `context` and `temperature` are those of the tables of the model's run.
    """

    name: str
    folder: Path
    context: Context
    temperature: float

    def open(self) -> Clusterer:
        """The clusterer. Raises DemixError if a file is missing or damaged."""
        return Clusterer.open(self.folder)

    def contexts(self, tokenizer: Tokenizer, length: int) -> Contexts:
        """The contexts of a text that grows, in blocks of `length` tokens."""
        return Contexts(self.open(), tokenizer, self.context, length)

    def distances(self, experts: Sequence[str], tokenizer: Tokenizer, shard: TokenShard, length: int) -> np.ndarray:
        """The squared distances [N, E] of what stands before each token of a shard to the clusters of `experts`."""
        clusterer = self.open()
        columns = [clusterer.names.index(name) for name in experts]
        return np.concatenate(list(context_distances(clusterer, tokenizer, shard, self.context, length, None)))[
            :, columns
        ]


def has_clusters(directory: Path) -> bool:
    """Whether the model in `directory` lies in a run that has a clustering of its experts."""
    return (run_of(directory) / "config.json").is_file() and bool(_routing(directory))


def clusters_of(directory: Path) -> Clusters:
    """The clusters of a model's experts. Raises DemixError if the run of the model has no clustering of its experts."""
    run, name = run_of(directory), _routing(directory)
    if not name:
        cure = "use other weights, or add by_domain: {method: metadata} to the run's clusterings"
        raise DemixError(directory, "has no clustering of its experts in its run", cure)
    mixing = read_run_config(run).get("evaluation") or {}
    context: Context = "block" if (mixing.get("routing_context") or ("",))[0] == "block" else "document"
    return Clusters(name, run / "clusters" / name, context, mixing.get("temperature") or DEFAULTS["cluster"][0])


def _routing(directory: Path) -> str:
    models = planned(read_run_config(run_of(directory)))
    return next((model.routing for model in models if model.name == Path(directory).resolve().name), "")
