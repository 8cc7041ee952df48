"""Routing tables: the distance of the text before each scored token to the centres of a clustering.

`routing/<clustering>/<context>/<domain>.<split>.parquet` has one float32 column of squared distances per cluster and
one row per scored token. It is written once for all models; every temperature and top-k is computed from it (Gururangan
et al. 2023, Eq. 3).
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from demix.config.evaluation import Context, ScoredTokens
from demix.data.cluster import Clusterer, context_distances
from demix.data.shards import TokenShard
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.evaluate.losses import PlannedMixture, document_losses
from demix.evaluate.score_tables import SideTable, count_to_score, row_groups, tokens_sha256
from demix.files import digest, parquet_reader, read_json
from demix.files.batches import regrouped, write_batches
from demix.model.clusters import refuse_other_clusters
from demix.progress import followed
from demix.settings import Positive

log = logging.getLogger(__name__)


class Routing(ScoredTokens):
    """The tokens that are routed (the scored ones), in blocks of `length` tokens, and the context that is measured."""

    length: Positive
    context: Context


def route(folder: Path, shards: Sequence[Path], tokenizer: Path, routing: Routing, output: Path) -> None:
    """Write output/<domain>.<split>.parquet for each of the token shards tokens/<domain>/<split>.arrow.

    `folder` is the folder of a clusterer. The tables are streamed, so memory does not grow with the number of tokens.
    Raises DemixError for a shard of another tokenizer, and for an empty split.
    """
    clusterer, encoder = Clusterer.open(folder), Tokenizer.load(tokenizer)
    for path in shards:
        domain, split = path.parent.name, path.stem
        shard = TokenShard.open(path, verify=True)
        total = count_to_score(shard, routing, routing.length)
        groups = row_groups(total, routing.length)
        sha256 = tokens_sha256(shard.read(0, total))
        about = {"tokens_sha256": sha256, "clusterer_sha256": clusterer.sha256, "context": routing.context}
        schema = pa.schema([pa.field(name, pa.float32(), False) for name in clusterer.names], about)
        pieces = context_distances(clusterer, encoder, shard, routing.context, routing.length, total)
        pieces = followed(pieces, f"{domain} {split}: tokens", total, len)
        batches = (
            pa.record_batch([pa.array(np.ascontiguousarray(column)) for column in piece.T], schema=schema)
            for piece in pieces
        )
        rows = regrouped(batches, [stop - start for start, stop in groups])
        path = output / f"{domain}.{split}.parquet"
        write_batches(path, schema, rows, use_dictionary=False, column_encoding="BYTE_STREAM_SPLIT")
        log.info("%s %s: %d tokens, %d clusters", domain, split, total, len(clusterer.names))


def side_tables_of(table: Path, mixtures: Iterable[PlannedMixture]) -> dict[str, SideTable]:
    """By context, the distances that `mixtures` need in addition to the score table scores/<model>/<domain>.<split>.

    Raises DemixError if a routing table or the experts are of another clusterer than the run's, and if an expert has no
    centre.
    """
    wanted = [mixture for mixture in mixtures if mixture.routing]
    experts = tuple(dict.fromkeys(name for mixture in wanted for name in mixture.experts))
    run, found = table.absolute().parents[2], {}
    for context, routing in dict.fromkeys((mixture.context, mixture.routing) for mixture in wanted):
        clusters, path = run / "clusters" / routing, run / "routing" / routing / context / f"{table.name}.parquet"
        refuse_other_clusters(run / "models" / table.parent.name, clusters, experts)
        with parquet_reader(path) as file:
            names, about = file.schema_arrow.names, file.schema_arrow.metadata or {}
        if about.get(b"clusterer_sha256", b"").decode() != digest(read_json(clusters / "clusterer.json")):
            raise DemixError(path, "was made with another clusterer than the experts", "run `demix route` again")
        for name in experts:
            if name not in names:
                raise DemixError(path, f"has no column of {name}", f"choose experts among {', '.join(names)}")
        found[context] = SideTable(path, experts)
    return found


def best_on_dev(
    dev: Path, columns: Sequence[str], tried: Sequence[PlannedMixture], log_priors: dict[PlannedMixture, np.ndarray]
) -> list[tuple[PlannedMixture, str]]:
    """By method and weights, the mixture in `tried` with the lowest loss on `dev`; none if only one was tried."""
    found: dict[tuple[str, str], list[PlannedMixture]] = {}
    for mixture in tried:
        found.setdefault((mixture.method, mixture.weights), []).append(mixture)
    losses = document_losses(dev, columns, tried, log_priors, side=side_tables_of(dev, tried)).nll
    best = [min(some, key=lambda one: losses[one].sum()) for some in found.values() if len(some) > 1]
    return [(mixture, "dev_temperature") for mixture in best]
