"""Clusters of documents: fitted on a sample, then used to assign documents and to measure distances of contexts.

Sources: Gururangan et al. 2023, sections 2.1, 2.2 and 3.2. A clusterer is a folder: `clusterer.safetensors` (idf,
components, centres), `terms.parquet` (term) and, written last, the sealed `clusterer.json`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
from safetensors.numpy import load_file, save

from demix.config.evaluation import Context
from demix.config.models import Clustering, cluster_names
from demix.data.balance import kmeans, means, squared_distances
from demix.data.embed import Embedding, Prefixes, fit_embedding
from demix.data.shards import TokenShard, join_documents
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.files import (
    check_sha256,
    digest,
    read_json,
    read_parquet,
    replacing,
    seed_for,
    sha256_file,
    write_json,
    write_parquet,
)
from demix.files.batches import counted, read_batches, write_batches

VERSION = 2
# In a larger sample, a term must occur in ten documents or more, so that fitting needs at most 1.5 GB.
FEW_DOCUMENTS = 100_000
# The maximum number of rounds of k-means.
ROUNDS = 50
ASSIGNED = pa.schema([pa.field("cluster", pa.uint16(), False), pa.field("distance", pa.float32(), False)])
# The number of tokens whose distances are in memory at one time.
_TOKENS = 1 << 14


@dataclass(frozen=True)
class Clusterer:
    """K clusters: an embedding of texts and the centres [K, D], named `names`.

    `method` and `seed` determine how documents are assigned to clusters; `sha256` is the hash of the whole folder's
    content.
    """

    embedding: Embedding
    centres: np.ndarray
    names: tuple[str, ...]
    method: str
    seed: int
    sha256: str = ""

    @staticmethod
    def open(folder: Path) -> "Clusterer":
        """The clusterer in `folder`. Raises DemixError if a file is missing, damaged or of another version."""
        manifest = read_json(folder / "clusterer.json")
        if manifest["version"] != VERSION:
            cause = f"is of version {manifest['version']}; this demix reads version {VERSION}"
            raise DemixError(folder / "clusterer.json", cause, "fit the clusters again")
        for name, expected in manifest["files"].items():
            check_sha256(folder / name, expected)
        arrays = load_file(folder / "clusterer.safetensors")
        centres = arrays.pop("centres")
        terms = tuple(read_parquet(folder / "terms.parquet").column("term").to_pylist())
        embedding = Embedding(terms, **arrays)
        names, method, seed = tuple(manifest["names"]), manifest["method"], manifest["seed"]
        return Clusterer(embedding, centres, names, method, seed, digest(manifest))

    def write(self, folder: Path, more: Mapping[str, Any]) -> "Clusterer":
        """Write the files below `folder`; `clusterer.json` also gets `more`."""
        embedding = self.embedding
        arrays = {name: getattr(embedding, name) for name in ("idf", "components")}
        with replacing(folder / "clusterer.safetensors") as temporary:
            # Python's own write has an error number for a full disk.
            temporary.write_bytes(save(arrays | {"centres": self.centres}))
        write_parquet(pa.table({"term": pa.array(embedding.terms, pa.string())}), folder / "terms.parquet")
        files = {name: sha256_file(folder / name) for name in ("clusterer.safetensors", "terms.parquet")}
        manifest = {"version": VERSION, "method": self.method, "names": self.names, "seed": self.seed}
        write_json(folder / "clusterer.json", manifest | {"files": files} | dict(more))
        return replace(self, sha256=digest(read_json(folder / "clusterer.json")))

    def distances(self, points: np.ndarray) -> np.ndarray:
        """The squared distances [N, K] of `points` [N, D]."""
        return squared_distances(points, self.centres)

    def labels(self, domain: str, ids: Sequence[str], distances: np.ndarray) -> np.ndarray:
        """The clusters [N] of documents of `domain` with these `ids`, [N], and `distances` [N, K]."""
        given = _given(self.method, self.names, self.seed, domain, ids)
        return distances.argmin(1) if given is None else given


def _given(method: str, names: Sequence[str], seed: int, domain: str, ids: Sequence[str]) -> np.ndarray | None:
    """The clusters [N] of documents by a method that ignores text. Documents of a novel domain get the nearest ones."""
    if method == "random":
        return np.array([seed_for(seed, "random cluster", name) % len(names) for name in ids], np.int64)
    if method == "metadata" and domain in names:
        return np.full(len(ids), names.index(domain))
    return None


def fit_clusters(documents: list[Path], settings: Clustering, output: Path, seed: int = 1) -> Clusterer:
    """Fit a clustering of documents to a sample of the training domains' text, corpus/<domain>/train.parquet.

    The clustering has the name of the folder `output`. The sample and the first centres are drawn by the hash of `seed`
    and a document's id, so the order of documents and domains does not matter. If there are too few documents or terms,
    raises DemixError that names the clustering's config key.
    """
    domains = dict(sorted((path.parent.name, path) for path in documents))
    name = output.name
    subject, names = f"clusterings.{name}", cluster_names(name, settings, domains)
    last, size = _last_key(domains.values(), seed, settings.documents)
    if size < len(names):
        _too_few(subject, len(names), f"{size} documents")
    drawn: list[tuple[np.ndarray, np.ndarray]] = []

    def sample() -> Iterator[tuple[int, str]]:
        for domain, path in domains.items():
            batches = read_batches(path, ["id", "text"])
            for batch in counted(batches, f"{name}: documents of {domain} counted", [path]):
                keys = _keys(batch, seed)
                chosen, keys = batch.filter(pa.array(keys <= last)), keys[keys <= last]
                given = _given(settings.method, names, seed, domain, chosen.column("id").to_pylist())
                drawn.append((keys, np.full(len(keys), -1) if given is None else given))
                yield from zip(keys.tolist(), chosen.column("text").to_pylist(), strict=True)

    embedding, points = fit_embedding(
        sample(),
        dimensions=settings.dimensions,
        min_documents=1 if size <= FEW_DOCUMENTS else 10,
        seed=seed,
        subject=subject,
    )
    objectives: list[float] = []
    if settings.method == "kmeans":
        start = _distinct(points, len(names))
        if len(start) < len(names):
            _too_few(subject, len(names), f"{len(start)} documents that differ")
        centres, labels, objectives = kmeans(points, start, ROUNDS, settings.balanced)
    else:
        keys, labels = map(np.concatenate, zip(*drawn, strict=True))
        labels = labels[np.argsort(keys, kind="stable")]
        if missing := set(range(len(names))) - set(labels.tolist()):
            cause = f"gives {names[min(missing)]} none of the {size} documents of the sample"
            raise DemixError(subject, cause, "raise documents, or lower clusters")
        centres = means(points, labels, len(names), np.zeros(size))
    more = {
        "documents": size,
        "sizes": np.bincount(labels, minlength=len(names)).tolist(),
        "objectives": objectives,
        "clustering": settings.as_dict(),
    }
    return Clusterer(embedding, centres, names, settings.method, seed).write(output, more)


def _too_few(subject: str, clusters: int, what: str) -> NoReturn:
    raise DemixError(f"{subject}.clusters", f"is {clusters}, but there are only {what}", "lower it")


def _keys(batch: pa.RecordBatch, seed: int) -> np.ndarray:
    """The place of each document in the order by hash."""
    return np.array([seed_for(seed, "cluster", name) for name in batch.column("id").to_pylist()], np.int64)


def _last_key(documents: Iterable[Path], seed: int, count: int) -> tuple[int, int]:
    """The largest key of a sample of `count` documents at most, and their number."""
    kept = np.empty(0, np.int64)
    for path in documents:
        for batch in read_batches(path, ["id"]):
            kept = np.append(kept, _keys(batch, seed))
            if len(kept) > 2 * count:
                kept = np.partition(kept, count)[:count]
    kept = np.sort(kept)[:count]
    return (int(kept[-1]) if len(kept) else -1), len(kept)


def _distinct(points: np.ndarray, count: int) -> np.ndarray:
    """The first `count` points that differ from all before them; fewer where there are no more."""
    found: dict[bytes, int] = {}
    # The sign of a zero does not distinguish points.
    for number, point in enumerate(points + 0.0):
        found.setdefault(point.tobytes(), number)
    return points[[*found.values()][:count]]


def assign(clusterer: Path, documents: list[Path], output: Path) -> None:
    """Assign each document of splits, corpus/<domain>/<split>.parquet, to a cluster: <domain>.<split>.parquet.

    These files have the columns `cluster` and `distance` (squared), in the order of the split, and in the footer
    `clusterer_sha256`. Documents stream through memory in batches.
    """
    opened = Clusterer.open(clusterer)
    metadata = {"clusterer_sha256": opened.sha256}

    def batches(path: Path) -> Iterator[pa.RecordBatch]:
        domain, read = path.parent.name, read_batches(path, ["id", "text"])
        for batch in counted(read, f"{domain} {path.stem}: documents assigned", [path]):
            distances = opened.distances(opened.embedding.points(batch.column("text").to_pylist()))
            labels = opened.labels(domain, batch.column("id").to_pylist(), distances)
            own = distances[np.arange(len(labels)), labels]
            arrays = [pa.array(labels.astype(np.uint16)), pa.array(own.astype(np.float32))]
            yield pa.record_batch(arrays, schema=ASSIGNED)

    for path in documents:
        target = output / f"{path.parent.name}.{path.stem}.parquet"
        write_batches(target, ASSIGNED, batches(path), footer=lambda: metadata)


class Contexts:
    """The contexts of the tokens of a text that grows, and the squared distance of each context to each centre.

    A context is the text since the last `<|endoftext|>` (`document`), or what the model sees: the token before the
    block of `length` tokens, and the block's tokens before the token (`block`). In a block `<|endoftext|>` is a
    newline. An empty text has the point of no terms. The middle of a growing document is unknown, so here
    `document_half` is the same as `document`.
    """

    def __init__(self, clusterer: Clusterer, tokenizer: Tokenizer, context: Context, length: int) -> None:
        self.names, self.length = clusterer.names, length
        self._clusterer, self._context = clusterer, context
        self.end_of_text = tokenizer.end_of_text
        self._bytes = [*tokenizer.vocabulary.pieces]
        self._bytes[self.end_of_text] = b"\n"
        self._sizes = np.array([len(each) for each in self._bytes])
        self._prefixes, self._seen = Prefixes(clusterer.embedding), 0

    def restarted(self) -> "Contexts":
        """The contexts of another text, which is empty."""
        other = copy(self)
        other._prefixes, other._seen = Prefixes(self._clusterer.embedding), 0
        return other

    def distances(self, tokens: np.ndarray) -> np.ndarray:
        """The distances (float32, [N, K]) of the contexts that end with each of the next `tokens` [N].

        The very first token is the one before the text.
        """
        if self._context == "block":
            begins = np.arange(-self._seen % self.length, len(tokens), self.length)
        else:
            begins = np.flatnonzero(tokens == self.end_of_text)
        found = np.empty((len(tokens), len(self.names)), np.float32)
        for first, last in pairwise(np.unique([0, *begins, len(tokens)]).tolist()):
            # A piece may begin inside of a context.
            if first or begins[:1].tolist() == [0]:
                self._prefixes = Prefixes(self._clusterer.embedding)
            ids = tokens[first:last].tolist()
            data = b"".join([self._bytes[token] for token in ids])
            found[first:last] = self._clusterer.distances(self._prefixes.extend(data, np.cumsum(self._sizes[ids])))
        self._seen += len(tokens)
        return found


def context_distances(
    clusterer: Clusterer, tokenizer: Tokenizer, shard: TokenShard, context: Context, length: int, limit: int | None
) -> Iterator[np.ndarray]:
    """The squared distances (float32, [n, K] at a time) to each centre of the context of each token of a shard.

    Only the first `limit` tokens are used (None: all). `Contexts` explains `context` and `length`. With `document_half`
    a token in the second half of its document has the distances of the first half, the first ⌊n/2⌋ of n tokens, so that
    weights are fixed there, as in an evaluation of c-BTM (section 2.2). In the first half, distances are as with
    `document`. The middle is computed from the document's length in the shard; nothing else of later text is used, and
    `limit` does not move the middle. If `piece_words` cut a document, each chunk counts as a document. Raises
    DemixError for a shard of another tokenizer.
    """
    if shard.tokenizer_sha256 != tokenizer.sha256:
        raise DemixError(shard.path, "was made with another tokenizer", "tokenize it again")
    total = len(shard) if limit is None else min(limit, len(shard))
    size = max(1, _TOKENS // length) * length if context == "block" else _TOKENS
    contexts = Contexts(clusterer, tokenizer, context, length)
    last = np.empty((0, len(clusterer.names)), np.float32)
    for start in range(0, total, size):
        before = shard.read(max(start, 1) - 1, min(start + size, total) - 1)
        found = contexts.distances(before if start else np.append(before.dtype.type(shard.end_of_text), before))
        if context == "document_half":
            # Where the half ended before this piece, the last token before it had its distances.
            rows = np.maximum(_seen_rows(shard, np.arange(start, start + len(found))) - start + len(last), 0)
            found = np.concatenate([last, found])[rows]
            last = found[-1:]
        yield found


def _seen_rows(shard: TokenShard, places: np.ndarray) -> np.ndarray:
    """For tokens at `places`, the tokens whose contexts `document_half` measures: their own, or the half's end.

    The `<|endoftext|>` of the next document has the whole document before it, and is predicted as its last token.
    """
    number = np.searchsorted(shard.offsets, places) - 1
    edges = np.append(shard.offsets, len(shard))
    begins, ends = edges[number], edges[number + 1]
    # Before the first document there is nothing.
    return np.where(number < 0, places, np.minimum(places, begins + 1 + (ends - begins - 1) // 2))


def cluster_shards(clusterer: Path, tokens: list[Path], length: int, output: Path) -> None:
    """Write `<cluster>/<split>.arrow` for each cluster, with its documents of all tokens/<domain>/<split>.arrow.

    The digests of these shards are written to `<split>.json` at the end. The clusters of documents are in assigned/.
    Before a split is written, raises DemixError if a cluster has fewer training tokens than a block of `length` or no
    tokens on dev, if the split's documents differ from the assigned ones, or if another clusterer assigned them.
    """
    opened = Clusterer.open(clusterer)
    for split in dict.fromkeys(path.stem for path in tokens):
        _split_shards(opened, clusterer, sorted(path for path in tokens if path.stem == split), length, output)


def _split_shards(clusterer: Clusterer, folder: Path, paths: list[Path], length: int, output: Path) -> None:
    """The shards of the clusters of one split, whose tokens are at `paths`."""
    split, shards, labels = paths[0].stem, [TokenShard.open(path) for path in paths], []
    for path, shard in zip(paths, shards, strict=True):
        assigned = folder / "assigned" / f"{path.parent.name}.{split}.parquet"
        table = read_parquet(assigned)
        if (table.schema.metadata or {}).get(b"clusterer_sha256", b"").decode() != clusterer.sha256:
            raise DemixError(assigned, "was made with another clusterer", "assign the documents again")
        if len(table) != len(shard.offsets):
            cause = f"has {len(table)} documents, not the {len(shard.offsets)} of {shard.path}"
            raise DemixError(assigned, cause, "assign the documents again")
        labels.append(table.column("cluster").to_numpy())

    chosen = [[np.flatnonzero(some == cluster) for some in labels] for cluster in range(len(clusterer.names))]
    lengths = [np.diff(shard.offsets, append=len(shard)) for shard in shards]
    for cluster, numbers in zip(clusterer.names, chosen, strict=True):
        # A dev loss is also measured on short blocks.
        tokens = sum(int(sizes[own].sum()) for sizes, own in zip(lengths, numbers, strict=True))
        if tokens < (least := length if split == "train" else 1):
            kind = {"train": "training"}.get(split, split)
            cause = f"{cluster} has {tokens} {kind} tokens, fewer than one block of {length}"
            cause = cause if least > 1 else f"{cluster} has no {kind} tokens"
            raise DemixError(f"clustering {folder.name}", cause, "make fewer clusters, or add text")
    for cluster, numbers in zip(clusterer.names, chosen, strict=True):
        join_documents(paths, numbers, output / cluster / f"{split}.arrow")
    made = {cluster: read_json(output / cluster / f"{split}.json")["sha256"] for cluster in clusterer.names}
    write_json(output / f"{split}.json", {"clusters": made})
