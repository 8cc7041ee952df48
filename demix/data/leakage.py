"""How much of held-out text and of task documents occurs in training text: 13-grams of words, by 64-bit hashes.

A held-out 13-gram needs 8 bytes of memory, and 8 more for the lookup table.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from demix.files.batches import read_batches, write_rows

LENGTH = 13
# Columns of the contamination table.
_COUNTS = ("documents", "long_documents", "found_documents", "ngrams", "found_ngrams")
SCHEMA = pa.schema([("task", pa.string()), ("domain", pa.string()), *((name, pa.int64()) for name in _COUNTS)])

_PIECE = 1 << 18
_PRIME = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(int(_PRIME), -1, 1 << 64))
_LENGTHS = np.array([(1 << 8 * length) - 1 for length in range(9)], np.uint64)


@dataclass(frozen=True)
class Grams:
    """A set of hashes of 13-grams: sorted, with a table of bits that quickly excludes most hashes not in the set."""

    hashes: np.ndarray = field(repr=False)
    table: np.ndarray = field(repr=False)

    @classmethod
    def of(cls, hashes: np.ndarray) -> "Grams":
        """The set of `hashes`, in any order."""
        hashes = np.unique(hashes)
        bits = min(max((8 * len(hashes)).bit_length(), 10), 27)
        table = np.zeros(1 << bits, bool)
        table[hashes >> np.uint64(64 - bits)] = True
        return cls(hashes, table)

    def found(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For the hashes that are in the set: their positions in `hashes`, and their positions in the set."""
        maybe = np.flatnonzero(self.table[hashes >> np.uint64(64 - (len(self.table).bit_length() - 1))])
        at = np.searchsorted(self.hashes, hashes[maybe])
        at[at == len(self.hashes)] = 0
        held = self.hashes[at] == hashes[maybe]
        return maybe[held], at[held]


