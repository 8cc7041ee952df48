"""Bootstrap intervals over documents: how much a number depends on the sample of scored documents.

Pieces of one document are drawn together (a cluster bootstrap): they are alike, and as many independent draws they
would make the intervals too narrow.
"""

import numpy as np

RESAMPLES = 2000
# With fewer documents a resample says too little about the variance between documents.
FEWEST = 20
_AT_ONCE = 1 << 21


def clustered(sums: np.ndarray, origins: np.ndarray) -> np.ndarray:
    """Sums [K, C] by document out of sums [K, D] by piece, documents in the order of their first pieces.

    Pieces are of one document where their numbers in `origins` [D] are equal.
    """
    _, first, of = np.unique(origins, return_index=True, return_inverse=True)
    whole = np.zeros((len(first), len(sums)), sums.dtype)
    np.add.at(whole, np.argsort(np.argsort(first))[of], sums.T)
    return whole.T


def resampled_sums(sums: np.ndarray, seed: int, resamples: int = RESAMPLES) -> np.ndarray:
    """Sums [K, R] over R resamples of D documents, drawn with replacement, of K quantities [K, D] given by document.

    All quantities share the resamples, so that differences are paired. A resample is how often each document was
    drawn, and its sums one matrix product for all quantities; `scipy.stats.bootstrap` would gather K times R times D
    values, and again for each pair.
    """
    documents = sums.shape[1]
    generator = np.random.default_rng(seed)
    drawn = []
    for start in range(0, resamples, max(1, _AT_ONCE // documents)):
        rows = min(resamples - start, max(1, _AT_ONCE // documents))
        places = generator.integers(documents, size=(rows, documents)) + documents * np.arange(rows)[:, None]
        counts = np.bincount(places.ravel(), minlength=rows * documents).reshape(rows, documents)
        drawn.append(sums @ counts.T.astype(np.float64))
    return np.concatenate(drawn, axis=1)


def bounds(values: np.ndarray) -> tuple[float, float]:
    """The 2.5% and 97.5% quantiles of resampled `values` [R], the bounds of the 95% interval."""
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
