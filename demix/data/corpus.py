"""Documents of domains without exact duplicates, divided into train, dev and test by the hash of their content.

Queries over ids and numbers of words decide which documents a domain keeps, their order and their splits
(`demix.files.database`). Texts are sorted in files, each with a section of the order. Memory holds one section at a
time, however large the domain is.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import duckdb
import numpy as np
import pyarrow as pa

from demix.config.domains import Budget, SplitRecipe
from demix.data.anonymize import SCHEMA
from demix.data.leakage import gram_set, leaked, shares
from demix.data.readers import TO_UTF8
from demix.data.shared import made_once
from demix.errors import DemixError
from demix.files import parquet_reader, read_json, scratch, write_json
from demix.files.batches import BATCH_BYTES, BATCH_ROWS, counted, read_batches, write_batches
from demix.files.database import database, run_on
from demix.progress import followed
from demix.settings import Seed, Switch

SPLITS = ("train", "dev", "test")
OWNERS_SCHEMA = pa.schema([("id", pa.string()), ("domain", pa.string())])

# Bytes of text in memory while sorting, unless there would be more sections than files that a process may open.
STRETCH_BYTES = 16 << 20
MAX_STRETCHES = 256

# `row` numbers the chunks of a domain in the order of its files; a document that was not cut is one chunk. The first of
# several equal texts is kept. `document` numbers source documents in the order of a hash of their content, `within` is
# the number of words of a document before a chunk.
_KEPT = """
create table kept as
select row, words, dense_rank() over (order by place) as document,
    (sum(words) over (partition by place order by row))::bigint - words as within
from (
    select min(row) as row, any_value(words) as words,
        unhex(sha256($seed || '|' || lower(hex(arg_min(origin, row))))) as place
    from documents where (id in (from owned)) = $training group by id
)
"""
# The chunks of a document that dev and test use: the first ones, up to `per_document` words, at least one.
_GIVEN = "(within = 0 or $per_document is null or within + words <= $per_document)"
# The last document of a split, which begins after document `$after` and ends with the document that fills its budget.
_LAST = f"""
select coalesce(max(document), $after) from (
    select document, sum(sum(words)) over (order by document) - sum(words) as before
    from kept where document > $after and {_GIVEN} group by document
) where before < $words
"""
# The chunks of all splits in order, if dev and test end with document `$last`; `before`: number of words before a
# chunk.
_ORDERED = f"""
create or replace table ordered as
select row, words, document, row_number() over in_order - 1 as rank,
    (sum(words) over in_order)::bigint - words as before
