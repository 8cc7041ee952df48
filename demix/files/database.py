"""DuckDB for what is relational: joins, sorts and sums over rows that may be more than memory holds.

Files are read and written by our own functions, which check seals and places (`demix.files.parquet`); DuckDB sees Arrow
alone. No database reads a file, fetches anything or installs an extension.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa

from demix.errors import DemixError

if TYPE_CHECKING:
    import pandas as pd

# Beside it stand the interpreter with its libraries and the batches that are read and written, about 300 MB.
MEMORY_MB = 400


def memory_mb() -> int:
    """Memory that a database may take: a part of what SLURM gives the job (`cluster.memory_mb`), or MEMORY_MB."""
    return max(MEMORY_MB, int(os.environ.get("SLURM_MEM_PER_NODE", "0")) // 8)


def threads() -> int:
    """The threads of a database: those that Snakemake gives the job, or all cores that this process may use."""
    return int(os.environ.get("OMP_NUM_THREADS", "0")) or len(os.sched_getaffinity(0))


def connected(folder: Path | None = None) -> duckdb.DuckDBPyConnection:
    """A new database in memory; `folder` takes what memory does not hold."""
    settings: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": f"{memory_mb()}MB",
        "threads": threads(),
        "temp_directory": "" if folder is None else str(folder / "spilled"),
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "allow_community_extensions": False,
        # A name in a query is a table, never a variable of Python.
        "python_enable_replacements": False,
    }
    connection = duckdb.connect(config=settings)
    connection.execute("set enable_external_access = false; set lock_configuration = true")
    return connection


@cache
def _asked() -> duckdb.DuckDBPyConnection:
    return connected()


def ask(query: str, **tables: "pd.DataFrame") -> "pd.DataFrame":
    """The rows that `query` selects from `tables`, by their names in it. Missing values (None, NaN) are NULL there."""
    for name, rows in tables.items():
        _asked().register(name, rows)
    try:
        return _asked().sql(query).df()
    finally:
        for name in tables:
            _asked().unregister(name)


@contextmanager
def database(folder: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield an empty database that spills to `folder`, the scratch folder of a job.

    Raises DemixError when memory or the disk do not suffice.
    """
    try:
        with connected(folder) as connection:
            yield connection
    except duckdb.OutOfMemoryException as error:
        raise DemixError(
            folder.parent, f"takes more memory  ({_first_line(error)})", "raise cluster.memory_mb"
        ) from None
    except duckdb.IOException as error:
        raise DemixError(
            folder.parent, f"cannot be written ({_first_line(error)})", "free space or mend its permissions, then rerun"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def for_each(tables: duckdb.DuckDBPyConnection, query: str, batches: Iterable[pa.RecordBatch]) -> None:
    """Run `query`, which reads the table `batch`, for each of `batches`.

    An error in reading a batch keeps its type, which it would lose inside of a query that reads all of them.
    """
    for batch in batches:
        tables.register("batch", batch)
        tables.execute(query)
