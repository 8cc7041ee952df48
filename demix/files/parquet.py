"""Parquet files with page checksums and a seal over all bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from demix.errors import DemixError
from demix.files.atomic import REMAKE, replacing
from demix.files.json_files import read_json, read_json_lines
from demix.files.places import PLACE, place_of, refuse_misplaced
from demix.files.seals import BLANK, KEY, check_parquet, seal_parquet


def write_parquet(table: pa.Table, path: str | Path, **options: Any) -> None:
    """Write `table` as sealed zstd Parquet, so that reading finds any flipped bit."""
    with parquet_writer(path, table.schema) as writer:
        writer.write_table(table, **options)


@contextmanager
def parquet_writer(
    path: str | Path, schema: pa.Schema, *, private: bool = False, at: Path | None = None, **options: Any
) -> Iterator[pq.ParquetWriter]:
    """Yield a writer of zstd Parquet with page checksums; the file appears sealed and complete, or not at all.

    With `private` only the owner can read the file, from its first byte on. `at` is the path to which the file is going
    to be renamed. `options` are those of pq.ParquetWriter.
    """
    with replacing(path) as temporary:
        temporary.touch(0o600 if private else 0o666)
        with pq.ParquetWriter(temporary, schema, compression="zstd", write_page_checksum=True, **options) as writer:
            yield writer
            place = place_of(at or path)
            writer.add_key_value_metadata({KEY: BLANK} | ({} if place is None else {PLACE: place}))
        seal_parquet(temporary)


def read_parquet(path: str | Path, columns: list[str] | None = None) -> pa.Table:
    """The table in `path`, with seal and page checksums checked."""
    with parquet_reader(path) as file:
        return file.read(columns=columns)


@contextmanager
def parquet_reader(path: str | Path) -> Iterator[pq.ParquetFile]:
    """Yield a Parquet file that an earlier stage made, with its seal and its place checked.

    Page checksums are checked while the file is read. Raises DemixError if the file is missing, misplaced or damaged,
    also when the damage shows only inside the `with` block.
    """
    try:
        check_parquet(path)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            said = (file.metadata.metadata or {}).get(PLACE.encode())
            refuse_misplaced(path, said and said.decode())
            yield file
    except FileNotFoundError:
        raise DemixError(path, "is missing", "run the stage that makes it") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DemixError(path, f"is damaged ({error})", REMAKE) from None


def check_sealed(path: Path) -> None:
    """Raise DemixError if a sealed Parquet, JSON or JSON lines file is not as it was written.

    Files of other types pass unchecked.
    """
    match path.suffix:
        case ".parquet":
            with parquet_reader(path):
                pass
        case ".json":
            read_json(path)
        case ".jsonl":
            read_json_lines(path)
