"""Columns of text as the bytes that they are: words found without a Python string.

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
