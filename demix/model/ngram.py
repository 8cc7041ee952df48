"""N-gram models with modified Kneser-Ney smoothing, interpolated.

Source: S. F. Chen and J. Goodman, An Empirical Study of Smoothing Techniques for Language Modeling (Computer Speech and
Language 13, 1999; TR-10-98 of Harvard, 1998). For a context h of n − 1 tokens, and h' = h without its first token,

    p(w | h) = (c(hw) − D(c(hw))) / Σ_v c(hv) + γ(h) · p(w | h'),    γ(h) = Σ_v D(c(hv)) / Σ_v c(hv).

D(0) = 0, D(1) = D1, D(2) = D2, and D(c) = D3 for more. With n_k the number of n-grams of count k, Y = n1 / (n1 + 2·n2):

    D1 = 1 − 2·Y·n2/n1,    D2 = 2 − 3·Y·n3/n2,    D3 = 3 − 4·Y·n4/n3.

For the highest order, c counts occurrences; for lower orders, c(g) is the number of different tokens before g. Each
order has its own discounts. Below order 1 is the uniform distribution over the vocabulary. If a context was never
followed by a token, p(w | h) = p(w | h').
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

# The discounts of KenLM's `lmplz --discount_fallback`, for counts of counts that yield no valid discounts.
FALLBACK = (0.5, 1.0, 1.5)


@dataclass(frozen=True)
class _Level:
    """The n-grams of one order, numbered in the order of `keys`.

    `keys` [G] are the number of the context (an n-gram of the order below) times the size of the vocabulary, plus the
    last token. `kept` [G + 1] is the discounted share of an n-gram in its context; the last entry, 0, is for unseen
    n-grams. `passed` [C + 1] is γ of each of C contexts; the last entry, 1, is for unseen contexts.
    """

    keys: np.ndarray
    kept: np.ndarray
    passed: np.ndarray

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The numbers of n-grams; −1 for unseen ones."""
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        found: np.ndarray = np.where(self.keys[places] == keys, places, -1)
        return found


@dataclass(frozen=True)
class KneserNey:
    """An n-gram model over token ids below `vocab_size`; `levels` are its orders from 1 on."""

    vocab_size: int
    levels: tuple[_Level, ...]

    @classmethod
    def fit(cls, streams: Sequence[ArrayLike], order: int, vocab_size: int) -> Self:
        """Count the n-grams up to `order` in `streams` of token ids; no n-gram spans two streams.

        The order is at most the length of the longest stream. Time and memory are those of sorting all tokens once per
        order.
        """
        arrays = [np.asarray(stream, np.int64) for stream in streams]
        tokens = np.concatenate([np.empty(0, np.int64), *arrays])
        place = np.concatenate([np.empty(0, np.int32), *(np.arange(len(one), dtype=np.int32) for one in arrays)])
        keys: list[np.ndarray] = []
        # The number of each n-gram without its first token.
        shorter: list[np.ndarray] = []
        counts = np.empty(0, np.int64)
        # The number of the n-gram that ends at each token.
        numbers = np.zeros(len(tokens), np.int32)
        for size in range(1, order + 1):
            ends = np.flatnonzero(place >= size - 1)
            if not len(ends):
                break
            contexts = numbers[ends - 1].astype(np.int64) if size > 1 else 0
            found, first, which, counts = np.unique(
                contexts * vocab_size + tokens[ends], return_index=True, return_inverse=True, return_counts=True
            )
            keys.append(found)
            shorter.append(numbers[ends[first]])
            numbers = np.full(len(tokens), -1, np.int32)
            numbers[ends] = which
        levels: list[_Level] = []
        for number in reversed(range(len(keys))):
            size = len(keys[number - 1]) if number else 1
            levels.append(_level(keys[number], counts, size, vocab_size))
            counts = np.bincount(shorter[number], minlength=size)
        return cls(vocab_size, tuple(reversed(levels)))

    @property
    def stored(self) -> int:
        """The number of n-grams of all orders, each of which has a count."""
        return sum(len(level.keys) for level in self.levels)

    def log_probabilities(self, rows: np.ndarray) -> np.ndarray:
        """Log p in nats [N, T] of the tokens of `rows` [N, T + 1] after the first, given earlier tokens of the row.

        A token with fewer earlier tokens than the context length n - 1 is predicted by a lower order.
        """
        likely = np.full(rows.shape, 1 / self.vocab_size)
        numbers = np.zeros(rows.shape, np.int64)
        for begin, level in enumerate(self.levels[: rows.shape[1]]):
            contexts = numbers[:, begin - 1 : -1] if begin else numbers
            found = level.find(contexts * self.vocab_size + rows[:, begin:])
            likely[:, begin:] = level.kept[found] + level.passed[contexts] * likely[:, begin:]
            numbers = np.full(rows.shape, -1)
            numbers[:, begin:] = found
        logs: np.ndarray = np.log(likely[:, 1:])
        return logs


def discounts_of(counts: np.ndarray) -> tuple[float, ...]:
    """D1, D2 and D3 of the `counts` of the n-grams of one order.

    If n1, n2 or n3 is 0, as in little text, or if a discount is not above 0 or is more than the count, the discounts
    are those of `FALLBACK`.
    """
    of_one, *more = (int(np.count_nonzero(counts == number)) for number in (1, 2, 3, 4))
    if not (of_one and all(more[:2])):
        return FALLBACK
    share = of_one / (of_one + 2 * more[0])
    pairs = zip((1, 2, 3), (of_one, *more), more, strict=False)
    found = tuple(number - (number + 1) * share * above / here for number, here, above in pairs)
    fit = all(0 < discount <= number for number, discount in enumerate(found, 1))
    return found if fit else FALLBACK


def _level(keys: np.ndarray, counts: np.ndarray, contexts: int, vocab_size: int) -> _Level:
    """The level of the n-grams `keys` [G] with their `counts` [G] (0 or more) in C `contexts`."""
    discount = np.array([0.0, *discounts_of(counts)])[np.minimum(counts, 3)]
    context = keys // vocab_size
    total = np.bincount(context, counts, contexts)
    seen = np.maximum(total, 1)
    passed = np.where(total > 0, np.bincount(context, discount, contexts) / seen, 1.0)
    kept = (counts - discount) / seen[context]
    return _Level(keys, np.append(kept, 0.0), np.append(passed, 1.0))
