"""Embeddings of texts: tf-idf, reduced by a truncated SVD, for whole documents and for every prefix of a text.

Sources: Gururangan et al. 2023, section 3.2. scikit-learn fits an embedding; to use one needs only numpy and scipy.
"""

import codecs
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.sparse import csr_array

from demix.errors import DemixError

NUMBER = "#NUMBER"
# scikit-learn's own `(?u)\b\w\w+\b`, whose words are the same.
_WORD = re.compile(r"\w\w+")
_GAP = re.compile(r"\W")
# With at least this many counts of terms, float32 is used for fitting: 400,000 documents then need 1.5 GB.
_MANY_COUNTS = 1 << 24


def lowered(text: str) -> str:
    """`text` in lower case, with one small sigma, so that a letter never depends on later letters."""
    return text.lower().replace("ς", "σ")


def _words(text: str) -> Iterator[str]:
    """The words of a text in lower case; one that begins with a digit is NUMBER."""
    for word in _WORD.findall(lowered(text)):
        yield NUMBER if word[0].isdigit() else word


@dataclass(frozen=True)
class Embedding:
    """V terms, and the maps from their counts to D numbers.

    `terms` are the V terms in alphabetical order, `idf` [V] their weights, `components` [V, D] their rows of the SVD. A
    point has length 1, or 0 without any term.
    """

    terms: tuple[str, ...]
    idf: np.ndarray
    components: np.ndarray

    @cached_property
    def known(self) -> dict[str, int]:
        """The index of each term."""
        return {term: number for number, term in enumerate(self.terms)}

    @cached_property
    def longest(self) -> int:
        """The number of letters of the longest term."""
        return max(map(len, self.terms), default=0)

    def term_of(self, word: str) -> int:
        """The index of the term of a word in lower case; -1 if the word is not a term."""
        return self.known.get(NUMBER if word[0].isdigit() else word, -1)

    def points(self, texts: Sequence[str]) -> np.ndarray:
        """The points [N, D] of texts, float64."""
        found, ends = array("i"), [0]
        for text in texts:
            found.extend(self.known.get(word, -1) for word in _words(text))
            ends.append(len(found))
        numbers = np.array(found, np.int32)
        known = numbers >= 0
        edges = np.append(0, np.cumsum(known, dtype=np.int32)).astype(np.int32)[ends]
        counts = csr_array((np.ones(edges[-1]), numbers[known], edges), shape=(len(texts), len(self.terms)))
        counts.sum_duplicates()
        counts.data *= self.idf[counts.indices]
        return of_length_1(counts @ self.components)


def of_length_1(sums: np.ndarray) -> np.ndarray:
    """The points [N, D] of length 1 in the direction of `sums`, sums of rows of the SVD that are weighted by tf-idf."""
    lengths = np.sqrt(np.einsum("nd,nd->n", sums, sums))
    points: np.ndarray = sums / np.where(lengths > 0, lengths, 1)[:, None]
    return points


def fit_embedding(
    documents: Iterable[tuple[int, str]], *, dimensions: int, min_documents: int, seed: int, subject: str
) -> tuple[Embedding, np.ndarray]:
    """Fit an embedding to documents; also returns their points [N, D] in the order of their keys.

    `documents` are pairs of a distinct number (key) and a text; their order does not matter. Stop words are the English
    ones of scikit-learn. A term occurs in at least `min_documents` documents. Words that begin with a digit are the
    term NUMBER. Raises DemixError that names `subject` (the key of the clustering in the config) for fewer terms or
    documents than dimensions.
    """
    # The import needs a second, and only fitting uses it.
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS, CountVectorizer, TfidfTransformer

    keys, stopped = list[int](), {*map(lowered, ENGLISH_STOP_WORDS)}

    def texts() -> Iterator[str]:
        for key, text in documents:
            keys.append(key)
            yield text

    def analyzed(text: str) -> Iterator[str]:
        return (word for word in _words(text) if word not in stopped)

    vectorizer = CountVectorizer(analyzer=analyzed, min_df=min_documents, dtype=np.float32)
    try:
        counts = vectorizer.fit_transform(texts())
        names = vectorizer.get_feature_names_out().tolist()
    # No document has a term.
    except ValueError:
        names = []
    if dimensions > min(len(names), len(keys)):
        what = f"{len(names)} terms" if len(names) <= len(keys) else f"{len(keys)} documents"
        raise DemixError(f"{subject}.dimensions", f"is {dimensions}, but there are only {what}", "lower it")
    counts = counts[np.argsort(keys, kind="stable")]
    counts.sort_indices()
    if counts.nnz < _MANY_COUNTS:
        counts = counts.astype(np.float64)
    weighting = TfidfTransformer()
    counts = weighting.fit(counts).transform(counts, copy=False)
    components = TruncatedSVD(dimensions, n_iter=5, random_state=seed % 2**32).fit(counts).components_.T
    sums = (counts @ components).astype(np.float64, copy=False)
    del counts
    idf, components = (np.ascontiguousarray(some, np.float64) for some in (weighting.idf_, components))
    return Embedding(tuple(names), idf, components), of_length_1(sums)


