"""Parquet files of documents, and the ids of documents as bytes and as text."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from demix.files.batches import read_batches


def document_batches(paths: Iterable[Path], columns: list[str]) -> Iterator[pa.RecordBatch]:
    for path in paths:
        yield from read_batches(path, columns)


def document_count(paths: Iterable[Path]) -> int:
    return sum(batch.num_rows for batch in document_batches(paths, ["n_words"]))


def as_bytes(ids: pa.Array) -> np.ndarray:
    """Hexadecimal ids as 32 bytes each."""
    _, offsets, data = ids.buffers()
    edges = np.frombuffer(offsets, np.int32)[ids.offset : ids.offset + len(ids) + 1]
    return np.frombuffer(bytes.fromhex(data[edges[0] : edges[-1]].to_pybytes().decode()), "S32")


def as_hexadecimal(hashes: np.ndarray) -> pa.Array:
    data = np.ascontiguousarray(hashes).tobytes().hex().encode()
    edges = np.arange(len(hashes) + 1, dtype=np.int32) * 64
    return pa.StringArray.from_buffers(len(hashes), pa.py_buffer(edges), pa.py_buffer(data))


def digest_of(*parts: object) -> bytes:
    return hashlib.sha256("|".join(map(str, parts)).encode()).digest()
