"""Embeddings of texts and of their prefixes, balanced assignment and k-means, against scikit-learn and programs."""

from collections.abc import Callable
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linprog
from scipy.spatial.distance import cdist
from sklearn.cluster import KMeans
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import normalize

from demix.data import embed
from demix.data.balance import balanced_labels, kmeans, squared_distances
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


def peer(texts: list[str], dimensions: int, min_documents: int) -> Callable:
    """scikit-learn's own pipeline: texts to their points [N, D]."""
    # scikit-learn's own words, of which those that begin with a digit are replaced.
    tokenize = TfidfVectorizer().build_tokenizer()

    def tokens(text: str) -> list[str]:
        return ["#number" if word[0].isdigit() else word for word in tokenize(text)]

    vectors = TfidfVectorizer(tokenizer=tokens, token_pattern=None, stop_words="english", min_df=min_documents)
    found = vectors.fit_transform(map(plain, texts))
    svd = TruncatedSVD(dimensions, n_iter=5, random_state=7).fit(found)
    return lambda some: normalize(svd.transform(vectors.transform(map(plain, some))))


def fitted(texts: list[str], keys: list[int] | None = None, **more: object) -> tuple[Embedding, np.ndarray]:
    options = {"dimensions": 6, "min_documents": 2, "seed": 7, "subject": "k"}
    return fit_embedding(zip(keys or range(len(texts)), texts, strict=True), **options | more)


EMBEDDING, POINTS = fitted(SAMPLE)
PEER = peer(SAMPLE, dimensions=6, min_documents=2)


def test_points_of_documents_are_scikit_learns():
    assert "#NUMBER" in EMBEDDING.terms
    found = PEER(SAMPLE)
    assert pytest.approx(found, abs=1e-10) == POINTS
    assert EMBEDDING.points(SAMPLE) == pytest.approx(POINTS, abs=1e-12)
    other = ["", "unknown words", "alpha beta 7 İstanbul", *SAMPLE[:3]]
    assert EMBEDDING.points(other) == pytest.approx(PEER(other), abs=1e-10)


@settings(deadline=None, max_examples=80)
@given(TEXTS, st.lists(st.integers(0, 12), max_size=8))
@example("alpha Beta 7 alpha alphabet 99 alpha Beta gamma alpha", [])
@example("alpha Beta 7 alpha alphabet 99 alpha Beta gamma alpha", [3, 9, 5, 0, 20])
@example("İstanbul ΟΔΟΣ 日本語 naïve straße ΟΔΟΣ'ΑΣ aİb", [1, 3, 8, 4, 7, 9])
def test_points_of_prefixes_are_scikit_learns(text, sizes):
    """All prefixes in bytes, which cut words and characters, of a text that comes in pieces of `sizes`, then whole."""
    whole = text.encode()
    edges = [0, *(edge for edge in accumulate(sizes) if edge < len(whole)), len(whole)]
    prefixes, found = Prefixes(EMBEDDING), []
    for start, stop in pairwise(edges):
        found.append(prefixes.extend(whole[start:stop], np.arange(1, stop - start + 1)))
    decoded = [whole[:end].decode(errors="replace") for end in range(1, len(whole) + 1)]
    if decoded:
        assert np.concatenate(found) == pytest.approx(PEER(decoded), abs=1e-9)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from([word.encode() for word in WORDS]) | st.binary(max_size=3)).map(b"".join))
def test_bytes_that_are_no_text_are_no_letters(whole):
    ends = np.arange(len(whole) + 1)
    found = Prefixes(EMBEDDING).extend(whole, ends)
    decoded = [whole[:end].decode(errors="replace") for end in ends]
    assert found == pytest.approx(PEER(decoded), abs=1e-9)


def test_a_word_without_end_is_no_term():
    longest = max(EMBEDDING.terms, key=len)
    text = "alpha " + "beta" * 500 + " 9" + "7" * 900 + " alpha " + longest + "zzz"
    prefixes, points = Prefixes(EMBEDDING), []
    for start in range(0, len(text), 100):
        points.append(prefixes.extend(text[start : start + 100].encode(), np.array([len(text[start : start + 100])])))
    ends = [min(len(text), 100 * (n + 1)) for n in range(len(points))]
    assert np.concatenate(points) == pytest.approx(PEER([text[:end] for end in ends]), abs=1e-9)
    cut, end = f"alpha {longest}zzz beta {longest} alpha".encode(), 6 + len(longest.encode()) + 3
    prefixes = Prefixes(EMBEDDING)
    parts = (cut[:end], cut[end : end + 4], cut[end + 4 :])
    points = [prefixes.extend(part, np.arange(1, len(part) + 1)) for part in parts]
    decoded = [cut[:size].decode(errors="replace") for size in range(1, len(cut) + 1)]
    assert np.concatenate(points) == pytest.approx(PEER(decoded), abs=1e-9)


def test_the_order_of_documents_changes_nothing():
    order = np.random.default_rng(2).permutation(len(SAMPLE))
    embedding, points = fitted([SAMPLE[n] for n in order], order.tolist())
    assert embedding.terms == EMBEDDING.terms
    assert np.array_equal(embedding.components, EMBEDDING.components)
    assert np.array_equal(points, POINTS)


