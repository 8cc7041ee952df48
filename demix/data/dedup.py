"""Texts that several domains hold: which training domain keeps each."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import duckdb
import pyarrow as pa

from demix.data.shared import made_once
from demix.files.batches import counted, read_batches, write_batches
from demix.files.database import database, run_on

# Ids that are grouped and sorted at once.
RANGE_ROWS = 500_000
OWNERS_SCHEMA = pa.schema([("id", pa.string()), ("domain", pa.string())])

# The last digits of a hash and a domain are the domain. A text that only one domain holds needs no hash.
_OWNERS = """
select lower(hex(id)) as id, if(
    min(domain) = max(domain),
    min(domain)::varchar,
    list_min(
        list_transform(split(string_agg(domain, '|'), '|'), lambda one: sha256(one || '|' || lower(hex(id))) || one)
    )[65:]
) as domain
from held where held.id >= $low and held.id < $high group by held.id order by held.id
"""


def deduplicate(documents: list[Path], output: Path) -> None:
    """Assign each text that several training domains hold to one of them (documents/<domain>/<part>.parquet)."""
    made_once(output, [output], documents, {}, partial(mark_duplicates, _parts_by_domain(documents), output))


def _parts_by_domain(documents: Sequence[Path]) -> dict[str, list[Path]]:
    """The files documents/<domain>/<part>.parquet, grouped by domain."""
    names = dict.fromkeys(path.parent.name for path in documents)
    return {name: [path for path in documents if path.parent.name == name] for name in names}


def mark_duplicates(inputs: dict[str, list[Path]], output: Path) -> None:
    """Decide which training domain keeps each text: Parquet `id`, `domain`, one row per distinct id, sorted by id.

    Of the domains that hold a text the one with the smallest sha256 of domain and id keeps it, so that neither the
    order of the domains nor that of their documents and parts matters.
    """
    with database(output) as tables:
        _hold(tables, inputs)
        write_batches(output, OWNERS_SCHEMA, _owners(tables), use_dictionary=["domain"])


def _owners(tables: duckdb.DuckDBPyConnection) -> Iterator[pa.RecordBatch]:
    """The owners of a range of ids after the other: in memory, they are grouped and sorted in half of the time."""
    (rows,) = tables.sql("select count(*) from held").fetchall()[0]
    parts = 1 + rows // RANGE_ROWS
    edges = [((number << 256) // parts).to_bytes(32) for number in range(parts)]
    for low, high in pairwise([*edges, b"\xff" * 33]):
        found = tables.sql(_OWNERS, params={"low": low, "high": high}).to_arrow_reader(1 << 16)
        yield from (batch.cast(OWNERS_SCHEMA) for batch in found)


def _hold(tables: duckdb.DuckDBPyConnection, inputs: dict[str, list[Path]]) -> None:
    """Make the table `held`: one row per document and domain that holds it."""
    names = ", ".join(f"'{domain}'" for domain in sorted(inputs))
    tables.execute(f"create type domain as enum ({names}); create table held (id blob, domain domain)")
    for domain, paths in inputs.items():
        batches = (batch for path in paths for batch in read_batches(path, ["id"]))
        query = f"insert into held select unhex(id), '{domain}' from batches"
        run_on(tables, query, counted(batches, f"{domain}: documents", paths))
