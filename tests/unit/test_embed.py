"""Embeddings of texts and of their prefixes against scikit-learn."""

import pickle
from collections.abc import Callable
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import StandardScaler, normalize

from demix.data import embed
from demix.data.embed import Embedding, Prefixes, fit_embedding
from support.errors import refused

SPELLED = """alpha Beta gamma the and 2021 3x ²x naïve x_y straße ſt i İ İs aİb İstanbul ΟΔΟΣ οδος ΑΣ Σ ς 日本語 Ⅷa
e\u0301a ǅa a b"""
WORDS = SPELLED.split()
GAPS = (" ", ", ", "'", ".", "-", "\n", "\u0307", "", ":", "\ud7ff", "\0", "😀", "\u00ad")
TEXTS = st.lists(st.sampled_from(WORDS) | st.sampled_from(GAPS) | st.characters(exclude_categories=["Cs"])).map("".join)


def sample(count: int) -> list[str]:
    chance = np.random.default_rng(1)
    pieces = [[chance.choice(WORDS), chance.choice(GAPS)] for _ in range(12 * count)]
    return ["".join(map("".join, pieces[12 * n : 12 * n + int(chance.integers(0, 13))])) for n in range(count)]


SAMPLE = sample(80)


def plain(text: str) -> str:
    """The text with the one letter of which `lower` depends on the letters around it as another one."""
    return text.replace("Σ", "σ").replace("ς", "σ")


def peer(texts: list[str], normalise: str, numbers: bool, dimensions: int, min_documents: int) -> Callable:
    """scikit-learn's own pipeline: texts to their points [N, D]."""
    # scikit-learn's own words, of which those that begin with a digit are replaced.
    tokenize = TfidfVectorizer().build_tokenizer()

    def tokens(text: str) -> list[str]:
        words = tokenize(text)
        return ["#number" if word[0].isdigit() else word for word in words if numbers or not word[0].isdigit()]

    vectors = TfidfVectorizer(tokenizer=tokens, token_pattern=None, stop_words="english", min_df=min_documents)
    found = vectors.fit_transform(map(plain, texts))
    svd = TruncatedSVD(dimensions, n_iter=5, random_state=7).fit(found)
    scaler = StandardScaler().fit(svd.transform(found))
    last = normalize if normalise == "unit" else scaler.transform
    return lambda some: last(svd.transform(vectors.transform(map(plain, some))))


def fitted(texts: list[str], keys: list[int] | None = None, **more: object) -> tuple[Embedding, np.ndarray]:
    options = {"dimensions": 6, "min_documents": 2, "normalise": "unit", "numbers": True, "seed": 7, "subject": "k"}
    half, places = len(texts) // 2, np.arange(len(texts)) if keys is None else np.array(keys)
    return fit_embedding([(texts[:half], places[:half]), (texts[half:], places[half:])], **options | more)


KINDS = [(normalise, numbers) for normalise in ("unit", "standard") for numbers in (True, False)]
EMBEDDINGS = {(n, m): fitted(SAMPLE, normalise=n, numbers=m) for n, m in KINDS}
PEERS = {kind: peer(SAMPLE, *kind, dimensions=6, min_documents=2) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_points_of_documents_are_scikit_learns(kind):
    embedding, points = EMBEDDINGS[kind]
    assert ("#NUMBER" in embedding.terms) == kind[1]
    assert points == pytest.approx(PEERS[kind](SAMPLE), abs=1e-10)
    assert embedding.points(SAMPLE) == pytest.approx(points, abs=1e-12)
    other = ["", "unknown words", "alpha beta 7 İstanbul", *SAMPLE[:3]]
    assert embedding.points(other) == pytest.approx(PEERS[kind](other), abs=1e-10)


def compare_prefixes(kind: tuple[str, bool], text: str, sizes: list[int]) -> None:
    """All prefixes in bytes, which cut words and characters, of a text that comes in pieces of `sizes`, then whole."""
    whole = text.encode()
    edges = [0, *(edge for edge in accumulate(sizes) if edge < len(whole)), len(whole)]
    prefixes, found = Prefixes(EMBEDDINGS[kind][0]), []
    for start, stop in pairwise(edges):
        found.append(prefixes.extend(whole[start:stop], np.arange(1, stop - start + 1)))
    decoded = [whole[:end].decode(errors="replace") for end in range(1, len(whole) + 1)]
    if decoded:
        assert np.concatenate(found) == pytest.approx(PEERS[kind](decoded), abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(TEXTS, st.lists(st.integers(0, 12), max_size=8))
@example("alpha Beta 7 alpha alphabet 99 alpha Beta gamma alpha", [])
@example("alpha Beta 7 alpha alphabet 99 alpha Beta gamma alpha", [3, 9, 5, 0, 20])
@example("İstanbul ΟΔΟΣ 日本語 naïve straße ΟΔΟΣ'ΑΣ aİb", [1, 3, 8, 4, 7, 9])
def test_points_of_prefixes_are_scikit_learns(kind, text, sizes):
    compare_prefixes(kind, text, sizes)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from([word.encode() for word in WORDS]) | st.binary(max_size=3)).map(b"".join))
