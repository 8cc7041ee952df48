"""Bootstrap intervals: how much a number depends on the sample of scored text.

What is drawn is whole documents. Pieces of one document are drawn together (a cluster bootstrap): they are alike, and
as many independent draws they would make the intervals too narrow. With fewer than `FEWEST` documents a resample says
too little about the variance between them; there blocks of the scored text are drawn, wherever they begin and end, and
the interval is one within these documents.
"""

import math

import numpy as np

RESAMPLES = 2000
# The fewest documents to draw, and the fewest blocks of a text where there are fewer documents.
FEWEST = 20
# A text of fewer tokens has fewer than FEWEST blocks.
MIN_TOKENS = FEWEST**2
# Blocks may begin at every stretch, and have so many: blocks that overlap make steadier intervals than blocks side by
# side.
STRETCHES = 4
_AT_ONCE = 1 << 21


def stretch_tokens(tokens: int) -> int:
    """How many tokens a stretch has: a block, of `STRETCHES` stretches, has about √N of the text's N `tokens`.

    In longer texts blocks are longer, so that they hold what depends on each other, and more numerous.
    The length does not depend on losses: what is compared is resampled alike.
    """
    return max(1, round(math.sqrt(tokens) / STRETCHES))


def block_tokens(documents: int, tokens: int) -> int:
    """The tokens of a block where blocks are drawn; 0 where whole documents are drawn, or the text is too short."""
    return STRETCHES * stretch_tokens(tokens) if documents < FEWEST and tokens >= MIN_TOKENS else 0


def resampled(sums: np.ndarray, origins: np.ndarray, by_stretch: np.ndarray, seed: int) -> np.ndarray | None:
    """Sums [K, R] over resamples of a text of K quantities, the first of which are tokens; None for too short a text.

    `sums` [K, D] are by piece, pieces of one document having the same number in `origins` [D], and `by_stretch` [K, S]
    by stretch of the whole text. All quantities share the resamples, so that differences are paired.
    """
    whole = clustered(sums, origins)
    if whole.shape[1] >= FEWEST:
        return resampled_sums(whole, seed)
    return resampled_blocks(by_stretch, seed) if sums[0].sum() >= MIN_TOKENS else None


def resampled_blocks(by_stretch: np.ndarray, seed: int, resamples: int = RESAMPLES) -> np.ndarray:
    """Sums [K, R] over R resamples of blocks, each `STRETCHES` consecutive stretches of S, as many as fill the text.

    A moving-block bootstrap (Kuensch 1989), in which the text's end is followed by its begin (Politis and Romano 1992):
    every token is in as many blocks.
    """
    blocks = np.sum([np.roll(by_stretch, -number, axis=1) for number in range(STRETCHES)], axis=0)
    return resampled_sums(blocks, seed, resamples, draws=-(-by_stretch.shape[1] // STRETCHES))


def clustered(sums: np.ndarray, origins: np.ndarray) -> np.ndarray:
    """Sums [K, C] by document out of sums [K, D] by piece, documents in the order of their first pieces.

    Pieces are of one document where their numbers in `origins` [D] are equal.
    """
    _, first, of = np.unique(origins, return_index=True, return_inverse=True)
    whole = np.zeros((len(first), len(sums)), sums.dtype)
    np.add.at(whole, np.argsort(np.argsort(first))[of], sums.T)
    return whole.T


def resampled_sums(sums: np.ndarray, seed: int, resamples: int = RESAMPLES, draws: int | None = None) -> np.ndarray:
    """Sums [K, R] over R resamples of D documents, drawn with replacement, of K quantities [K, D] given by document.

    A resample has `draws` of them, by default D. All quantities share the resamples, so that differences are paired. A
    resample is how often each document was drawn, and its sums one matrix product for all quantities;
    `scipy.stats.bootstrap` would gather K times R times D values, and again for each pair.
    """
    documents = sums.shape[1]
    generator = np.random.default_rng(seed)
    drawn = []
    for start in range(0, resamples, max(1, _AT_ONCE // documents)):
        rows = min(resamples - start, max(1, _AT_ONCE // documents))
        places = generator.integers(documents, size=(rows, draws or documents)) + documents * np.arange(rows)[:, None]
        counts = np.bincount(places.ravel(), minlength=rows * documents).reshape(rows, documents)
        drawn.append(sums @ counts.T.astype(np.float64))
    return np.concatenate(drawn, axis=1)


def bounds(values: np.ndarray) -> tuple[float, float]:
    """The 2.5% and 97.5% quantiles of resampled `values` [R], the bounds of the 95% interval."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
