"""Bootstrap intervals: how much a number depends on the sample of scored text.

Whole documents are drawn. Chunks of one document are drawn together (a cluster bootstrap), because they are similar:
drawn independently, they would make the intervals too narrow. With fewer than `FEWEST` documents a resample says too
little about the variance between documents. Then blocks of the scored text are drawn, with any start, and the interval
holds only for these documents.
"""

import math

import numpy as np

RESAMPLES = 2000
# The minimum number of documents to draw, and of blocks of a text if there are fewer documents.
FEWEST = 20
# A text of fewer tokens has fewer than FEWEST blocks.
MIN_TOKENS = FEWEST**2
# Blocks consist of this many stretches (short sections of text) and may begin at each of them. Overlapping blocks yield
# more stable intervals than disjoint ones.
STRETCHES = 4
_AT_ONCE = 1 << 21


def stretch_tokens(tokens: int) -> int:
    """The number of tokens of a stretch: a block of `STRETCHES` stretches has about √N of the text's N `tokens`.

    In longer texts, blocks are longer (so that dependent tokens are in one block) and more numerous. The length does
    not depend on losses, so compared systems are resampled in the same way.
    """
    return max(1, round(math.sqrt(tokens) / STRETCHES))


def block_tokens(documents: int, tokens: int) -> int:
    """The tokens of a block if blocks are drawn; 0 if whole documents are drawn, or the text is too short."""
    return STRETCHES * stretch_tokens(tokens) if documents < FEWEST and tokens >= MIN_TOKENS else 0


def resampled(sums: np.ndarray, origins: np.ndarray, by_stretch: np.ndarray, seed: int) -> np.ndarray | None:
    """Sums [K, R] of K quantities (the first is the number of tokens) over R resamples; None if the text is too short.

    `sums` [K, D] are by chunk; chunks of one document have the same number in `origins` [D]. `by_stretch` [K, S] are by
    stretch of the whole text. All quantities use the same resamples, so that differences are paired.
    """
    whole = clustered(sums, origins)
    if whole.shape[1] >= FEWEST:
        return resampled_sums(whole, seed)
    return resampled_blocks(by_stretch, seed) if sums[0].sum() >= MIN_TOKENS else None


def resampled_blocks(by_stretch: np.ndarray, seed: int, resamples: int = RESAMPLES) -> np.ndarray:
    """Sums [K, R] over R resamples, each of as many blocks of `STRETCHES` consecutive stretches as fill the text.

    This is a moving-block bootstrap (Kuensch 1989) on a circular text: its end is followed by its beginning (Politis
    and Romano 1992), so every token is in the same number of blocks.
    """
    blocks = np.sum([np.roll(by_stretch, -number, axis=1) for number in range(STRETCHES)], axis=0)
    return resampled_sums(blocks, seed, resamples, draws=-(-by_stretch.shape[1] // STRETCHES))


def clustered(sums: np.ndarray, origins: np.ndarray) -> np.ndarray:
    """Sums [K, C] by document from sums [K, D] by chunk; documents are in the order of their first chunks.

    Chunks with equal numbers in `origins` [D] belong to one document.
    """
    _, first, of = np.unique(origins, return_index=True, return_inverse=True)
    whole = np.zeros((len(first), len(sums)), sums.dtype)
    np.add.at(whole, np.argsort(np.argsort(first))[of], sums.T)
    return whole.T


def resampled_sums(sums: np.ndarray, seed: int, resamples: int = RESAMPLES, draws: int | None = None) -> np.ndarray:
    """Sums [K, R] of K quantities [K, D] over R resamples of D documents, drawn with replacement.

    A resample has `draws` documents, by default D. All quantities use the same resamples, so that differences are
    paired. A resample is stored as the number of draws of each document, and one product yields all sums.
    `scipy.stats.bootstrap` would gather K times R times D values, and again for each pair.
    """
    documents = sums.shape[1]
    generator = np.random.default_rng(seed)
    drawn = []
    for start in range(0, resamples, max(1, _AT_ONCE // documents)):
        rows = min(resamples - start, max(1, _AT_ONCE // documents))
        places = generator.integers(documents, size=(rows, draws or documents)) + documents * np.arange(rows)[:, None]
        counts = np.bincount(places.ravel(), minlength=rows * documents).reshape(rows, documents)
        # With the threads of a matrix product, the last bits would depend on their number.
        drawn.append(np.einsum("kd,rd->kr", sums, counts.astype(np.float64)))
    return np.concatenate(drawn, axis=1)


def bounds(values: np.ndarray) -> tuple[float, float]:
    """The 2.5% and 97.5% quantiles of resampled `values` [R], the bounds of the 95% interval."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
