"""Columns of text as the bytes that they are: words counted and hashed, texts cut, without a Python string.

A column is an Arrow `large_string` array without nulls.
"""

import re

import numpy as np
import pyarrow as pa

SURROGATE = re.compile("[\ud800-\udfff]")
# What `str.split` parts words by beyond ASCII: two bytes and three bytes of UTF-8, as numbers.
_OTHER_SPACE = [
    int.from_bytes(character.encode(), "big")
    for character in "\u0085\u00a0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
]


def buffers(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """The UTF-8 bytes (uint8) of a column and where each text starts in them (int64, one more than texts)."""
    if not len(texts):
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    _, offsets, data = texts.buffers()
    edges = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    whole = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return whole[edges[0] : edges[-1]], edges - edges[0]


def from_buffers(data: bytes | np.ndarray, edges: np.ndarray) -> pa.Array:
    """The column whose bytes and starts these are."""
    return pa.LargeStringArray.from_buffers(len(edges) - 1, pa.py_buffer(edges.astype(np.int64)), pa.py_buffer(data))


def word_starts(texts: pa.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Bytes, the first byte of each word and the one after its last, and the first word of each text (one more).

    Words are those of `str.split()`.
    """
    data, edges = buffers(texts)
    # 9 to 13, 28 to 32; all numbers are uint8 and wrap around.
    word = (data - np.uint8(9) >= 5) & (data - np.uint8(28) >= 5)
    lead = np.flatnonzero(data >= 0xC2)
    lead = lead[(data[lead] == 0xC2) | (data[lead] - np.uint8(0xE1) < 3)]
    if len(lead):
        code = data[lead].astype(np.int32) << 8 | data[lead + 1]
        wide = lead[data[lead] > 0xC2]
        code[data[lead] > 0xC2] = code[data[lead] > 0xC2] << 8 | data[wide + 2]
        found = lead[np.isin(code, _OTHER_SPACE, kind="sort")]
        for byte in range(3):
            word[found[data[found] > 0xC2] + byte] = False
            word[found + min(byte, 1)] = False
    # A text ends its last word also where the next text begins with a word.
    inner = edges[1:-1]
    inner = inner[(inner > 0) & (inner < len(data))]
    first, last = word.copy(), word.copy()
    first[1:] &= ~word[:-1]
    first[inner] = word[inner]
    last[:-1] &= ~word[1:]
    last[inner - 1] = word[inner - 1]
    starts = np.flatnonzero(first)
    return data, starts, np.flatnonzero(last) + 1, np.searchsorted(starts, edges)


def count_words(texts: pa.Array) -> np.ndarray:
    """The number (int64) of words of each text, as `len(text.split())`."""
    return np.diff(word_starts(texts)[3])


def cut(texts: pa.Array, words: int) -> tuple[pa.Array, np.ndarray]:
    """The column with texts of more than `words` words cut before every `words`-th one, and each piece's text (int64).

    The pieces of a text, joined, give the text again.
    """
    data, starts, _, first = word_starts(texts)
    _, edges = buffers(texts)
    number = np.arange(len(starts)) - np.repeat(first[:-1], np.diff(first))
    cuts = starts[(number > 0) & (number % words == 0)]
    # A cut lies inside its text, behind a word, so that an empty text keeps its place.
    of = np.searchsorted(edges, cuts, side="right") - 1
    order = np.argsort(np.concatenate([np.arange(len(texts)), of]), kind="stable")
    begins = np.concatenate([edges[:-1], cuts])[order]
    return from_buffers(data, np.append(begins, edges[-1])), np.concatenate([np.arange(len(texts)), of])[order]