def test_a_large_sample_is_fitted_in_single_precision(monkeypatch):
    monkeypatch.setattr(embed, "_MANY_COUNTS", 1)
    embedding, points = fitted(SAMPLE)
    assert embedding.components.dtype == np.float64
    assert not np.array_equal(embedding.components, EMBEDDING.components)
    assert points == pytest.approx(POINTS, abs=1e-4)


@pytest.mark.parametrize(
    ("texts", "options"),
    [(["alpha beta"] * 9, {}), ([" ".join(WORDS)] * 2, {"min_documents": 1}), (["the", "and"] * 9, {})],
)
def test_too_few_terms_or_documents_are_refused(texts, options):
    with refused("k.dimensions"):
        fitted(texts, **options)


# HiGHS ends where no reduced cost is below -1e-7, for each of the points.
TOLERANCE = 1e-5


def made_points(count: int, dimensions: int, groups: int, seed: int) -> np.ndarray:
    """Points of length 1 in groups of unequal sizes."""
    chance = np.random.default_rng(seed)
    centres = chance.normal(size=(groups, dimensions))
    points = centres[chance.choice(groups, count, p=chance.dirichlet(np.ones(groups)))]
    points = points + 0.7 * chance.normal(size=points.shape)
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def objective(costs: np.ndarray, labels: np.ndarray) -> float:
    return float(costs[np.arange(len(costs)), labels].sum())


def refuse_unequal(labels: np.ndarray, clusters: int) -> None:
    sizes = np.bincount(labels, minlength=clusters)
    assert sizes.min() >= len(labels) // clusters
    assert sizes.max() <= -(-len(labels) // clusters)


def linear_program(costs: np.ndarray) -> float:
    """The least cost with clusters of ⌊N/K⌋ or ⌈N/K⌉ documents, by HiGHS."""
    count, clusters = costs.shape
    sizes = np.tile(np.eye(clusters), count)
    bounds = np.repeat([-(-count // clusters), -(count // clusters)], clusters)
    found = linprog(
        costs.ravel(), np.vstack([sizes, -sizes]), bounds, np.kron(np.eye(count), np.ones(clusters)), np.ones(count)
    )
    return float(found.fun)


# Whole numbers make ties, of single documents and of whole paths.
COSTS = st.tuples(st.integers(1, 40), st.integers(1, 7)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=st.integers(-3, 3).map(float) | st.floats(0, 1, width=32))
)


@settings(deadline=None, max_examples=30)
@given(COSTS)
@example(squared_distances(made_points(403, 10, 6, seed=1), made_points(5, 10, 6, seed=2)))
def test_balanced_labels_cost_what_a_linear_program_finds(costs):
    labels = balanced_labels(costs)
    refuse_unequal(labels, costs.shape[1])
    assert objective(costs, labels) == pytest.approx(linear_program(costs), abs=TOLERANCE)


def test_one_cluster_has_all_documents():
    points = made_points(20, 3, 2, seed=1)
    for balanced in (True, False):
        centres, labels, _ = kmeans(points, points[:1], 5, balanced)
        assert labels.tolist() == [0] * 20
        assert centres[0] == pytest.approx(points.mean(0))


def test_distances_are_squared_and_never_below_zero():
    points = made_points(50, 4, 3, seed=2)
    found = squared_distances(points, points[:9])
    assert found == pytest.approx(cdist(points, points[:9], "sqeuclidean"), abs=1e-14)
    assert found.min() >= 0


@pytest.mark.parametrize("seed", range(3))
def test_the_objective_of_balanced_k_means_never_rises(seed):
    points = made_points(300, 10, 6, seed)
    centres, labels, objectives = kmeans(points, points[:8], 50, balanced=True)
    assert 2 < len(objectives) < 50
    assert (np.diff(objectives) <= 1e-9).all()
    refuse_unequal(labels, 8)
    assert centres == pytest.approx(np.stack([points[labels == cluster].mean(0) for cluster in range(8)]))
    assert len(kmeans(points, points[:8], 2, balanced=True)[2]) == 2


@pytest.mark.parametrize("seed", range(3))
def test_unbalanced_k_means_is_scikit_learns(seed):
    points = made_points(400, 10, 6, seed)
    centres, labels, objectives = kmeans(points, points[:7], 300, balanced=False)
    peer = KMeans(7, init=points[:7], n_init=1, max_iter=300, tol=0, algorithm="lloyd").fit(points)
    assert np.array_equal(labels, peer.labels_)
    assert centres == pytest.approx(peer.cluster_centers_, abs=1e-9)
    assert objectives[-1] == pytest.approx(peer.inertia_)


def test_a_cluster_without_documents_takes_the_farthest_one():
    points = np.array([[0.0], [1.0], [2.0], [10.0], [11.0], [30.0]])
    start = np.array([[0.0], [10.0], [1000.0]])
    centres, labels, _ = kmeans(points, start, 50, balanced=False)
    peer = KMeans(3, init=start, n_init=1, tol=0, algorithm="lloyd").fit(points)
    assert labels.tolist() == peer.labels_.tolist() == [0, 0, 0, 1, 1, 2]
    assert centres == pytest.approx(peer.cluster_centers_)
    # The document no longer counts where it came from.
    assert kmeans(points, start, 1, balanced=False)[0].ravel().tolist() == [1, 10.5, 30]
