"""Balanced assignment against linear programs, k-means against scikit-learn's."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linprog
from scipy.spatial.distance import cdist
from sklearn.cluster import KMeans

from demix.data.balance import balanced_labels, kmeans, squared_distances

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
