"""Documents of a domain, free of exact duplicates, divided into train, dev and test by the hash of their content.

Ids, words and places of the documents go through files in buckets (`demix.data.buckets`), texts through files of a
stretch each: memory holds one bucket or stretch at a time, however large the domain.
"""

import logging
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from demix.config.domains import Budget
from demix.data.buckets import bucket_count, gathered, order_of, place, scattering
from demix.data.documents import as_bytes, digest_of, document_batches, document_count
from demix.data.leakage import gram_set, leaked, shares
from demix.errors import DemixError
from demix.files import read_json, scratch, write_json
from demix.files.batches import counted, read_batches, write_rows
from demix.progress import followed

SPLITS = ("train", "dev", "test")
SCHEMA = pa.schema([("id", pa.string()), ("text", pa.large_string()), ("n_words", pa.int64()), ("origin", pa.string())])

# Text held in memory while sorting, until there are as many stretches as files that a process may hold open.
STRETCH_BYTES = 16 << 20
MOST_STRETCHES = 256

# `row` counts the documents of a domain in the order of its files; `bytes` is the size of the text.
_DOCUMENT = np.dtype([("hash", "S32"), ("row", np.int64), ("words", np.int64), ("bytes", np.int64)])
_RANK = np.dtype([("row", np.int64), ("rank", np.int64), ("stretch", np.int64)])

_log = logging.getLogger(__name__)


def split(
    domain: str,
    documents: list[Path],
    counts: list[Path],
    owners: Path,
    training: bool,
    budget: Budget,
    seed: int,
    outputs: dict[str, Path],
    card: Path,
    near_duplicates: float | None = None,
    metadata: bool = False,
) -> None:
    """Write the splits of `domain` (`outputs`: train, dev, test) and its corpus card.

    `documents` and `counts` are those of the domain's parts, as `anonymize_documents` writes them. Texts that occur
    twice are kept once; a training domain keeps those that `owners` gives it, a novel domain those that no training
    domain holds. In order of sha256(seed | id), dev is filled until it has its words, then test, then train.
    With `near_duplicates`, texts of which more than this share of 13-grams occurs in dev or test stay out of train.
    Each Parquet has the columns `id`, `text`, `n_words`, `origin`, and with `metadata` that of the documents, in that
    order. Pieces of one document (those of one `origin`) may fall in different splits.
    Budgets that leave nothing for train are made smaller, with a warning: dev and test then take half of all words.
    In the card, the documents of `counts` = those in the splits + rejected + duplicates.
    Raises DemixError where dev and test cannot be filled with a document left over.
    """
    found = [read_json(path) for path in counts]
    totals = {key: _sum(one[key] for one in found) for key in ("rejected", "replacements", "normalised")}
    with scratch(card) as folder:
        schema = SCHEMA.append(pa.field("metadata", pa.large_string())) if metadata else SCHEMA
        work = _Work(domain, documents, folder, document_count(documents), schema)
        duplicates = _deduplicate(work, owners, training, seed)
        asked = budget
        try:
            edges = _edges(work, budget)
        except _NothingLeftError as error:
            budget = _smaller(work, budget)
            try:
                edges = _edges(work, budget)
            except _NothingLeftError:
                raise error from None
            _log.warning(
                "%s: dev (%d) and test (%d) leave no document for train; they take %d and %d of %d words",
                domain, asked.dev, asked.test, edges.words["dev"], edges.words["test"], sum(edges.words.values()),
            )  # fmt: skip
        if near_duplicates is None:
            _write(work, edges, outputs)
        else:
            held_out = {name: outputs[name] for name in ("dev", "test")}
            _write(work, edges, held_out)
            work = replace(work, near=_near_duplicates(work, edges, near_duplicates, [*held_out.values()]))
            edges = _edges(work, budget)
            _write(work, edges, {"train": outputs["train"]})
    words = {name: edges.words[name] for name in SPLITS}
    if budget.train is not None and words["train"] < budget.train:
        _log.warning("%s: train has %d of the %d words of its budget", domain, words["train"], budget.train)
    totals["rejected"]["near_duplicates"] = edges.near
    totals["rejected"]["beyond_budget"] = edges.documents - edges.ranks["train"][1]
    held_out = {name: outputs[name] for name in ("dev", "test")}
    write_json(
        card,
        {
            "domain": domain,
            "documents": {name: edges.ranks[name][1] - edges.ranks[name][0] for name in SPLITS},
            "words": words,
            "budgets": {name: getattr(asked, name) for name in SPLITS},
            "origins": _origins(outputs["train"], held_out),
            "duplicates": duplicates,
            "leakage": {
                "exact_duplicates": _exact_duplicates(domain, outputs["train"], held_out, owners),
                "ngrams": leaked(outputs["train"], held_out),
            },
            **totals,
        },
    )


