"""Assignment of documents to clusters of equal size at the lowest cost, and k-means with and without it.

Sources: Gururangan et al. 2023, section 2.1, Eq. 1. Distances are squared, so that the objective never rises.
"""

from itertools import pairwise

import numpy as np
from scipy.sparse import csr_array

# The number of rows that are copied in memory at one time.
_ROWS = 4096
# Prices are found for softer assignments first. The numbers are fractions of the mean regret of a wrong cluster.
_SOFTNESS = np.geomspace(0.3, 1e-3, 8)


def squared_distances(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """The squared Euclidean distances [N, K] of `points` [N, D] to `centres` [K, D]."""
    products = points @ centres.T
    products *= -2
    products += np.einsum("nd,nd->n", points, points)[:, None]
    products += np.einsum("kd,kd->k", centres, centres)
    # By rounding, the distance of a point to itself may be below 0.
    found: np.ndarray = np.maximum(products, 0, out=products)
    return found


def balanced_labels(costs: np.ndarray) -> np.ndarray:
    """The cluster (int64) of each document, at the lowest total cost with ⌊N/K⌋ or ⌈N/K⌉ documents in each cluster.

    `costs` [N, K] are finite float64. The solution is exact. An annealed dual first gives prices under which the
    cheapest clusters are nearly equal in size. Then documents are moved along shortest paths between clusters, one
    document per edge, until every cluster has its size.
    """
    prices = _prices(costs)
    pieces = (costs[start : start + _ROWS] for start in range(0, len(costs), _ROWS))
    labels = np.concatenate([np.argmin(piece + prices, 1) for piece in pieces])
    least, most = len(costs) // costs.shape[1], -(-len(costs) // costs.shape[1])
    sizes = np.bincount(labels, minlength=costs.shape[1])
    moves = _Moves(costs, labels)
    # A gain smaller than this is only rounding.
    tolerance = 1e-12 * float(np.abs(costs).max(initial=0))
    while True:
        # Within the bounds, a cluster may also give or receive a document if that lowers the total cost.
        giving, receiving = sizes > least, sizes < most
        if feasible := least <= sizes.min() and sizes.max() <= most:
            pass
        elif sizes.max() > most:
            giving = sizes > most
            receiving = sizes < least if sizes.min() < least else receiving
        else:
            receiving = sizes < least
        path, cost = moves.cheapest(giving, receiving, tolerance)
        if feasible and cost >= -tolerance:
            return labels
        moves.move(path)
        sizes[path[0]] -= 1
        sizes[path[-1]] += 1


def _prices(costs: np.ndarray) -> np.ndarray:
    """Prices [K] that make the softmax of -(costs + prices) / ε nearly equal in its sums over documents, ε falling."""
    count, clusters = costs.shape
    prices = np.zeros(clusters)
    # Without any regret, as for one cluster, all prices are equally good.
    regret = float(costs.mean() - costs.min(1).mean())
    for epsilon in regret * _SOFTNESS if regret > 0 else ():
        for _ in range(12):
            total = np.zeros(clusters)
            for start in range(0, count, _ROWS):
                weights = costs[start : start + _ROWS] + prices
                weights -= weights.min(1, keepdims=True)
                weights /= -epsilon
                np.exp(weights, out=weights)
                weights /= weights.sum(1, keepdims=True)
                total += weights.sum(0)
            shares = total * clusters / count
            prices = prices + epsilon * np.log(np.maximum(shares, 1e-300))
            if np.abs(shares - 1).max() < 0.01:
                break
    return prices


class _Moves:
    """The cheapest move of a document from each cluster to each other cluster: its cost [K, K] and the document."""

    def __init__(self, costs: np.ndarray, labels: np.ndarray) -> None:
        self.costs, self.labels = costs, labels
        clusters = costs.shape[1]
        self.cost = np.full((clusters, clusters), np.inf)
        self.document = np.full((clusters, clusters), -1)
        for cluster in range(clusters):
            self._renew(cluster)

    def _renew(self, cluster: int) -> None:
        members = np.flatnonzero(self.labels == cluster)
        self.cost[cluster] = np.inf
        if len(members):
            differences = self.costs[members] - self.costs[members, cluster][:, None]
            best = differences.argmin(0)
            self.cost[cluster] = differences[best, np.arange(len(best))]
            self.document[cluster] = members[best]

    def cheapest(self, giving: np.ndarray, receiving: np.ndarray, tolerance: float) -> tuple[list[int], float]:
        """The cheapest path of clusters from one that is `giving` [K] to one that is `receiving` [K], and its cost.

        By Bellman and Ford: costs may be negative, but no cycle has a negative sum. Without a path the cost is
        infinite.
        """
        distance = np.where(giving, 0.0, np.inf)
        before = np.full(len(distance), -1)
        for _ in range(len(distance)):
            through = distance[:, None] + self.cost
            best = through.argmin(0)
            shorter = through[best, np.arange(len(best))] < distance - tolerance
            if not shorter.any():
                break
            distance[shorter] = through[best, np.arange(len(best))][shorter]
            before[shorter] = best[shorter]
        path = [int(np.where(receiving, distance, np.inf).argmin())]
        cost = float(distance[path[0]]) if receiving[path[0]] else np.inf
        while before[path[0]] >= 0:
            path.insert(0, int(before[path[0]]))
        return path, cost

    def move(self, path: list[int]) -> None:
        """Move the cheapest document along each edge of `path`."""
        moved = [int(self.document[edge]) for edge in pairwise(path)]
        self.labels[moved] = path[1:]
        for cluster in path:
            self._renew(cluster)


def kmeans(
    points: np.ndarray, centres: np.ndarray, rounds: int, balanced: bool
) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Centres [K, D], the cluster [N] of each of `points` [N, D], and the sum of squared distances of each round.

    Begins with `centres` [K, D] and ends when no document changes its cluster, or after `rounds` rounds. With
    `balanced`, clusters have equal sizes. Otherwise a cluster without documents restarts from the document that is
    farthest from its own centre.
    """
    labels, objectives = np.full(len(points), -1), []
    for _ in range(rounds):
        costs = squared_distances(points, centres)
        found = balanced_labels(costs) if balanced else costs.argmin(1)
        own = costs[np.arange(len(points)), found]
        objectives.append(float(own.sum()))
        if np.array_equal(found, labels):
            break
        labels = found
        centres = means(points, labels, len(centres), own)
    return centres, labels, objectives


def means(points: np.ndarray, labels: np.ndarray, clusters: int, costs: np.ndarray) -> np.ndarray:
    """The mean [K, D] of the points of each cluster; an empty cluster gets the point of the largest of `costs` [N]."""
    members = csr_array((np.ones(len(points)), labels, np.arange(len(points) + 1)), shape=(len(points), clusters))
    sums, sizes = members.T @ points, np.bincount(labels, minlength=clusters).astype(float)
    empty = np.flatnonzero(sizes == 0)
    for cluster, point in zip(empty, np.argsort(-costs, kind="stable")[: len(empty)], strict=True):
        sums[labels[point]] -= points[point]
        sizes[labels[point]] -= 1
        sums[cluster], sizes[cluster] = points[point], 1
    found: np.ndarray = sums / np.maximum(sizes, 1)[:, None]
    return found
