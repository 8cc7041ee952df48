"""What synchronizing gradients takes, by a model of ring all-reduces: bytes and seconds. Arithmetic only, no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from demix.run.placement import Placement

# Bytes of gradients in an all-reduce: `demix.train.parallel.BUCKET_BYTES`.
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class Ring:
    """All-reduces of `size` bytes, the same on each of `ranks`, in a ring of these ranks in their order.

    Or so many `broadcasts`, of `size` bytes together, each rank's share from that rank.
    """

    size: int
    ranks: Sequence[int]
    broadcasts: int = 0

    @property
    def passes(self) -> int:
        """The hops of a byte, n being all ranks: 2(n-1) in an all-reduce, n-1 in a broadcast."""
        return (1 if self.broadcasts else 2) * (len(self.ranks) - 1)

    @property
    def sent(self) -> float:
        """Bytes that each rank sends to the next: 2(n-1)/n of what it gives to all-reduce."""
        return self.passes / len(self.ranks) * self.size

    def hops(self, node: int) -> list[int]:
        """The numbers of the nodes, of `node` ranks each, whose hops of the ring lead to another node."""
        follow = [*self.ranks[1:], self.ranks[0]]
        return [a // node for a, b in zip(self.ranks, follow, strict=True) if a // node != b // node]


@dataclass(frozen=True)
class Network:
    """Nodes of `node` GPUs: seconds of a hop and bytes per second, inside a node and between two nodes."""

    node: int
    inner_alpha: float
    inner_beta: float
    outer_alpha: float
    outer_beta: float
    assumption: str = ""

    def seconds(self, ring: Ring) -> float:
        """Seconds of a ring's messages, one after the other: all-reduces of buckets, or broadcasts.

        2(n-1)·alpha per bucket + 2(n-1)/n·bytes/beta, or half of it. A ring is as fast as its slowest link, and has one
        hop out of each of its nodes, to which all links of the node belong.
        """
        beta = min(self.inner_beta, self.outer_beta) if ring.hops(self.node) else self.inner_beta
        messages = ring.broadcasts or math.ceil(ring.size / BUCKET_BYTES)
        return ring.passes * messages * self.alpha(ring) + ring.sent / beta

    def alpha(self, ring: Ring) -> float:
        """Mean seconds of a hop of a ring."""
        outer = len(ring.hops(self.node)) / len(ring.ranks)
        return outer * self.outer_alpha + (1 - outer) * self.inner_alpha


def rings_of(
    shared: int, expert: int, places: Sequence[Placement], broadcasts: tuple[int, int] = (0, 0)
) -> tuple[Ring, ...]:
    """The all-reduces of an update: of `shared` bytes by all ranks, of `expert` bytes by the ranks of each expert.

    Or so many `broadcasts` of shared bytes and of an expert's.
    """
    rings = [Ring(shared, range(len(places)), broadcasts[0])]
    for place in places:
        if place is places[place.ranks[0]]:
            number = len(place.experts)
            rings.append(Ring(expert * number, place.ranks, broadcasts[1] * number))
    return tuple(ring for ring in rings if ring.size and len(ring.ranks) > 1)


def synchronizing(rings: Sequence[Ring], network: Network) -> float:
    """Seconds until all `rings` are done, with nothing hidden behind backward.

    The rings of one rank follow one another; rings that have no rank in common are under way at the same time.
    """
    return _of_a_rank([(ring, network.seconds(ring)) for ring in rings])


def given(rings: Sequence[Ring]) -> int:
    """The most bytes that one rank gives to all-reduce."""
    return round(_of_a_rank([(ring, ring.size) for ring in rings if not ring.broadcasts]))


def _of_a_rank(values: Sequence[tuple[Ring, float]]) -> float:
    """The largest sum over a rank's rings."""
    ranks = {rank for ring, _ in values for rank in ring.ranks}
    return max((sum(value for ring, value in values if rank in ring.ranks) for rank in ranks), default=0.0)


def out_of_a_node(rings: Sequence[Ring], node: int) -> float:
    """The most bytes that leave one node of `node` ranks."""
    leaving: dict[int, float] = {}
    for ring in rings:
        for number in ring.hops(node):
            leaving[number] = leaving.get(number, 0.0) + ring.sent
    return max(leaving.values(), default=0.0)


# Hops: NCCL's own tuning for rings (3.4 us over NVLink, 9.6 over a network). NVLink: 20 GB/s a link of a V100 (6 of
# them) and an A100 (12), 20.6 of an H100 (18), as there (src/graph/topo.h). Links between nodes are assumed.
_HOPS = {"inner_alpha": 3.4e-6, "outer_alpha": 9.6e-6}
NETWORKS = {
    "v100": Network(8, inner_beta=120e9, outer_beta=12.5e9, assumption="100 Gb/s out of a node", **_HOPS),
    "a100": Network(8, inner_beta=240e9, outer_beta=200e9, assumption="8 links of 200 Gb/s out of a node", **_HOPS),
    "h100": Network(8, inner_beta=370e9, outer_beta=400e9, assumption="8 links of 400 Gb/s out of a node", **_HOPS),
}
