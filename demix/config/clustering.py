"""The section `clusterings`: how documents are divided into clusters, and what the clusters are called."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from demix.errors import DemixError
from demix.settings import Positive, Settings, Switch


class Clustering(Settings):
    """How the documents of the training domains are divided into clusters."""

    # Each cluster is an expert with files and jobs of its own; c-BTM's paper ends at 128.
    clusters: Annotated[Positive, Field(le=4096)] | None = Field(
        default=None, description="Clusters. Not given for the method metadata."
    )
    method: Literal["kmeans", "random", "metadata"] = Field(
        default="kmeans",
        description="kmeans: the nearest centre of k-means. random: drawn by the hash of a document. metadata: one "
        "cluster per training domain.",
    )
    balanced: Switch = Field(default=True, description="Whether k-means keeps its clusters equal in documents.")
    dimensions: Positive = Field(default=100, description="Dimensions that tf-idf is reduced to.")
    documents: Positive = Field(default=400_000, description="Documents of the sample that is fitted, drawn by hash.")


def cluster_names(name: str, clustering: Clustering, domains: Iterable[str]) -> tuple[str, ...]:
    """The clusters of the clustering `name` of these training domains: c00, c01, …, or the domains themselves.

    Raises DemixError if the clustering does not say how many there are.
    """
    if clustering.method == "metadata":
        return tuple(sorted(domains))
    if clustering.clusters is None:
        raise DemixError(f"config key clusterings.{name}.clusters", "is missing", "say how many clusters there are")
    digits = max(2, len(str(clustering.clusters - 1)))
    return tuple(f"c{number:0{digits}}" for number in range(clustering.clusters))
