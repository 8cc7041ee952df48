"""Rows of fixed size sorted and looked up through files, so that memory does not grow with their number.

A row is a numpy record whose field `hash` (32 bytes) decides its bucket; a bucket fits into memory.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

# Most rows of a bucket, until there are as many buckets as files that a process may hold open.
BUCKET_ROWS = 1_000_000
MOST_BUCKETS = 256


def bucket_count(rows: int) -> int:
    """How many buckets `rows` rows take."""
    return min(max(-(-rows // BUCKET_ROWS), 1), MOST_BUCKETS)


def place(hashes: np.ndarray, count: int) -> np.ndarray:
    """The bucket (int64) of each hash: all of a bucket sort before all of the next."""
    first = np.ascontiguousarray(hashes).view(np.uint8).reshape(-1, 32)[:, :4].copy().view(">u4").ravel()
    return (first.astype(np.int64) * count) >> 32


@contextmanager
def scattering(folder: Path, name: str, count: int) -> Iterator[Callable[[np.ndarray, np.ndarray], None]]:
    """Yield a function that appends rows to the files of their buckets, given each row's bucket."""
    with ExitStack() as stack:
        files = [stack.enter_context(open(folder / f"{name}.{bucket}", "wb")) for bucket in range(count)]

        def scatter(rows: np.ndarray, buckets: np.ndarray) -> None:
            order = np.argsort(buckets, kind="stable")
            rows, edges = rows[order], np.searchsorted(buckets[order], np.arange(count + 1))
            for bucket in np.flatnonzero(np.diff(edges)).tolist():
                files[bucket].write(rows[edges[bucket] : edges[bucket + 1]].tobytes())

        yield scatter


def gathered(folder: Path, name: str, count: int, kind: np.dtype) -> Iterator[np.ndarray]:
    """The rows of one bucket after the other, each in the order in which they were written."""
    for bucket in range(count):
        yield np.fromfile(folder / f"{name}.{bucket}", kind)


def order_of(hashes: np.ndarray) -> np.ndarray:
    """A stable argsort of 32-byte hashes, by their first eight bytes where these decide it."""
    first = np.ascontiguousarray(hashes).view(np.uint8).reshape(-1, 32)[:, :8].copy().view(">u8").ravel()
    order = np.argsort(first.astype(np.uint64), kind="stable")
    ordered = hashes[order]
    return order if (ordered[1:] >= ordered[:-1]).all() else np.argsort(hashes, kind="stable")
