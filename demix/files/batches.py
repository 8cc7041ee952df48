"""Parquet files read and written in batches of bounded size, so that no stage holds a whole domain in memory."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from demix.errors import DemixError
from demix.files import opened, parquet_reader, parquet_writer
from demix.progress import followed

T = TypeVar("T")

BATCH_ROWS = 4096
BATCH_BYTES = 8 << 20


def read_batches(
    path: str | Path, columns: list[str] | None = None, rows: int = BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """The record batches, of at most `rows` rows, of a Parquet file that an earlier stage wrote.

    The seal is checked first, page checksums while reading. Raises DemixError if the file is missing or damaged.
    """
    with parquet_reader(path) as file:
        # `write_rows` bounds the bytes of a row group. A number of rows would not bound the bytes of a batch.
        for group in range(file.num_row_groups):
            yield from file.iter_batches(batch_size=rows, row_groups=[group], columns=columns)


def regrouped(batches: Iterable[pa.RecordBatch], sizes: Iterable[int]) -> Iterator[pa.RecordBatch]:
    """The rows of `batches` in new batches with these `sizes`; the last may have fewer rows."""
    wanted = iter(sizes)
    size, parts, waiting = next(wanted), list[pa.RecordBatch](), 0
    for batch in batches:
        while batch.num_rows:
            parts.append(batch.slice(0, size - waiting))
            waiting += parts[-1].num_rows
            batch = batch.slice(parts[-1].num_rows)
            if waiting == size:
                yield pa.concat_batches(parts)
                size, parts, waiting = next(wanted, 0), [], 0
    if parts:
        yield pa.concat_batches(parts)


def counted(batches: Iterable[T], what: str, paths: Iterable[Path], size: Callable[[Any], int] = len) -> Iterator[T]:
    """Yield `batches`, which have the rows of the Parquet files `paths`, and show progress under the name `what`.

    `size` gives the number of rows in a batch. The total is the number of rows of all files.
    """
    total = None
    # The reader of a damaged file reports the damage.
    with suppress(pa.ArrowException, OSError, DemixError):
        rows = 0
        for path in paths:
            with opened(path) as file:
                rows += pq.read_metadata(file).num_rows
        total = rows
    return followed(batches, what, total, size)


def write_rows(
    path: str | Path,
    schema: pa.Schema,
    rows: Iterable[tuple[Any, ...]],
    *,
    private: bool = False,
    footer: Callable[[], dict[str, str]] = dict,
) -> int:
    """Write `rows` as sealed zstd Parquet with page checksums, completely or not at all; returns their number.

    With `private` only the owner can read the file, from its first byte on. `footer` is called after the last row and
    returns key-value metadata, which may depend on the rows.
    """
    total = 0
    with rows_writer(path, schema, private=private, footer=footer) as write:
        for row in rows:
            write(row)
            total += 1
    return total


@contextmanager
def rows_writer(
    path: str | Path,
    schema: pa.Schema,
    *,
    private: bool = False,
    footer: Callable[[], dict[str, str]] = dict,
) -> Iterator[Callable[[tuple[Any, ...]], None]]:
    """Yield a function that writes one row: like `write_rows`, for several files that are written at once."""
    pending, size = list[tuple[Any, ...]](), 0
    with parquet_writer(path, schema, private=private) as writer:

        def write_pending() -> None:
            nonlocal size
            columns = [
                pa.array(column, field.type) for column, field in zip(zip(*pending, strict=True), schema, strict=True)
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
            pending.clear()
            size = 0

        def write(row: tuple[Any, ...]) -> None:
            nonlocal size
            pending.append(row)
            size += sum(len(value) for value in row if isinstance(value, str))
            if len(pending) == BATCH_ROWS or size >= BATCH_BYTES:
                write_pending()

        yield write
        if pending:
            write_pending()
        writer.add_key_value_metadata(footer())


def write_batches(
    path: str | Path,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    *,
    footer: Callable[[], dict[str, str]] = dict,
    **options: Any,
) -> int:
    """Like `write_rows`, but for record batches. Each batch becomes one row group and should be of bounded size.

    `options` are options of pq.ParquetWriter.
    """
    with parquet_writer(path, schema, **options) as writer:
        total = 0
        for batch in batches:
            writer.write_batch(batch)
            total += batch.num_rows
        writer.add_key_value_metadata(footer())
    return total
