"""Texts that several domains hold: which training domain keeps each."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import duckdb
import pyarrow as pa

from demix.data.shared import made_once
from demix.files.batches import counted, read_batches, write_batches
from demix.files.database import database, run_on

OWNERS_SCHEMA = pa.schema([("id", pa.string()), ("domain", pa.string())])

_OWNERS = """
select lower(hex(id)) as id, arg_min(domain::varchar, sha256(domain || '|' || lower(hex(id)))) as domain
from held group by held.id order by held.id
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
