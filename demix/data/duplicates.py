"""Texts that several domains hold: which training domain keeps each, and how many the novel domains share."""

from pathlib import Path

import duckdb
import pyarrow as pa

from demix.files import scratch, write_json
from demix.files.batches import counted, read_batches, write_batches
from demix.files.database import database, for_each

OWNERS_SCHEMA = pa.schema([("id", pa.string()), ("domain", pa.string())])

_OWNERS = """
select lower(hex(id)) as id, arg_min(domain, sha256(domain || '|' || lower(hex(id)))) as domain
from held group by held.id order by held.id
"""
_SHARED = """
with held as (select distinct id, domain from held)
select one.domain, other.domain, count(*)
from held one join held other on one.id = other.id and one.domain < other.domain
group by all order by all
"""


def mark_duplicates(inputs: dict[str, list[Path]], output: Path) -> None:
    """Decide which training domain keeps each text: Parquet `id`, `domain`, one row per distinct id, sorted by id.

    Of the domains that hold a text the one with the smallest sha256 of domain and id keeps it, so that neither the
    order of the domains nor that of their documents and parts matters.
    """
    with scratch(output) as folder, database(folder) as tables:
        _hold(tables, inputs)
        owners = tables.sql(_OWNERS).to_arrow_reader(1 << 16)
        write_batches(output, OWNERS_SCHEMA, (batch.cast(OWNERS_SCHEMA) for batch in owners))


def count_shared(inputs: dict[str, list[Path]], output: Path) -> None:
    """Write how many texts each two domains share as JSON `{"shared": {"a": {"b": number}}}`, a before b, no zeros.

    For the novel domains, whose duplicates among one another are reported and not dropped.
    """
    table: dict[str, dict[str, int]] = {}
    with scratch(output) as folder, database(folder) as tables:
        _hold(tables, inputs)
        for one, other, number in tables.sql(_SHARED).fetchall():
            table.setdefault(one, {})[other] = number
    write_json(output, {"shared": table})


def _hold(tables: duckdb.DuckDBPyConnection, inputs: dict[str, list[Path]]) -> None:
    """Make the table `held`: one row per document and domain that holds it."""
    tables.execute("create table held (id blob, domain varchar)")
    for domain, paths in inputs.items():
        batches = (batch for path in paths for batch in read_batches(path, ["id"]))
        query = f"insert into held select unhex(id), '{domain}' from batch"
        for_each(tables, query, counted(batches, f"{domain}: documents", paths))
