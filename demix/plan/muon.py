"""What Muon's updates take of a training (`demix.train.muon`), beside its passes. Arithmetic only, no torch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from demix.config.architecture import Architecture
from demix.config.counts import matrices, orthogonalising_flops
from demix.config.training import Updates
from demix.plan.network import Ring, rings_of
from demix.run.placement import Placement


@dataclass(frozen=True)
class MuonCost:
    """The cost of Muon; 0 without it.

    `shared` and `expert`: parameters with one moment instead of Adam's two, of those that are trained. `flops`: the
    most of a rank in an update. `rings`: broadcasts of orthogonalised matrices.
    """

    shared: int = 0
    expert: int = 0
    flops: float = 0.0
    rings: tuple[Ring, ...] = ()


def muon_cost(
    architecture: Architecture,
    updates: Updates | None,
    expert_scope: str,
    places: Sequence[Placement],
    *,
    frozen: bool,
) -> MuonCost:
    """The cost of a training's optimizer on ranks at `places`; `frozen`: whether experts alone are trained."""
    if updates is None or updates.kind != "muon":
        return MuonCost()
    shared, own = matrices(architecture, expert_scope)
    shared = Counter() if frozen else shared
    of_experts = max(len(place.experts) * _of_a_rank(own, len(place.ranks)) for place in places)
    flops = updates.iterations * (_of_a_rank(shared, len(places)) + of_experts)
    sizes = _parameters(shared), _parameters(own)
    rings = rings_of(4 * sizes[0], 4 * sizes[1], places, (shared.total(), own.total()))
    return MuonCost(*sizes, flops, rings)


def _parameters(shapes: Counter[tuple[int, int]]) -> int:
    return sum(rows * columns * number for (rows, columns), number in shapes.items())


def _of_a_rank(shapes: Counter[tuple[int, int]], ranks: int) -> float:
    """FLOPs of an iteration of one of so many ranks: its share of all matrices, and one of the largest at least."""
    costs = {shape: orthogonalising_flops(*shape) for shape in shapes}
    return max([sum(costs[shape] * number for shape, number in shapes.items()) / ranks, *costs.values()], default=0.0)
