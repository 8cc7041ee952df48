"""DuckDB for relational work: joins, sorts and sums over rows that may not fit into memory.

Our own functions read and write files, and check seals (`demix.files.parquet`); DuckDB gets only Arrow and pandas
objects. A database never reads a file, downloads anything or installs an extension.
"""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa

from demix.errors import DemixError
from demix.files.atomic import scratch

if TYPE_CHECKING:
    import pandas as pd

# In addition, the interpreter, its libraries and the batches being read and written need about 300 MB.
MEMORY_MB = 300
# The memory limit of `ask`: the results of 1,024 domains need more than MEMORY_MB.
ASKED_BYTES = 4_000_000_000
# DuckDB recommends at least 125 MB per thread.
THREAD_MB = 125


def memory_mb() -> int:
    """The memory limit of a database: a part of the job's memory in SLURM (`cluster.memory_mb`), or MEMORY_MB."""
    return max(MEMORY_MB, int(os.environ.get("SLURM_MEM_PER_NODE", "0")) // 8)


def threads() -> int:
    """The number of threads of a database: the job's threads in Snakemake, or all cores, limited by memory."""
    cores = int(os.environ.get("OMP_NUM_THREADS", "0")) or len(os.sched_getaffinity(0))
    return max(1, min(cores, memory_mb() // THREAD_MB))


def connected(
    folder: Path | None = None, memory: int | None = None, cores: int | None = None
) -> duckdb.DuckDBPyConnection:
    """A new database in memory, of `memory` bytes or `memory_mb()`; it spills to `folder`.

    It uses `cores` cores, or `threads()`.
    """
    settings: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": f"{memory_mb() if memory is None else memory // 1_000_000}MB",
        "threads": cores or threads(),
        "temp_directory": "" if folder is None else str(folder / "spilled"),
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "allow_community_extensions": False,
        # Memory that a query has freed is returned to the system at once: a ninth of the peak for a split of 480 MB.
        "allocator_flush_threshold": "1MB",
        "allocator_bulk_deallocation_flush_threshold": "1MB",
    }
    connection = duckdb.connect(config=settings)
    connection.execute("set enable_external_access = false; set lock_configuration = true")
    return connection


@cache
def _asked() -> duckdb.DuckDBPyConnection:
    # With one thread, numbers are summed in a fixed order. Nothing spills, because the tables are already in memory.
    return connected(memory=ASKED_BYTES, cores=1)


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
def database(output: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield an empty database for use while `output` is written; it spills to a temporary folder next to `output`.

    Raises DemixError that names `output` if memory or disk is not sufficient.
    """
    with scratch(output) as folder:
        try:
            with connected(folder) as connection:
                yield connection
        except (duckdb.OutOfMemoryException, duckdb.IOException) as error:
            said = str(error).partition("\n")[0]
            # Data that do not fit into memory go to the disk, until the disk is full.
            if isinstance(error, duckdb.IOException) or "offload" in said:
                full = isinstance(error, duckdb.OutOfMemoryException) or "No space left" in said
                raise OSError(errno.ENOSPC if full else errno.EIO, said) from error
            raise DemixError(output, f"needs more memory ({said})", "raise cluster.memory_mb") from None


def run_on(tables: duckdb.DuckDBPyConnection, query: str, batches: Iterable[pa.RecordBatch]) -> None:
    """Run `query`, in which the table `batches` stands for the rows of `batches`. Without a batch, it does not run.

    An error in reading a batch ends the query and keeps its type.
    """
    failed: list[BaseException] = []

    def noted() -> Iterator[pa.RecordBatch]:
        try:
            yield from batches
        except BaseException as error:
            failed.append(error)
            raise

    rest = noted()
    first = next(rest, None)
    if first is not None:
        tables.register("batches", pa.RecordBatchReader.from_batches(first.schema, chain([first], rest)))
        try:
            tables.execute(query)
        except duckdb.Error:
            if failed:
                raise failed[0] from None
            raise
        finally:
            tables.unregister("batches")
