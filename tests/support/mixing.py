"""Random score tables, and mixtures computed one token at a time."""

import math

import numpy as np
from hypothesis import strategies as st


def normalised(logs: list[float]) -> list[float]:
    top = max(logs)
    total = top + math.log(math.fsum(math.exp(value - top) for value in logs))
    return [value - total for value in logs]


@st.composite
def tables(draw, scales=(0.1, 3.0, 400.0)):
    """Random score tables, some with gaps between experts of over 700 nats a block; the last block may be short."""
    experts = draw(st.integers(1, 5))
    length = draw(st.integers(1, 7))
    full, last = draw(st.integers(0, 5)), draw(st.integers(1, length))
    scale = draw(st.sampled_from(scales))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = -generator.exponential(scale, (full * length + last, experts))
    padded = np.zeros(((full + 1) * length, experts))
    padded[: len(rows)] = rows
    mask = np.arange(len(padded)) < len(rows)
    return padded.reshape(full + 1, length, experts), mask.reshape(full + 1, length)


def as_blocks(scores: np.ndarray, mask: np.ndarray) -> list:
    return [
        [row.tolist() for row, real in zip(block, kept, strict=True) if real]
        for block, kept in zip(scores, mask, strict=True)
    ]
