"""Documents of a domain, free of exact duplicates, divided into train, dev and test by the hash of their content."""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from demix.data.tables import BATCH_ROWS, read_batches, write_rows
from demix.errors import DemixError
from demix.files import read_json, write_json

SPLITS = ("train", "dev", "test")
SCHEMA = pa.schema([("id", pa.string()), ("text", pa.large_string()), ("n_words", pa.int64())])
OWNERS_SCHEMA = pa.schema([("id", pa.string()), ("domain", pa.string())])

# Sizes of what is held in memory at a time: ids while looking for duplicates, text while sorting.
PART_DOCUMENTS = 4_000_000
PART_BYTES = 64 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Budget:
    """How many words (parted by white space) a split takes; `train=None` takes all that dev and test leave."""

    train: int | None
    dev: int
    test: int


def mark_duplicates(inputs: dict[str, Path | list[Path]], output: Path) -> None:
    """Decide which training domain keeps each text: Parquet `id`, `domain`, one row per distinct id, sorted by id.

    Of the domains that hold a text the one with the smallest sha256 of domain and id keeps it, so that neither the
    order of the domains nor that of their documents matters.
    """
    domains = sorted(inputs)
    documents = sum(batch.num_rows for domain in domains for batch in _parts(inputs[domain], ["n_words"]))
    parts = -(-documents // PART_DOCUMENTS) or 1

    def rows() -> Iterator[tuple[str, str]]:
        for part in range(parts):
            # Ids in order of the part they lie in, so that parts written one after the other are sorted.
            low, high = (b"%02x" % (-(-256 * edge // parts)) for edge in (part, part + 1))
            held = [np.unique(_ids(inputs[domain], low, high if part + 1 < parts else b"g")) for domain in domains]
            ids = np.concatenate(held)
            owner = np.repeat(np.arange(len(domains)), [len(some) for some in held])
            order = np.argsort(ids, kind="stable")
            ids, owner = ids[order], owner[order]
            edges = [0, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1), len(ids)] if len(ids) else []
            for start, end in pairwise(edges):
                text_id = ids[start].decode()
                candidates = [domains[index] for index in owner[start:end]]
                yield text_id, min(candidates, key=lambda domain: _digest(domain, text_id))

    write_rows(output, OWNERS_SCHEMA, rows())


def _parts(paths: Path | list[Path], columns: list[str]) -> Iterator[pa.RecordBatch]:
    for path in paths if isinstance(paths, list) else [paths]:
        yield from read_batches(path, columns)


def _ids(path: Path | list[Path], low: bytes, high: bytes) -> np.ndarray:
    """The ids in `path` from `low` up to but not `high`, as fixed-width bytes."""
    found = [np.empty(0, "S64")]
    for batch in _parts(path, ["id"]):
        ids = _fixed(batch.column(0))
        found.append(ids[(ids >= low) & (ids < high)])
    return np.concatenate(found)


def _fixed(ids: pa.Array) -> np.ndarray:
    return np.array(ids.cast(pa.binary()).to_numpy(zero_copy_only=False), dtype="S64")


def _digest(*parts: object) -> bytes:
    return hashlib.sha256("|".join(map(str, parts)).encode()).digest()


def split(
    domain: str,
    documents: Path | list[Path],
    counts: Path | list[Path],
    owners: Path,
    training: bool,
    budget: Budget,
    seed: int,
    outputs: dict[str, Path],
    card: Path,
) -> None:
    """Write the splits of `domain` (`outputs`: train, dev, test) and its corpus card.

    Texts that occur twice are kept once; a training domain keeps those that `owners` gives it, a novel domain those
    that no training domain holds. In order of sha256(seed | id), dev is filled until it has its words, then test, then
    train. Each Parquet has the columns `id`, `text`, `n_words`, in that order.
    `counts` comes from `anonymize_documents`; in the card, its documents = those in the splits + rejected + duplicates.
    Raises DemixError where dev and test cannot be filled with a document left over.
    """
    found = _sum([read_json(path) for path in (counts if isinstance(counts, list) else [counts])])
    ids, words, sizes = _columns(documents)
    sorted_ids, first = np.unique(ids, return_index=True)
    allowed = _allowed(domain, sorted_ids, owners, training)
    within, across = len(ids) - len(first), int((~allowed).sum())
    rows = first[allowed]
    keys = np.array([_digest(seed, ids[row].decode()) for row in rows], dtype="S32")
    rows = rows[np.argsort(keys, kind="stable")]
    del sorted_ids, first, allowed, keys

    edges = _edges(domain, words[rows], budget)
    rank = np.full(len(ids), -1, np.int64)
    rank[rows[: edges["train"][1]]] = np.arange(edges["train"][1])
    _write(documents, rank, sizes, edges, outputs)
    taken = {name: int(words[rows[slice(*edges[name])]].sum()) for name in SPLITS}
    if budget.train is not None and taken["train"] < budget.train:
        _log.warning("%s: train has %d of the %d words of its budget", domain, taken["train"], budget.train)
    write_json(
        card,
        {
            "domain": domain,
            "documents": {name: edges[name][1] - edges[name][0] for name in SPLITS},
            "words": taken,
            "rejected": {**found["rejected"], "beyond_budget": len(rows) - edges["train"][1]},
            "duplicates": {"within": within, "across": across},
            "replacements": found["replacements"],
            "normalised": found["normalised"],
        },
    )


def _sum(counts: list[dict]) -> dict:
    """Counts of the parts added up, key by key."""
    return {
        key: _sum([count[key] for count in counts]) if isinstance(value, dict) else sum(count[key] for count in counts)
        for key, value in counts[0].items()
    }


def _columns(documents: Path | list[Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, words and bytes of each document, in the file's order."""
    ids, words, sizes = [np.empty(0, "S64")], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for batch in _parts(documents, ["id", "n_words", "text"]):
        ids.append(_fixed(batch.column("id")))
        words.append(batch.column("n_words").to_numpy())
        sizes.append(pc.binary_length(batch.column("text")).to_numpy())
    return np.concatenate(ids), np.concatenate(words), np.concatenate(sizes)


def _allowed(domain: str, ids: np.ndarray, owners: Path, training: bool) -> np.ndarray:
    """Which of the sorted `ids` the domain may keep."""
    listed = np.zeros(len(ids), bool)
    for batch in read_batches(owners, ["id", "domain"]):
        if training:
            batch = batch.filter(pc.equal(batch.column("domain"), domain))
        wanted = _fixed(batch.column("id"))
        place = np.minimum(np.searchsorted(ids, wanted), max(len(ids) - 1, 0))
        if len(ids):
            listed[place[ids[place] == wanted]] = True
    return listed if training else ~listed


def _edges(domain: str, words: np.ndarray, budget: Budget) -> dict[str, tuple[int, int]]:
    """The first and last rank of each split: a split ends with the document that fills its budget."""
    edges, start = {}, 0
    total = np.cumsum(words)
    for name in ("dev", "test", "train"):
        wanted = getattr(budget, name)
        before = int(total[start - 1]) if start else 0
        end = len(words) if wanted is None else start
        if wanted:
            end = int(np.searchsorted(total, before + wanted)) + 1
        if end > len(words) and name == "train":
            end = len(words)
        if end > len(words) or (name == "train" and end == start and wanted != 0):
            raise DemixError(
                f"{domain}.words",
                f"dev ({budget.dev}) and test ({budget.test}) leave no document for train out of {len(words)} "
                f"documents with {int(words.sum())} words",
                "lower them or add text",
            )
        edges[name] = (start, end)
        start = end
    return edges


def _write(
    documents: Path | list[Path],
    rank: np.ndarray,
    sizes: np.ndarray,
    edges: dict[str, tuple[int, int]],
    outputs: dict[str, Path],
) -> None:
    """Write the documents with a rank to the splits in order of rank.

    They go first to temporary files, each a stretch of ranks that can be sorted in memory.
    """
    ranked = np.zeros(int(rank.max(initial=-1)) + 1, np.int64)
    ranked[rank[rank >= 0]] = sizes[rank >= 0]
    part_of_rank = (np.cumsum(ranked) - ranked) // PART_BYTES
    folder = outputs["train"].parent
    folder.mkdir(parents=True, exist_ok=True)
    schema = SCHEMA.append(pa.field("rank", pa.int64()))
    with TemporaryDirectory(dir=folder, prefix=".sorting.") as temporary:
        parts = [Path(temporary, f"{part}.arrow") for part in range(int(part_of_rank[-1]) + 1 if len(ranked) else 0)]
        with ExitStack() as stack:
            writers = [stack.enter_context(pa.ipc.new_stream(str(part), schema)) for part in parts]
            row = 0
            for batch in _parts(documents, SCHEMA.names):
                ranks = rank[row : row + batch.num_rows]
                row += batch.num_rows
                batch = pa.record_batch([*batch.columns, pa.array(ranks)], schema=schema)
                place = np.where(ranks >= 0, part_of_rank[ranks] if len(ranked) else -1, -1)
                for part in np.unique(place[place >= 0]):
                    writers[part].write_batch(batch.take(pa.array(np.flatnonzero(place == part))))
        for name in SPLITS:
            write_rows(outputs[name], SCHEMA, _sorted(parts, part_of_rank, *edges[name]))


def _sorted(parts: list[Path], part_of_rank: np.ndarray, start: int, end: int) -> Iterator[tuple[str, str, int]]:
    for part in np.unique(part_of_rank[start:end]):
        with pa.OSFile(str(parts[part])) as file, pa.ipc.open_stream(file) as reader:
            table = reader.read_all()
        ranks = table.column("rank").to_numpy()
        order = np.argsort(ranks)
        order = order[(ranks[order] >= start) & (ranks[order] < end)]
        for batch in table.select(SCHEMA.names).take(pa.array(order)).to_batches(BATCH_ROWS):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
