"""Tokens of a split that were made elsewhere, as the token files that `demix.data.shards.tokenize` writes.

Of nanoGPT the files are flat uint16 (`.bin`), of OLMo-core flat uint16 or uint32 (`.npy`, in spite of the name without
NumPy's header); both end each document with one id. Files of `numpy.save` are read, too.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np

from demix.data.shards import kind_of, said_of, write_flat
from demix.data.tokenizer import Tokenizer, byte_lengths
from demix.errors import DemixError
from demix.files import scratch
from demix.progress import followed

# Tokens held in memory at once.
PIECE = 8 << 20
MAGIC = b"\x93NUMPY"


def add_tokens(files: Sequence[Path], tokenizer: Path, output: Path, kind: str | None = None) -> dict[str, int]:
    """Write the tokens in `files`, one after the other, as the shard `output` (`<split>.arrow`).

    `kind` is the type of the numbers in flat files, uint16 or uint32; by default that of the tokenizer's shards. The id
    that ends a document stands behind each document, or before each, as here. Returns the tokens, documents and bytes
    of text. Raises DemixError for a file that is no such numbers, for an id that the tokenizer does not have, and for
    files without the end of a document.
    """
    encoder = Tokenizer.load(tokenizer)
    end, lengths = encoder.end_of_text, byte_lengths(tokenizer)
    own, columns = kind_of(encoder), [_mapped(path, np.dtype(kind or kind_of(encoder))) for path in files]
    # A shard begins with the id, and ends with a document.
    filled = [column for column in columns if len(column)]
    ended = bool(filled) and filled[-1][-1] == end
    total = sum(map(len, filled)) - ended
    if not total:
        raise DemixError(", ".join(map(str, files)), "holds no tokens", "name files of tokens")
    head = [np.array([end], own)] if filled[0][0] != end else []
    digest, written, size, documents = hashlib.sha256(), 0, 0, 0
    with scratch(output) as folder:
        flat = {name: folder / name for name in ("token", "offset", "bytes", "origin")}
        with ExitStack() as stack:
            streams = {name: stack.enter_context(open(path, "wb")) for name, path in flat.items()}
            begun = 0
            pieces = followed(_pieces(files, columns, total, len(lengths)), f"{output.parent.name}: pieces of tokens")
            for ids in chain(head, pieces):
                tokens = ids.astype(own, copy=False)
                places = np.flatnonzero(tokens == end)
                sums = size + np.cumsum(lengths[tokens])
                # What lies between the ids of two ends is one document; the first id ends none.
                _append(streams["bytes"], np.diff(sums[places], prepend=begun)[0 if documents else 1 :])
                _append(streams["offset"], written + places)
                _append(streams["origin"], documents + np.arange(len(places)))
                _append(streams["token"], tokens)
                digest.update(tokens.data)
                begun = int(sums[places[-1]]) if len(places) else begun
                size, written, documents = int(sums[-1]), written + len(tokens), documents + len(places)
            _append(streams["bytes"], np.array([size - begun]))
        if documents == len(head) and not ended:
            cause = f"has no id {end}, which ends a document for {tokenizer}"
            raise DemixError(", ".join(map(str, files)), cause, "name the tokens' own tokenizer.json")
        counts = {"tokens": written, "documents": documents, "bytes": size}
        said = {**counts, "sha256": digest.hexdigest(), "tokenizer_sha256": encoder.sha256, **said_of(encoder)}
        write_flat(output, said, own, flat)
    return counts


def _append(stream: IO[bytes], values: np.ndarray) -> None:
    stream.write(np.ascontiguousarray(values).data)


def _mapped(path: Path, kind: np.dtype) -> np.ndarray:
    """The numbers of a file, memory-mapped."""
    try:
        with open(path, "rb") as stream:
            named = stream.read(len(MAGIC)) == MAGIC
        if named:
            found: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        elif path.stat().st_size % kind.itemsize:
            raise ValueError(f"{path.stat().st_size} bytes are no whole number of {kind}")
        else:
            found = np.memmap(path, kind, "r") if path.stat().st_size else np.empty(0, kind)
    except FileNotFoundError:
        raise DemixError(path, "is missing", "mend the path") from None
    except (ValueError, EOFError) as error:
        raise DemixError(path, f"holds no tokens ({error})", "give flat uint16 or uint32, and --dtype") from None
    if found.ndim != 1 or found.dtype.kind not in "ui":
        cause = f"holds {found.dtype} of shape {found.shape}"
        raise DemixError(path, cause, "give one row of whole numbers")
    return found


def _pieces(files: Sequence[Path], columns: Sequence[np.ndarray], total: int, types: int) -> Iterator[np.ndarray]:
    """The first `total` tokens in pieces. Raises DemixError for an id that is none of `types`."""
    left = total
    for path, column in zip(files, columns, strict=True):
        for start in range(0, min(len(column), left), PIECE):
            ids = column[start : start + min(PIECE, left - start)]
            if (wrong := (ids < 0) | (ids >= types)).any():
                place = int(wrong.argmax())
                cause = f"has id {int(ids[place])} at token {start + place + 1}, of {types} types"
                raise DemixError(path, cause, "name the tokens' own tokenizer.json, or give --dtype")
            yield ids
        left -= min(len(column), left)