@dataclass(frozen=True)
class _Work:
    """A domain being split: its files, a folder for buckets, its number of documents.

    `near` has a bit for each document that is to stay out of train (12 MB for 100 million), or nothing.
    """

    domain: str
    documents: list[Path]
    folder: Path
    rows: int
    schema: pa.Schema = SCHEMA
    near: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8), repr=False)

    @property
    def buckets(self) -> int:
        return bucket_count(self.rows)

    @property
    def bucket_rows(self) -> int:
        """Documents that follow one another in the files, by bucket."""
        return max(-(-self.rows // self.buckets), 1)

    def is_near(self, rows: np.ndarray) -> np.ndarray:
        near: np.ndarray = self.near[rows >> 3] >> (rows & 7).astype(np.uint8) & 1 == 1
        return near


@dataclass(frozen=True)
class _Edges:
    """First rank and one after the last of each split, its words and bytes; documents to choose from; near ones."""

    ranks: dict[str, tuple[int, int]]
    words: dict[str, int]
    bytes: dict[str, int]
    documents: int
    near: int


def _sum(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in counts:
        for name, number in one.items():
            total[name] = total.get(name, 0) + number
    return total


def _deduplicate(work: _Work, owners: Path, training: bool, seed: int) -> dict[str, int]:
    """Leave the documents that the domain keeps in the buckets "key", their sha256(seed | id) as hash."""
    with scattering(work.folder, "id", work.buckets) as scatter:
        row = 0
        read = document_batches(work.documents, ["id", "n_words", "text"])
        for batch in counted(read, f"{work.domain}: documents read", work.documents):
            rows = np.zeros(batch.num_rows, _DOCUMENT)
            rows["hash"], rows["words"] = as_bytes(batch.column("id")), batch.column("n_words").to_numpy()
            rows["bytes"] = pc.binary_length(batch.column("text")).to_numpy()
            rows["row"] = row + np.arange(len(rows))
            row += len(rows)
            scatter(rows, place(rows["hash"], work.buckets))
    within = across = 0
    known = _known(owners, work.domain if training else None)
    some: np.ndarray | None = np.empty(0, "S32")
    with scattering(work.folder, "key", work.buckets) as scatter:
        for bucket, rows in enumerate(gathered(work.folder, "id", work.buckets, _DOCUMENT)):
            rows = rows[order_of(rows["hash"])]
            first = np.concatenate([[True], rows["hash"][1:] != rows["hash"][:-1]])[: len(rows)]
            within += len(rows) - int(first.sum())
            rows = rows[first]
            listed = np.zeros(len(rows), bool)
            # The owners are sorted as the buckets are: both are read side by side.
            while some is not None:
                inside = int(np.searchsorted(place(some, work.buckets), bucket, side="right"))
                if len(rows) and inside:
                    at = np.minimum(np.searchsorted(rows["hash"], some[:inside]), len(rows) - 1)
                    listed[at[rows["hash"][at] == some[:inside]]] = True
                some = some[inside:]
                if len(some):
                    break
                some = next(known, None)
            allowed = listed if training else ~listed
            across += int((~allowed).sum())
            rows = rows[allowed]
            ids = rows["hash"].tobytes().hex()
            keys = [digest_of(seed, ids[start : start + 64]) for start in range(0, len(ids), 64)]
            rows["hash"] = np.frombuffer(b"".join(keys), "S32")
            scatter(rows, place(rows["hash"], work.buckets))
    return {"within": within, "across": across}


def _known(owners: Path, domain: str | None) -> Iterator[np.ndarray]:
    """The sorted ids that training domains hold, or those that `domain` owns, some at a time."""
    for batch in read_batches(owners, ["id", "domain"]):
        if domain is not None:
            batch = batch.filter(pc.equal(batch.column("domain"), domain))
        yield as_bytes(batch.column("id"))


def _ordered(work: _Work) -> Iterator[np.ndarray]:
    """The documents that the domain keeps, by rank, without near duplicates; a bucket at a time."""
    for rows in gathered(work.folder, "key", work.buckets, _DOCUMENT):
        rows = rows[order_of(rows["hash"])]
        yield rows[~work.is_near(rows["row"])] if len(work.near) else rows


class _NothingLeftError(DemixError):
    """Dev and test leave no document for train."""


def _smaller(work: _Work, budget: Budget) -> Budget:
    """The budget with dev and test scaled so that together they take half of the words that there are.

    Each keeps a word at least, as a budget must; a domain without words cannot fill them.
    """
    words = sum(int(rows["words"].sum()) for rows in _ordered(work))
    dev, test = (-(-wanted * words // (2 * (budget.dev + budget.test))) for wanted in (budget.dev, budget.test))
    return Budget(budget.train, min(max(1, dev), budget.dev), min(max(1, test), budget.test))


def _edges(work: _Work, budget: Budget) -> _Edges:
    """A split ends with the document that fills its budget."""
    ranks, taken, sizes = {}, dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    names = ["dev", "test", "train"]
    start = documents = total = 0
    for rows in _ordered(work):
        at, total = 0, total + int(rows["words"].sum())
        while names and at < len(rows):
            name, wanted = names[0], getattr(budget, names[0])
            end = len(rows)
            if wanted is not None:
                filled = np.searchsorted(np.cumsum(rows["words"][at:]), wanted - taken[name])
                end = min(at + int(filled) + 1, len(rows)) if taken[name] < wanted else at
            taken[name] += int(rows["words"][at:end].sum())
            sizes[name] += int(rows["bytes"][at:end].sum())
            at = end
            if wanted is not None and taken[name] >= wanted:
                ranks[name], start = (start, documents + at), documents + at
                names.pop(0)
        documents += len(rows)
    for name in names:
        if name != "train" or documents == start:
            raise _NothingLeftError(
                f"{work.domain}.words",
                f"dev ({budget.dev}) and test ({budget.test}) leave no document for train out of {documents} "
                f"documents with {total} words",
                "lower them or add text",
            )
        ranks[name] = (start, documents)
    near = int(np.unpackbits(work.near).sum())
    return _Edges(ranks, taken, sizes, documents, near)


def _write(work: _Work, edges: _Edges, outputs: dict[str, Path]) -> None:
    """Write splits that follow one another in order of rank.

    Documents go first to temporary files, each a stretch of ranks that can be sorted in memory.
    """
    low, high = (pick(edges.ranks[name][side] for name in outputs) for side, pick in ((0, min), (1, max)))
    total = sum(edges.bytes[name] for name in outputs)
    size = max(STRETCH_BYTES, -(-total // MOST_STRETCHES))
    stretches = [work.folder / f"stretch.{number}" for number in range(max(total - 1, 0) // size + 1)]
    # The first rank of each stretch, and of the one after it.
    firsts = np.full(len(stretches) + 1, high, np.int64)
    with scattering(work.folder, "rank", work.buckets) as scatter:
        rank = before = 0
        for rows in _ordered(work):
            ranks = np.arange(rank, rank + len(rows))
            rank += len(rows)
            wanted = (ranks >= low) & (ranks < high)
            places = np.zeros(int(wanted.sum()), _RANK)
            places["row"], places["rank"] = rows["row"][wanted], ranks[wanted]
            ends = before + np.cumsum(rows["bytes"][wanted])
            places["stretch"] = np.minimum((ends - rows["bytes"][wanted]) // size, len(stretches) - 1)
            before = int(ends[-1]) if len(ends) else before
            np.minimum.at(firsts, places["stretch"], places["rank"])
            scatter(places, places["row"] // work.bucket_rows)
    firsts = np.minimum.accumulate(firsts[::-1])[::-1]
    schema = work.schema.append(pa.field("rank", pa.int64()))
    with ExitStack() as stack:
        writers = [stack.enter_context(pa.ipc.new_stream(str(path), schema)) for path in stretches]
        by_row = _by_row(work)
        read = document_batches(work.documents, work.schema.names)
        for batch in counted(read, f"{work.domain}: documents placed", work.documents):
            ranks, stretch = by_row.send(batch.num_rows)
            batch = pa.record_batch([*batch.columns, pa.array(ranks)], schema=schema)
            for number in np.unique(stretch[stretch >= 0]):
                writers[number].write_batch(batch.take(pa.array(np.flatnonzero(stretch == number))))
    for name, output in outputs.items():
        start, end = edges.ranks[name]
        ordered = _sorted(stretches, firsts, start, end)
        write_rows(output, work.schema, followed(ordered, f"{work.domain}: {name} documents", end - start))


def _by_row(work: _Work) -> Generator[Any, int, None]:
    """Send the number of the next documents in the files; get their ranks and stretches (-1: in no split)."""

    def places() -> Generator[Any, int, None]:
        held = np.empty((2, 0), np.int64)
        buckets = enumerate(gathered(work.folder, "rank", work.buckets, _RANK))
        number = yield
        while True:
            while held.shape[1] < number:
                bucket, rows = next(buckets)
                more = np.full((2, work.bucket_rows), -1, np.int64)
                more[:, rows["row"] - bucket * work.bucket_rows] = rows["rank"], rows["stretch"]
                held = np.concatenate([held, more], axis=1)
            some, held = held[:, :number], held[:, number:]
            number = yield some

    generator = places()
    next(generator)
    return generator


def _sorted(stretches: list[Path], firsts: np.ndarray, start: int, end: int) -> Iterator[tuple[Any, ...]]:
    for path, (first, after) in zip(stretches, pairwise(firsts), strict=True):
        if first >= end or after <= start:
            continue
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
            table = reader.read_all()
        ranks = table.column("rank").to_numpy()
        order = np.argsort(ranks)
        order = order[(ranks[order] >= start) & (ranks[order] < end)]
        for some in np.array_split(order, -(-len(order) // 256)) if len(order) else []:
            for batch in table.drop_columns("rank").take(pa.array(some)).to_batches():
                yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _near_duplicates(work: _Work, edges: _Edges, most: float, held_out: list[Path]) -> np.ndarray:
    """A bit for each document outside of the held-out files that shares more than `most` of its 13-grams with them."""
    grams = gram_set(held_out)
    near = np.zeros(-(-work.rows // 8), np.uint8)
    row = 0
    read = document_batches(work.documents, ["text"])
    for batch in counted(read, f"{work.domain}: documents compared", work.documents):
        found = row + np.flatnonzero(shares(batch.column(0), grams) > most)
        np.bitwise_or.at(near, found >> 3, (1 << (found & 7)).astype(np.uint8))
        row += batch.num_rows
    kept = np.zeros_like(near)
    rank = 0
    for rows in _ordered(work):
        rows = rows["row"][np.arange(rank, rank + len(rows)) >= edges.ranks["test"][1]]
        rank += len(rows)
        np.bitwise_or.at(kept, rows >> 3, (1 << (rows & 7)).astype(np.uint8))
    return near & kept


def _exact_duplicates(domain: str, train: Path, held_out: dict[str, Path], owners: Path) -> int:
    """Held-out texts that the own train split holds, or that another training domain owns: none, or a bug."""
    parts = [as_bytes(batch.column(0)) for batch in document_batches(held_out.values(), ["id"])]
    ids = np.sort(np.concatenate([np.empty(0, "S32"), *parts]))
    found = int((ids[1:] == ids[:-1]).sum())
    for batch in read_batches(train, ["id"]):
        found += _count(ids, as_bytes(batch.column(0)))
    for batch in read_batches(owners, ["id", "domain"]):
        found += _count(ids, as_bytes(batch.filter(pc.not_equal(batch.column("domain"), domain)).column("id")))
    if found:
        raise RuntimeError(f"{domain}: {found} texts of dev and test are in a training split")
    return found


def _origins(train: Path, held_out: dict[str, Path]) -> dict[str, int]:
    """How many documents the pieces of each held-out split are of, and how many of these have pieces in train too."""
    counts: dict[str, int] = {}
    for name, path in held_out.items():
        parts = [as_bytes(batch.column(0)) for batch in read_batches(path, ["origin"])]
        origins = np.unique(np.concatenate([np.empty(0, "S32"), *parts]))
        seen = np.zeros(len(origins), bool)
        for batch in read_batches(train, ["origin"]):
            seen |= np.isin(origins, as_bytes(batch.column(0)))
        counts |= {name: len(origins), f"{name}_in_train": int(seen.sum())}
    return counts


def _count(ids: np.ndarray, others: np.ndarray) -> int:
    at = np.minimum(np.searchsorted(ids, others), max(len(ids) - 1, 0))
    return int((ids[at] == others).sum()) if len(ids) else 0