class Prefixes:
    """The points of a growing text: each prefix has the point that it would have as a text by itself."""

    def __init__(self, embedding: Embedding) -> None:
        self._embedding = embedding
        # The weighted sum of the rows of the words that have ended.
        self._sum = np.zeros(embedding.components.shape[1])
        # The bytes of the unfinished word and of the unfinished character.
        self._pending = b""

    def extend(self, data: bytes, ends: np.ndarray) -> np.ndarray:
        """Append the UTF-8 `data`; return the points [n, D] of all text before each offset in `ends` [n] of `data`.

        `ends` are non-decreasing. An incomplete character is ignored; bytes that are not UTF-8 are not letters.
        """
        term_of, longest = self._embedding.term_of, self._embedding.longest
        data, ends = self._pending + data, ends + len(self._pending)
        text, whole = codecs.utf_8_decode(data, "surrogateescape", False)
        edges = _byte_edges(text, whole)
        text = lowered(text)
        cuts = np.searchsorted(edges, ends, side="right") - 1
        words = [(*match.span(), term_of(match.group())) for match in _WORD.finditer(text)]
        starts, stops, numbers = np.array(words, np.int64).reshape(-1, 3).T
        # The last word may continue.
        open_from = len(text) - 1 if text and not _GAP.match(text[-1]) else len(text)
        if len(stops) and stops[-1] == len(text):
            open_from = int(starts[-1])
        # An incomplete word counts as a word.
        of = np.searchsorted(stops, cuts, side="right")
        inside = np.flatnonzero(of < len(stops))
        inside = inside[starts[of[inside]] + 2 <= cuts[inside]]
        begun, until = starts[of[inside]].tolist(), cuts[inside].tolist()
        spans = zip(begun, until, strict=True)
        # No longer word is a term; a number is known by its first digit.
        parts = np.array([term_of(text[a : min(b, a + longest + 1)]) for a, b in spans], np.int64)
        inside, parts = inside[parts >= 0], parts[parts >= 0]
        known = numbers >= 0
        stops, numbers = stops[known], numbers[known]
        done = np.searchsorted(stops, cuts, side="right")

        sums = np.cumsum(np.concatenate([self._sum[None], self._rows(numbers)]), axis=0)
        found = sums[done]
        found[inside] += self._rows(parts)

        ended = int(np.searchsorted(stops, open_from, side="right"))
        self._sum = sums[ended]
        head = min(len(text), open_from + longest + 1)
        self._pending = data[edges[open_from] : edges[head]] + data[whole:]
        return of_length_1(found)

    def _rows(self, numbers: np.ndarray) -> np.ndarray:
        rows: np.ndarray = self._embedding.components[numbers] * self._embedding.idf[numbers, None]
        return rows


def _byte_edges(text: str, size: int) -> np.ndarray:
    """The offset in the `size` bytes of `text` at which each letter of `lowered(text)` ends, after a 0 (int64)."""
    if len(text) == size:
        return np.arange(size + 1)
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    # A byte that is not UTF-8 has become a surrogate.
    sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    sizes[(codes >= 0xDC80) & (codes <= 0xDCFF)] = 1
    edges = np.append(0, np.cumsum(sizes))
    # Only this letter becomes two letters in lower case; both end where it ends.
    longer = np.flatnonzero(codes == ord("İ"))
    return np.insert(edges, longer + 1, edges[longer + 1])
