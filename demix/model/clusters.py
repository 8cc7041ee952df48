"""The clusters of a model's experts, for cluster rules outside the workflow.

The clusters come from the model's run. `demix card` copies them to the folder `clusterer` of the model, so that a
copied model keeps them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from demix.config.evaluation import Context
from demix.data.cluster import Clusterer, Contexts, context_distances
from demix.data.shards import TokenShard
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.files import copy_checked, read_json, replacing, write_json
from demix.model.manifest import read_lineage, read_routed
from demix.run.run import Run

NAME, DESCRIPTION, ROUTING = "clusterer", "clusterer.json", "routing.json"


@dataclass(frozen=True)
class Clusters:
    """The clustering `name`, in the folder `folder`, whose distances weight a model's experts.

    `context` and `temperature` are the ones that the tables of the model's run use.
    """

    name: str
    folder: Path
    context: Context
    temperature: float

    def open(self) -> Clusterer:
        """The clusterer. Raises DemixError if a file is missing or damaged."""
        return Clusterer.open(self.folder)

    def contexts(self, tokenizer: Tokenizer, length: int) -> Contexts:
        """The contexts of a growing text, in blocks of `length` tokens."""
        return Contexts(self.open(), tokenizer, self.context, length)

    def distances(self, experts: Sequence[str], tokenizer: Tokenizer, shard: TokenShard, length: int) -> np.ndarray:
        """The squared distances [N, E] of the text before each token of a shard to the clusters of `experts`."""
        clusterer = self.open()
        columns = [clusterer.names.index(name) for name in experts]
        return np.concatenate(list(context_distances(clusterer, tokenizer, shard, self.context, length, None)))[
            :, columns
        ]


def has_clusters(directory: Path) -> bool:
    """Whether the run of the model in `directory`, or the folder itself, has a clustering of its experts."""
    return _found(directory) is not None


def clusters_of(directory: Path) -> Clusters:
    """The clusters of a model's experts: from its run, else from its folder.

    Raises DemixError if neither has them, if their description in the folder is damaged, and if an expert was trained
    on a cluster of another clusterer of the run (`refuse_other_clusters`).
    """
    directory = Path(directory)
    if (found := _found(directory)) is None:
        cure = "use another rule, or add by_domain: {method: metadata} to the run's clusterings"
        raise DemixError(directory, "has no clustering with a cluster for each expert, in its run or its folder", cure)
    refuse_other_clusters(directory, found.folder, [path.stem for path in directory.glob("experts/[!.]*.json")])
    return found


def refuse_other_clusters(directory: Path, folder: Path, experts: Iterable[str]) -> None:
    """Raise DemixError if an expert was trained on another cluster than the one with its name in `folder`.

    The sha256 of an expert's training tokens, in its lineage, is compared with the sha256 of the cluster's shard. They
    differ if another clusterer of the same name made the expert's cluster. Experts of domains have no such shard.
    """
    for name in experts:
        lineage, shard = directory / "experts" / f"{name}.json", folder / "shards" / name / "train.json"
        known = lineage.is_file() and shard.is_file()
        if known and read_lineage(lineage).data_sha256.get(name) != read_json(shard)["sha256"]:
            cause = f"was trained on another cluster than {name} of {folder}"
            raise DemixError(lineage, cause, "train it again, or remove it")


def copy_clusters(source: Path, directory: Path) -> None:
    """Copy the clusterer of the model `source` into the model directory `directory`, which can then be used by itself.

    Its context and temperature are written next to it. Without a clusterer nothing is copied.
    """
    found, folder = _found(source), Path(directory) / NAME
    if found is None or not (found.folder / DESCRIPTION).is_file() or found.folder.resolve() == folder.resolve():
        return
    with replacing(folder, directory=True) as temporary:
        manifest = read_json(found.folder / DESCRIPTION)
        for name, expected in manifest["files"].items():
            copy_checked(found.folder / name, temporary / name, expected)
        about = {"clustering": found.name, "context": found.context, "temperature": found.temperature}
        for name, content in ((ROUTING, about), (DESCRIPTION, manifest)):
            write_json(temporary / name, content)


def _found(directory: Path) -> Clusters | None:
    whole, own = Run.of_model(directory), Path(directory) / NAME
    models = whole.planned if whole else ()
    name = next((model.routing for model in models if model.name == Path(directory).resolve().name), "")
    if whole and name:
        mixing = whole.config.evaluation
        return Clusters(name, whole.folder / "clusters" / name, mixing.routing_context[0], mixing.temperature)
    if not (own / DESCRIPTION).is_file():
        return None
    routed = read_routed(own / ROUTING)
    return Clusters(routed.clustering, own, routed.context, routed.temperature)
