"""Parquet files with page checksums and a seal over all bytes, so that any flipped bit or missing end is detected.

Parquet's page checksums do not cover page headers and the footer. The key-value metadata of a sealed file therefore
hold the sha256 of all other bytes of the file; other readers ignore this entry. A file written by other software has no
seal and is accepted unchecked.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from demix.errors import DemixError
from demix.files.atomic import REMAKE, replacing
from demix.files.digests import opened
from demix.files.json_files import read_json, read_json_lines


def write_parquet(table: pa.Table, path: str | Path, **options: Any) -> None:
    """Write `table` as sealed zstd Parquet, so that reading detects any flipped bit."""
    with parquet_writer(path, table.schema) as writer:
        writer.write_table(table, **options)


@contextmanager
def parquet_writer(
    path: str | Path, schema: pa.Schema, *, private: bool = False, **options: Any
) -> Iterator[pq.ParquetWriter]:
    """Yield a writer of zstd Parquet with page checksums; the file appears sealed and complete, or not at all.

    With `private` only the owner can read the file, from its first byte on. `options` are options of pq.ParquetWriter.
    """
    with replacing(path) as temporary:
        temporary.touch(0o600 if private else 0o666)
        with pq.ParquetWriter(temporary, schema, compression="zstd", write_page_checksum=True, **options) as writer:
            yield writer
            writer.add_key_value_metadata({KEY: BLANK})
        seal_parquet(temporary)


def read_parquet(path: str | Path, columns: list[str] | None = None) -> pa.Table:
    """The table in `path`, with seal and page checksums checked."""
    with parquet_reader(path) as file:
        return file.read(columns=columns)


@contextmanager
def parquet_reader(path: str | Path) -> Iterator[pq.ParquetFile]:
    """Yield a Parquet file that an earlier stage wrote, with its seal checked.

    Page checksums are checked while the file is read. Raises DemixError if the file is missing or damaged, even if the
    damage is found only inside the `with` block.
    """
    try:
        check_parquet(path)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except FileNotFoundError:
        raise DemixError(path, "is missing", "run the stage that makes it") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DemixError(path, f"is damaged ({error})", REMAKE) from None


def check_sealed(path: Path) -> None:
    """Raise DemixError if a sealed Parquet, JSON or JSON lines file is not as it was written.

    Files of other types are not checked.
    """
    match path.suffix:
        case ".parquet":
            with parquet_reader(path):
                pass
        case ".json":
            read_json(path)
        case ".jsonl":
            read_json_lines(path)


# The footer holds the key, then two bytes that start a string of 64 bytes in Thrift's compact protocol, then the digest
# in hexadecimal.
KEY = "demix~digest~"
BLANK = "0" * 64
_MARK = KEY.encode() + b"\x18\x40"
# A single flipped bit in the key leaves one of the two halves intact.
_HALVES = (KEY[:6].encode(), KEY[6:].encode())
_PIECE = 4 << 20


def seal_parquet(path: Path) -> None:
    """Fill in the digest of a Parquet file whose key-value metadata map `KEY` to `BLANK`."""
    place = _place(path)
    if place is None:
        raise RuntimeError(f"{path}: its metadata have no entry for the digest")
    with open(path, "r+b") as stream:
        stream.seek(place)
        stream.write(_digest(path, place))


def check_parquet(path: str | Path) -> None:
    """Raise ValueError if a sealed Parquet file is not as it was written.

    A process checks an unchanged file only once.
    """
    found = Path(path).stat()
    _check(str(path), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@lru_cache(maxsize=1 << 16)
def _check(path: str, *_: int) -> None:
    place = _place(Path(path))
    if place is None:
        return
    with open(path, "rb") as stream:
        stream.seek(place)
        recorded = stream.read(len(BLANK))
    if recorded != _digest(Path(path), place):
        raise ValueError("its bytes changed: they do not match the digest that was written with them")


def _place(path: Path) -> int | None:
    """The offset of the digest in a Parquet file; None if the file has no seal.

    Raises ValueError if the footer is damaged, and DemixError for a pipe, which would block.
    """
    with opened(path) as stream:
        size = stream.seek(0, 2)
        stream.seek(max(size - 8, 0))
        end = stream.read()
        start = size - 8 - int.from_bytes(end[:4], "little")
        if len(end) < 8 or end[4:] != b"PAR1" or start < 4:
            raise ValueError("it is not a Parquet file, or it is cut short")
        stream.seek(start)
        footer = stream.read(size - 8 - start)
    at = footer.rfind(_MARK)
    if at < 0:
        # Only keys are searched, because the footer's statistics contain texts of the file.
        keys = pq.read_metadata(path).metadata or {}
        if any(half in key for key in keys for half in _HALVES):
            raise ValueError("its bytes changed: the digest that was written with them is damaged")
        return None
    return start + at + len(_MARK)


def _digest(path: Path, place: int) -> bytes:
    """The digest of a file, computed as if `BLANK` were at the offset `place`."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while piece := stream.read(min(_PIECE, place - stream.tell())):
            digest.update(piece)
        stream.seek(len(BLANK), 1)
        digest.update(BLANK.encode())
        while piece := stream.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest().encode()
