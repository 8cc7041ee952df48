"""The seal of a Parquet file: a flipped bit or a missing end is found whatever byte it hits.

Parquet's page checksums leave out page headers and footer. A sealed file holds the sha256 of its own other bytes in its
key-value metadata, where other readers do not look. A file of other software has no seal and is accepted unchecked.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import pyarrow.parquet as pq

# A key-value pair of the footer, as Thrift's compact protocol writes it: the digest follows, 64 hexadecimal digits.
KEY = "demix~digest~"
BLANK = "0" * 64
_MARK = KEY.encode() + b"\x18\x40"
# A single flipped bit in the key leaves one of the two halves intact.
_HALVES = (KEY[:6].encode(), KEY[6:].encode())
_PIECE = 4 << 20


def seal_parquet(path: Path) -> None:
    """Fill in the digest of a Parquet file whose key-value metadata has the key `KEY` with the value `BLANK`."""
    place = _place(path)
    if place is None:
        raise RuntimeError(f"{path}: has no place for its digest")
    with open(path, "r+b") as stream:
        stream.seek(place)
        stream.write(_digest(path, place))


def check_parquet(path: str | Path) -> None:
    """Raise ValueError where a sealed Parquet file is not as it was written. A process reads each file once for it."""
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
        raise ValueError("its bytes changed: they do not have the digest that was written with them")


def _place(path: Path) -> int | None:
    """Where the digest of a Parquet file begins; None if it has none. ValueError where the footer is damaged."""
    with open(path, "rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(size - 8, 0))
        end = stream.read()
        start = size - 8 - int.from_bytes(end[:4], "little")
        if len(end) < 8 or end[4:] != b"PAR1" or start < 4:
            raise ValueError("it is no Parquet file, or cut short")
        stream.seek(start)
        footer = stream.read(size - 8 - start)
    at = footer.rfind(_MARK)
    if at < 0:
        # Not looked for in the whole footer, which quotes the texts of the file.
        keys = pq.read_metadata(path).metadata or {}
        if any(half in key for key in keys for half in _HALVES):
            raise ValueError("its bytes changed: the digest that was written with them is damaged")
        return None
    return start + at + len(_MARK)


def _digest(path: Path, place: int) -> bytes:
    """The digest of a file whose bytes from `place` on are taken to be `BLANK`."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for piece in _pieces(stream, place):
            digest.update(piece)
        stream.seek(len(BLANK), 1)
        digest.update(BLANK.encode())
        for piece in _pieces(stream, None):
            digest.update(piece)
    return digest.hexdigest().encode()


def _pieces(stream: BinaryIO, count: int | None) -> Iterator[bytes]:
    """The next `count` bytes of a stream, or all that are left, in pieces."""
    while piece := stream.read(_PIECE if count is None else min(_PIECE, count)):
        count = None if count is None else count - len(piece)
        yield piece
