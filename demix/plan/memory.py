"""What `shard_optimizer` leaves of the moments on a rank, and sends. Arithmetic only, no torch."""

from collections.abc import Sequence

from demix.config.counts import Size
from demix.plan.network import Ring, rings_of
from demix.run.placement import Placement, owners_of


def sharded_moments(shared: Sequence[Size], expert: Sequence[Size], places: Sequence[Placement], *, muon: bool) -> int:
    """The most bytes of moments that one rank keeps where each tensor's are on one rank (`demix.train.sharded`).

    `shared` are the tensors that all ranks at `places` train, and `expert` those of each expert. A tensor has two
    moments, Adam's, or with `muon` a matrix of blocks one.
    """

    def bytes_of(tensors: Sequence[Size], experts: int = 1) -> list[int]:
        return [4 * experts * size * (1 if muon and matrix else 2) for size, matrix in tensors]

    most = 0
    for place in {place.ranks: place for place in places}.values():
        own, ranks = bytes_of(expert, len(place.experts)), len(place.ranks)
        if ranks == len(places):
            kept = _fullest(bytes_of(shared) + own, ranks)
        else:
            kept = _fullest(bytes_of(shared), len(places)) + _fullest(own, ranks)
        most = max(most, kept)
    return most


def _fullest(sizes: Sequence[int], ranks: int) -> int:
    loads = [0] * ranks
    for size, owner in zip(sizes, owners_of(sizes, ranks), strict=True):
        loads[owner] += size
    return max(loads)


def sent_parameters(shared: Sequence[Size], expert: Sequence[Size], places: Sequence[Placement]) -> tuple[Ring, ...]:
    """The broadcasts of updated parameters, in fp32."""
    together, own = (4 * sum(size for size, _ in tensors) for tensors in (shared, expert))
    return rings_of(together, own, places, (len(shared), len(expert)))