from kept where row not in (from near) and (document > $last or {_GIVEN})
window in_order as (order by document, row rows unbounded preceding)
"""
# The chunks and words up to a document, and up to (and including) the chunk that fills a budget.
_UP_TO = "select count(*), coalesce(sum(words), 0)::bigint from ordered where document <= $last"
_UNTIL = "select count(*), coalesce(sum(words), 0)::bigint from ordered where $words is null or before < $words"
# The rank of each document in the order of the files; -1 if it is in none of the splits to be written.
_RANKS = """
select coalesce(rank, -1) as rank
from range($documents) files(row) left join (from ordered where rank >= $low and rank < $high) using (row)
order by row
"""
# The domain that keeps a text, among those that have it.
_OWNERS = """
select lower(hex(id)) as id, arg_min(domain::varchar, sha256(domain || '|' || lower(hex(id)))) as domain
from held group by held.id order by held.id
"""
# The source documents of a split.
_ORIGINS = "select count(distinct document) from ordered where rank >= $start and rank < $end"

_log = logging.getLogger(__name__)


class Splitting(SplitRecipe):
    """How a domain is split: word budgets, the kind of domain, the run's seed.

    With `test_only` there is no train and no dev.
    """

    training: Switch
    seed: Seed
    test_only: Switch = False


def deduplicate(documents: list[Path], output: Path) -> None:
    """Assign each text that several training domains hold to one of them (documents/<domain>/<part>.parquet)."""
    names = dict.fromkeys(path.parent.name for path in documents)
    parts = {name: [path for path in documents if path.parent.name == name] for name in names}
    made_once(output, [output], documents, {}, partial(mark_duplicates, parts, output))


def mark_duplicates(inputs: dict[str, list[Path]], output: Path) -> None:
    """Decide which training domain keeps each text: Parquet `id`, `domain`, one row per distinct id, sorted by id.

    If several domains have a text, the one with the smallest sha256 of domain and id keeps it, so the order of domains,
    documents and parts does not matter.
    """
    with database(output) as tables:
        _hold(tables, inputs)
        found = (batch.cast(OWNERS_SCHEMA) for batch in tables.sql(_OWNERS).to_arrow_reader(1 << 16))
        write_batches(output, OWNERS_SCHEMA, found, use_dictionary=["domain"])


def _hold(tables: duckdb.DuckDBPyConnection, inputs: dict[str, list[Path]]) -> None:
    """Make the table `held`: one row per document and domain that holds it."""
    names = ", ".join(f"'{domain}'" for domain in sorted(inputs))
    tables.execute(f"create type domain as enum ({names}); create table held (id blob, domain domain)")
    for domain, paths in inputs.items():
        batches = (batch for path in paths for batch in read_batches(path, ["id"]))
        query = f"insert into held select unhex(id), '{domain}' from batches"
        run_on(tables, query, counted(batches, f"{domain}: documents", paths))


def split_once(domain: str, documents: list[Path], owners: Path, settings: Splitting, output: Path) -> None:
    """Drop duplicates, and split a domain by content hash; dev and test are filled first.

    The arguments are as in `split`. If another run has the same splits, they are hard-linked instead.
    """
    counts = [path.with_suffix(".json") for path in documents]
    files = [output / "card.json", *(output / f"{name}.parquet" for name in _splits_of(settings))]
    make = partial(split, domain, documents, owners, settings, output)
    made_once(output, files, [*documents, *counts, owners], settings.as_dict(), make)


def split(domain: str, documents: list[Path], owners: Path, splitting: Splitting, output: Path) -> None:
    """Write `train.parquet`, `dev.parquet` and `test.parquet` of `domain` below `output`, and the corpus card.

    `documents` are the files of the domain's parts, as `anonymize_documents` writes them, with their counts (`.json`)
    next to them. Texts that occur twice are kept once; a training domain keeps the texts that `owners` gives it, a
    novel domain the texts that no training domain holds. In order of sha256(seed | origin), dev is filled until it has
    its words, then test, then train: all chunks of a source document (those of one `origin`) are in one split. A
    document of dev or test is used up to `words.per_document` words (whole chunks), and the rest of it is in no split.
    With `near_duplicates`, texts are left out of train if more than this share of their 13-grams occurs in dev or test.
    Each Parquet file has the columns `id`, `text`, `n_words`, `origin`. If the budgets leave nothing for train, they
    are reduced with a warning: dev and test then have half of what all documents could give to them. In the card,
    documents of the counts = documents in the splits + rejected + duplicates. With `test_only` the test split has all
    kept documents, up to its words. Raises DemixError if dev and test leave no document for train, and if the test
    split of `test_only` has no document.
    """
    outputs = {name: output / f"{name}.parquet" for name in _splits_of(splitting)}
    held_out = {name: path for name, path in outputs.items() if name != "train"}
    card, words = output / "card.json", splitting.words
    totals: dict[str, Counter[str]] = {key: Counter() for key in ("rejected", "replacements", "normalised")}
    for counts in (read_json(path.with_suffix(".json")) for path in documents):
        for key, total in totals.items():
            total.update(counts[key])
    said: dict[str, Any] = {"domain": domain}
    with scratch(card) as folder, database(card) as tables:
        work = _Work(domain, documents, folder, tables, _left_out(totals["rejected"]))
        said["duplicates"] = _deduplicate(work, owners, splitting)
        if splitting.test_only:
            edges = _held_out_edges(work, words, ("test",))
            if not edges["test"].end:
                cause = f"has only text that is also in training text{work.left_out}"
                raise DemixError(f"domain {domain}", cause, "use a source with other text")
            _write(work, edges, outputs)
        else:
            budget = _fitting(work, words)
            edges = _edges(work, budget)
            if splitting.near_duplicates is None:
                _write(work, edges, outputs)
            else:
                _write(work, edges, held_out)
                _leave_out_near(work, edges, splitting.near_duplicates, [*held_out.values()])
                edges = _edges(work, budget) or _refused(work, words)
                _write(work, edges, {"train": outputs["train"]})
            (totals["rejected"]["near_duplicates"],) = _one(tables, "select count(*) from near")
            ends = {name: {"start": edges[name].start, "end": edges[name].end} for name in held_out}
            said["origins"] = {name: _one(tables, _ORIGINS, **each)[0] for name, each in ends.items()}
        kept, ordered = _one(tables, "select (select count(*) from kept), (select count(*) from ordered)")
        (near,) = _one(tables, "select count(*) from near")
    totals["rejected"]["rest_of_held_out"] = kept - near - ordered
    totals["rejected"]["beyond_budget"] = ordered - max(one.end for one in edges.values())
    said["budgets"] = {"test": words.test}
    if not splitting.test_only:
        if budget.train is not None and edges["train"].words < budget.train:
            _log.warning("%s: train has %d of the %d words of its budget", domain, edges["train"].words, budget.train)
        leakage = {"ngrams": leaked(outputs["train"], held_out)}
        said |= {"budgets": words.as_dict(), "leakage": leakage}
    said["documents"] = {name: edges[name].end - edges[name].start for name in outputs}
    write_json(card, said | {"words": {name: edges[name].words for name in outputs}} | totals)


def _splits_of(splitting: Splitting) -> tuple[str, ...]:
    return ("test",) if splitting.test_only else SPLITS


@dataclass(frozen=True)
class _Work:
    """A domain being split: its files, a folder for sections, its tables, and a note of what was left out."""

    domain: str
    documents: list[Path]
    folder: Path
    tables: duckdb.DuckDBPyConnection
    left_out: str

    def read(self, columns: list[str], doing: str) -> Iterator[pa.RecordBatch]:
        """The documents in the order of the files, with their number as the last column."""
        batches = (batch for path in self.documents for batch in read_batches(path, columns))
        row = 0
        for batch in counted(batches, f"{self.domain}: documents {doing}", self.documents):
            yield batch.append_column("row", pa.array(np.arange(row, row + len(batch))))
            row += len(batch)


@dataclass(frozen=True)
class _Edges:
    """The first rank of a split, the rank after its last one, and its number of words."""

    start: int
    end: int
    words: int


def _one(tables: duckdb.DuckDBPyConnection, query: str, **values: Any) -> tuple[Any, ...]:
    row: tuple[Any, ...] = tables.execute(query, values).fetchall()[0]
    return row


def _deduplicate(work: _Work, owners: Path, splitting: Splitting) -> dict[str, int]:
    """Make the tables of the documents that the domain keeps, and count those that it does not."""
    tables = work.tables
    tables.execute("create table documents (id blob, words bigint, origin blob, row bigint)")
    insert = "insert into documents select unhex(id), n_words, unhex(origin), row from batches"
    run_on(tables, insert, work.read(["id", "n_words", "origin"], "read"))
    tables.execute("create table owned (id blob)")
    own = f" where domain = '{work.domain}'" if splitting.training else ""
    run_on(tables, f"insert into owned select unhex(id) from batches{own}", read_batches(owners, ["id", "domain"]))
    tables.execute(_KEPT, {"seed": splitting.seed, "training": splitting.training})
    counts = "select (select count(*) from documents), (select count(distinct id) from documents), count(*) from kept"
    documents, distinct, kept = _one(tables, counts)
    tables.execute("drop table documents; drop table owned; create table near (row bigint)")
    return {"within": documents - distinct, "across": distinct - kept}


def _fitting(work: _Work, budget: Budget) -> Budget:
    """The budget, or a smaller one if dev and test would leave nothing for train: half of what they could be given.

    Each keeps at least one word, as a budget must. Raises DemixError if even these cannot be filled.
    """
    if _edges(work, budget):
        return budget
    all_given = f"select coalesce(sum(words), 0)::bigint from kept where {_GIVEN}"
    (words,) = _one(work.tables, all_given, per_document=budget.per_document)
    dev, test = (-(-wanted * words // (2 * (budget.dev + budget.test))) for wanted in (budget.dev, budget.test))
    smaller = budget.replace(dev=min(max(1, dev), budget.dev), test=min(max(1, test), budget.test))
    edges = _edges(work, smaller) or _refused(work, budget)
    given = f"{edges['dev'].words} and {edges['test'].words} of {sum(split.words for split in edges.values())} words"
    said = "%s: dev (%d) and test (%d) leave no document for train; they have %s"
    _log.warning(said, work.domain, budget.dev, budget.test, given)
    return smaller


def _refused(work: _Work, budget: Budget) -> NoReturn:
    total = "select count(distinct document), coalesce(sum(words), 0)::bigint from kept"
    documents, words = _one(work.tables, total)
    raise DemixError(
        f"{work.domain}.words",
        f"dev ({budget.dev}) and test ({budget.test}) leave no document for train: {documents} documents have {words} "
        f"words, and each document is in only one split{work.left_out}",
        "lower words.dev or words.test, or add documents",
    )


def left_out(cards: Iterable[Path]) -> list[str]:
    """One line for each domain of these corpus cards that lacks documents or bytes because they are not text."""
    found = ((card["domain"], _left_out(card["rejected"] | card["normalised"])) for card in map(read_json, cards))
    return [domain + said.replace(";", ":", 1) for domain, said in found if said]


def _left_out(counts: Mapping[str, int]) -> str:
    """A note of the text that a domain lacks, as the end of a sentence; empty if it lacks none."""
    kinds = {"not_utf8": "document{} not in UTF-8", "invalid_bytes": "byte{} not in UTF-8", "empty": "document{} empty"}
    found = {kind: counts[kind] for kind in kinds if counts.get(kind)}
    said = ", ".join(f"{number:,} {kinds[kind].format('s' * (number > 1))}" for kind, number in found.items())
    cure = f" (convert: {TO_UTF8})" if found.keys() - {"empty"} else ""
    return f"; left out: {said}{cure}" if said else ""


def _held_out_edges(work: _Work, budget: Budget, names: tuple[str, ...]) -> dict[str, _Edges]:
    """Order the chunks of all splits, and return the edges of dev and test, which both end with a whole document."""
    last: dict[str, int] = {}
    after, given = 0, {"per_document": budget.per_document}
    for name in names:
        (after,) = _one(work.tables, _LAST, after=after, words=getattr(budget, name), **given)
        last[name] = after
    work.tables.execute(_ORDERED, {"last": after, **given})
    edges, rank, words = {}, 0, 0
    for name in names:
        end, total = _one(work.tables, _UP_TO, last=last[name])
        edges[name] = _Edges(rank, end, total - words)
        rank, words = end, total
    return edges


def _edges(work: _Work, budget: Budget) -> dict[str, _Edges]:
    """The edges of the splits; none if nothing is left for train. Train ends with the chunk that fills it."""
    edges = _held_out_edges(work, budget, ("dev", "test"))
    rank, words = edges["test"].end, edges["dev"].words + edges["test"].words
    end, total = _one(work.tables, _UNTIL, words=None if budget.train is None else words + budget.train)
    return edges | {"train": _Edges(rank, end, total - words)} if rank < end else {}


def _leave_out_near(work: _Work, edges: dict[str, _Edges], most: float, held_out: list[Path]) -> None:
    """Remove documents from the order that share more than `most` of their 13-grams with the held-out files."""
    grams = gram_set(held_out)
    found = (
        pa.record_batch([batch.column("row").filter(pa.array(shares(batch.column("text"), grams) > most))], ["row"])
        for batch in work.read(["text"], "compared")
    )
    outside = f"(from ordered where rank >= {edges['test'].end})"
    near = f"insert into near select row from batches semi join {outside} using (row)"
    run_on(work.tables, near, found)


def _write(work: _Work, edges: dict[str, _Edges], outputs: dict[str, Path]) -> None:
    """Write splits that follow one another in the order of ranks.

    Documents are first written to temporary files, each with a range of ranks that can be sorted in memory.
    """
    low, high = min(edges[name].start for name in outputs), max(edges[name].end for name in outputs)
    documents, size = _sizes(work.documents)
    # Ranks are by hash, so ranges with equally many documents have about equally many bytes.
    number = min(1 + size * (high - low) // (documents * STRETCH_BYTES), MAX_STRETCHES)
    firsts = np.linspace(low, high, number + 1).astype(np.int64)
    paths = [work.folder / f"stretch.{number}" for number in range(number)]
    ranks = work.folder / "ranks"
    values = {"low": low, "high": high, "documents": documents}
    with open(ranks, "wb") as file:
        for batch in work.tables.sql(_RANKS, params=values).to_arrow_reader():
            batch.column("rank").to_numpy().tofile(file)
    schema = SCHEMA.append(pa.field("rank", pa.int64()))
    with open(ranks, "rb") as file, ExitStack() as stack:
        writers = [stack.enter_context(pa.ipc.new_stream(str(path), schema)) for path in paths]
        for batch in work.read(SCHEMA.names, "placed"):
            rank = np.fromfile(file, np.int64, len(batch))
            order = np.argsort(rank)
            placed = pa.record_batch([*batch.columns[:-1], pa.array(rank)], schema=schema).take(pa.array(order))
            ends = np.searchsorted(rank[order], firsts)
            for number in np.flatnonzero(np.diff(ends)).tolist():
                writers[number].write_batch(placed[ends[number] : ends[number + 1]])
    for name, output in outputs.items():
        start, end = edges[name].start, edges[name].end
        ordered = _sorted(paths, firsts, start, end)
        ordered = followed(ordered, f"{work.domain}: {name} documents", end - start, len)
        write_batches(output, SCHEMA, ordered, use_dictionary=False)


def _sizes(paths: list[Path]) -> tuple[int, int]:
    """The number of documents, and the bytes of their texts."""
    documents = size = 0
    for path in paths:
        with parquet_reader(path) as file:
            documents += file.metadata.num_rows
            text = file.schema_arrow.get_field_index("text")
            groups = (file.metadata.row_group(number) for number in range(file.num_row_groups))
            size += sum(group.column(text).total_uncompressed_size for group in groups)
    return documents, size


def _sorted(paths: list[Path], firsts: np.ndarray, start: int, end: int) -> Iterator[pa.RecordBatch]:
    """The documents of the ranks from `start` to before `end`, in batches of bounded size."""
    for path, (first, after) in zip(paths, pairwise(firsts), strict=True):
        if first >= end or after <= start:
            continue
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
            table = reader.read_all()
        ranks = table.column("rank").to_numpy()
        order = np.argsort(ranks)
        order = order[slice(*np.searchsorted(ranks, [start, end], sorter=order))]
        rows = min(BATCH_ROWS, max(1, len(ranks) * BATCH_BYTES // max(table.nbytes, 1)))
        for place in range(0, len(order), rows):
            found = table.drop_columns("rank").take(pa.array(order[place : place + rows]))
            yield from found.combine_chunks().to_batches()