def words_of(texts: pa.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The words of a column of texts: all their UTF-8 bytes, and for each word its length and the number of its text.

    The column has no nulls. Words are the parts that `str.split()` returns.
    """
    parts = pc.utf8_split_whitespace(texts)
    words, number = parts.flatten(), np.repeat(np.arange(len(texts)), pc.list_value_length(parts))
    lengths = pc.binary_length(words).to_numpy().astype(np.int64)
    # White space at the start or end of a text yields an empty word.
    kept = lengths > 0
    return np.frombuffer(words.buffers()[2] or b"", np.uint8)[: lengths.sum()], lengths[kept], number[kept]


def grams_of(texts: pa.Array) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The hashes (uint64) of all 13-grams of words of a column of texts and the number of the text that each is in.

    They are computed piece by piece. Words are distinguished by their length and their first 64 bytes.
    """
    data, lengths, number = words_of(texts)
    starts = np.cumsum(lengths) - lengths
    padded = np.concatenate([data, np.zeros(8, np.uint8)])
    eights = np.ndarray(len(data) + 1, "<u8", padded, strides=(1,))
    for begin in range(0, max(len(starts) - LENGTH + 1, 0), _PIECE):
        end = min(begin + _PIECE + LENGTH - 1, len(starts))
        words = _hashes(eights, starts[begin:end], lengths[begin:end])
        count = len(words) - LENGTH + 1
        # A polynomial of LENGTH words is a difference of two sums over all words, all modulo 2^64.
        sums = np.cumsum(np.concatenate([[np.uint64(0)], words * _powers(_INVERSE)[: len(words)]]))
        grams = _mixed((sums[LENGTH:] - sums[:-LENGTH]) * _powers(_PRIME)[LENGTH - 1 : len(words)])
        kept = number[begin : begin + count] == number[begin + LENGTH - 1 : end]
        yield grams[kept], number[begin : begin + count][kept]


@cache
def _powers(base: np.uint64) -> np.ndarray:
    """`base` to the power of 0, 1, … modulo 2^64, as many as words of a piece."""
    powers = np.full(_PIECE + LENGTH - 1, base, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


def _hashes(eights: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    hashes = lengths.astype(np.uint64)
    hashes = _mixed(hashes ^ (eights[starts] & _LENGTHS[np.minimum(lengths, 8)]))
    for byte in range(8, 64, 8):
        longer = np.flatnonzero(lengths > byte)
        if not len(longer):
            break
        part = eights[starts[longer] + byte] & _LENGTHS[np.minimum(lengths[longer] - byte, 8)]
        hashes[longer] = _mixed(hashes[longer] ^ part)
    return hashes


def _mixed(hashes: np.ndarray) -> np.ndarray:
    hashes = (hashes ^ (hashes >> np.uint64(32))) * _PRIME
    hashes ^= hashes >> np.uint64(29)
    return hashes


def gram_set(documents: list[Path]) -> Grams:
    """The 13-grams of the column `text` of Parquet files."""
    found = [np.empty(0, np.uint64)]
    for path in documents:
        for batch in read_batches(path, ["text"]):
            found += [np.unique(hashes) for hashes, _ in grams_of(batch.column(0))]
    return Grams.of(np.concatenate(found))


def shares(texts: pa.Array, grams: Grams) -> np.ndarray:
    """The share of each text's 13-grams that `grams` holds; 0 for a text without 13-grams."""
    total, found = np.zeros(len(texts), np.int64), np.zeros(len(texts), np.int64)
    for hashes, number in grams_of(texts):
        total += np.bincount(number, minlength=len(texts))
        found += np.bincount(number[grams.found(hashes)[0]], minlength=len(texts))
    return found / np.maximum(total, 1)


def seen_in(train: Path, grams: Grams) -> np.ndarray:
    """Whether the texts of the Parquet file `train` have each of `grams`, in the order of their hashes."""
    seen = np.zeros(len(grams.hashes), bool)
    for batch in read_batches(train, ["text"]):
        for hashes, _ in grams_of(batch.column(0)):
            # With sorted hashes, the search reads memory in order.
            seen[grams.found(np.sort(hashes))[1]] = True
    return seen


def leaked(train: Path, held_out: dict[str, Path]) -> dict[str, float | int]:
    """For each held-out split, the share of its distinct 13-grams that also occur in `train`."""
    sets = {name: gram_set([path]) for name, path in held_out.items()}
    both = Grams.of(np.concatenate([grams.hashes for grams in sets.values()]))
    seen = seen_in(train, both)
    found = {name: seen[np.searchsorted(both.hashes, grams.hashes)] for name, grams in sets.items()}
    return {"length": LENGTH, **{name: round(float(one.mean()), 6) if len(one) else 0.0 for name, one in found.items()}}


def contamination(documents: Path, train: Path, output: Path) -> None:
    """Write, for each task, how many of its documents and of its 13-grams occur in the Parquet file `train`.

    `train` is corpus/<domain>/train.parquet. `documents` has a row for each text of a document, with the columns task,
    document and text. Rows of the output: task, domain, documents, long_documents (those with a 13-gram),
    found_documents (those with a 13-gram that also occurs in the training text), ngrams (distinct ones), found_ngrams.
    One 13-gram contaminates a document, as in Brown et al. 2020, appendix C.
    """
    # The number of each document, and the hashes of its 13-grams.
    numbers: dict[tuple[str, int], int] = {}
    owners, hashes = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    for batch in read_batches(documents, ["task", "document", "text"]):
        keys = zip(batch.column("task").to_pylist(), batch.column("document").to_pylist(), strict=True)
        own = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
        for found, text in grams_of(batch.column("text")):
            hashes.append(found)
            owners.append(own[text])
    tasks = list(dict.fromkeys(task for task, _ in numbers))
    task_of = np.array([tasks.index(task) for task, _ in numbers], np.int64)
    grams = Grams.of(np.concatenate(hashes))
    # Each document with each of its 13-grams, by their numbers.
    owner, place = np.concatenate(owners), np.searchsorted(grams.hashes, np.concatenate(hashes))
    held, width = seen_in(train, grams)[place], max(len(grams.hashes), 1)

    def by_task(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """By task, the documents and the distinct 13-grams among the chosen pairs."""
        of_task = task_of[np.unique(owner[chosen])]
        pairs = np.unique(task_of[owner[chosen]] * width + place[chosen])
        return np.bincount(of_task, minlength=len(tasks)), np.bincount(pairs // width, minlength=len(tasks))

    counts = [np.bincount(task_of, minlength=len(tasks)), *by_task(np.ones(len(owner), bool)), *by_task(held)]
    rows = [
        (task, train.parent.name, int(every), int(long), int(found), int(ngrams), int(found_ngrams))
        for task, every, long, ngrams, found, found_ngrams in zip(tasks, *counts, strict=True)
    ]
    write_rows(output, SCHEMA, rows)