def test_bytes_that_are_no_text_are_no_letters(whole):
    ends = np.arange(len(whole) + 1)
    found = Prefixes(EMBEDDINGS["unit", True][0]).extend(whole, ends)
    decoded = [whole[:end].decode(errors="replace") for end in ends]
    assert found == pytest.approx(PEERS["unit", True](decoded), abs=1e-9)


@pytest.mark.parametrize("normalise", ["unit", "standard"])
def test_a_word_without_end_takes_no_memory(normalise):
    embedding, _ = EMBEDDINGS[normalise, True]
    longest = max(embedding.terms, key=len)
    text = "alpha " + "beta" * 500 + " 9" + "7" * 900 + " alpha " + longest + "zzz"
    prefixes, points = Prefixes(embedding), []
    size = len(pickle.dumps(prefixes)) + 400
    for start in range(0, len(text), 100):
        points.append(prefixes.extend(text[start : start + 100].encode(), np.array([len(text[start : start + 100])])))
        assert len(pickle.dumps(prefixes)) < size
    ends = [min(len(text), 100 * (n + 1)) for n in range(len(points))]
    expected = PEERS[normalise, True]([text[:end] for end in ends])
    assert np.concatenate(points) == pytest.approx(expected, abs=1e-9)
    compare_prefixes((normalise, True), f"alpha {longest}zzz beta {longest} alpha", [6 + len(longest.encode()) + 3, 4])


def test_the_order_of_documents_changes_nothing():
    order = np.random.default_rng(2).permutation(len(SAMPLE))
    embedding, points = fitted([SAMPLE[n] for n in order], order.tolist())
    first, expected = EMBEDDINGS["unit", True]
    assert embedding.terms == first.terms
    assert np.array_equal(embedding.components, first.components)
    assert np.array_equal(points, expected)


def test_a_large_sample_is_fitted_in_single_precision(monkeypatch):
    monkeypatch.setattr(embed, "_MANY_COUNTS", 1)
    embedding, points = fitted(SAMPLE)
    first, expected = EMBEDDINGS["unit", True]
    assert embedding.components.dtype == np.float64
    assert not np.array_equal(embedding.components, first.components)
    assert points == pytest.approx(expected, abs=1e-4)


def test_long_texts_are_read_in_pieces(monkeypatch):
    monkeypatch.setattr(embed, "_PIECE", 3)
    embedding, points = EMBEDDINGS["unit", True]
    assert embedding.points(SAMPLE) == pytest.approx(points, abs=1e-12)


@pytest.mark.parametrize(
    ("texts", "options"),
    [(["alpha beta"] * 9, {}), ([" ".join(WORDS)] * 2, {"min_documents": 1}), (["the", "and"] * 9, {})],
)
def test_too_few_terms_or_documents_are_refused(texts, options):
    with refused("k.dimensions"):
        fitted(texts, **options)
