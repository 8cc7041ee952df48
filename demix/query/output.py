"""The rows of a query as text for people or programs, or as Parquet."""

import csv
import itertools
import json
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa

from demix.errors import DemixError
from demix.files import parquet_writer, replacing
from demix.files.json_files import without_nan

if TYPE_CHECKING:
    from rich.console import Console

FORMATS = {"table": "", "csv": ".csv", "json": ".json", "markdown": ".md", "parquet": ".parquet"}
# The most rows of an answer, and characters of a cell, that a terminal shows.
MAX_ROWS = 100
MAX_CHARACTERS = 100
_CONTROLS = str.maketrans({"\n": "\\n", "\r": "\\r", "\t": "\\t"})

Row = tuple[Any, ...]


def format_of(name: str | None, output: Path | None) -> str:
    """The requested format; by default the one of the output's suffix, or else `table`."""
    suffix = output.suffix if output else None
    chosen = name or next((known for known, ending in FORMATS.items() if ending == suffix), "table")
    if chosen not in FORMATS:
        raise DemixError(f"--format {chosen:.40}", "is not known", f"use {', '.join(FORMATS)}")
    return chosen


def write_file(reader: pa.RecordBatchReader, form: str, path: Path) -> None:
    """Write all rows to a file, completely or not at all; Parquet gets a checksum."""
    if form == "parquet":
        with parquet_writer(path, reader.schema) as writer:
            for batch in reader:
                writer.write_batch(batch)
        return
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as stream:
        write_text(reader, form, stream)


def write_text(reader: pa.RecordBatchReader, form: str, stream: IO[str]) -> None:
    """Write all rows as CSV, JSON (a list of objects, null for NaN) or a table in Markdown."""
    names, rows = distinct(reader.schema.names), _rows(reader)
    if form == "csv":
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(names)
        writer.writerows(rows)
    elif form == "json":
        before = "["
        for row in rows:
            value = without_nan(dict(zip(names, map(_plain, row), strict=True)))
            stream.write(f"{before}\n{json.dumps(value, ensure_ascii=False, default=str)}")
            before = ","
        stream.write("[]\n" if before == "[" else "\n]\n")
    else:
        ends = ("---:" if _is_number(field.type) else "---" for field in reader.schema)
        for cells in itertools.chain([names, [*ends]], ([_cell(value) for value in row] for row in rows)):
            stream.write(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n")


def show(reader: pa.RecordBatchReader, console: "Console") -> None:
    """Print rows as a table, in a terminal only the first ones. Rows too wide for a table are printed line by line."""
    from rich.table import Table

    most = MAX_ROWS if console.is_terminal else None
    first = [*itertools.islice(_rows(reader), most and most + 1)]
    rows = [[_short(_cell(value)) for value in row] for row in first[:most]]
    names, wide = reader.schema.names, max(map(len, reader.schema.names), default=0)
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    if sum(widths) + 3 * len(widths) <= console.width or len(names) <= console.width // 12:
        table = Table()
        for field in reader.schema:
            table.add_column(field.name, justify="right" if _is_number(field.type) else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:
        for number, row in enumerate(rows, start=1):
            console.print(f"row {number}", style="bold")
            for name, cell in zip(names, row, strict=True):
                console.print(f"  {name:{wide}}  {cell}")
    if most and len(first) > most:
        console.print(f"Only the first {most} rows are shown; to see others use limit, sums or --output FILE.")
    else:
        console.print(f"{len(rows):,} row{'' if len(rows) == 1 else 's'}")


def _rows(reader: pa.RecordBatchReader) -> Iterator[Row]:
    for batch in reader:
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def distinct(names: list[str]) -> list[str]:
    """Names of columns; a repeated name gets a number, since an object has each key once."""
    return [name if name not in names[:n] else f"{name}_{names[:n].count(name)}" for n, name in enumerate(names)]


def _is_number(kind: pa.DataType) -> bool:
    return any(is_kind(kind) for is_kind in (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal))


def _plain(value: Any) -> Any:
    """A value for JSON: DuckDB returns sums of whole numbers as decimals."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else str(value)
    return str(value).translate(_CONTROLS)


def _short(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1]}…"
