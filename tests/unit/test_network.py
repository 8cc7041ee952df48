"""The model of gradient sync: rings in numbers worked by hand, bytes counted on a ring that is played through."""

from pathlib import Path

import pytest

from demix.plan.cost import plan_training
from demix.plan.flops import HARDWARE
from demix.plan.network import Network, Ring, given, out_of_a_node, rings_of, synchronizing
from demix.run.check import load_run
from demix.run.placement import place_experts

PAPER = Path(__file__).parents[2] / "config" / "paper-1.3b.yaml"
# Hops of 1 and 10 us, links of 100 and 10 GB/s.
PLAIN = Network(8, 1e-6, 100e9, 10e-6, 10e9)


def played(ring: Ring, node: int) -> tuple[set[float], dict[int, float]]:
    """Bytes that each rank sends in a reduce-scatter and an all-gather of n parts, and bytes out of each node."""
    n = len(ring.ranks)
    sent, out = dict.fromkeys(ring.ranks, 0.0), {rank // node: 0.0 for rank in ring.ranks}
    for _ in range(2 * (n - 1)):
        for place, rank in enumerate(ring.ranks):
            sent[rank] += ring.size / n
            if ring.ranks[(place + 1) % n] // node != rank // node:
                out[rank // node] += ring.size / n
    return {round(size, 3) for size in sent.values()}, out


@pytest.mark.parametrize(("first", "count"), [(0, 2), (0, 8), (0, 16), (6, 3), (0, 24), (16, 16)])
def test_bytes_are_those_of_a_ring_that_is_played_through(first: int, count: int) -> None:
    ring = Ring(48_000_000, range(first, first + count))
    sent, out = played(ring, 8)
    assert sent == {round(ring.sent, 3)}
    assert out_of_a_node([ring], 8) == pytest.approx(max(out.values()))
    assert sorted(ring.hops(8)) == sorted(number for number, size in out.items() if size)


def test_rings_of_a_rank_follow_one_another_and_others_run_beside() -> None:
    places = place_experts("ab", 8, 16)
    rings = rings_of(1000, 500, places)
    assert [(ring.size, list(ring.ranks)) for ring in rings] == [
        (1000, list(range(16))),
        (500, list(range(8))),
        (500, list(range(8, 16))),
    ]
    assert given(rings) == 1500
    assert synchronizing(rings, PLAIN) == pytest.approx(PLAIN.seconds(rings[0]) + PLAIN.seconds(rings[1]))
    # Only the shared gradients leave a node.
    assert out_of_a_node(rings, 8) == 2 * 15 / 16 * 1000
    # Of the 24 ranks of eight experts, those of the third and of the sixth are on both sides of the second node.
    both = 2 * 23 / 24 * 1000 + 2 * (2 * 2 / 3 * 500)
    assert out_of_a_node(rings_of(1000, 500, place_experts("abcdefgh", 8, 24)), 8) == pytest.approx(both)
    # Several experts on a rank have no ring of their own, and one process none at all.
    assert rings_of(1000, 500, place_experts("abcd", 8, 2)) == (Ring(1000, range(2)),)
    assert rings_of(1000, 500, place_experts("ab", 8, 1)) == ()
    assert (given(()), synchronizing((), PLAIN), out_of_a_node((), 8)) == (0, 0.0, 0.0)


def test_an_adaptation_sends_what_it_trains_and_checkpoints_are_counted() -> None:
    plans = {one.name: one for one in plan_training(load_run(PAPER), None, HARDWARE["a100"])}
    demix, dense = plans["demix"], plans["dense"]
    assert demix.synced == dense.synced == 4 * (demix.shared + demix.expert)
    # The rest of the model is frozen.
    assert plans["demix-dapt-yelp"].synced == 4 * demix.expert
    assert plans["dense_unbalanced-dapt-yelp"].synced == 4 * (demix.shared + demix.expert)
    # Every 1,000 of 50,000 updates but for the last, none in a trial of 500, every 100 of 1,011.
    assert [one.saved // one.checkpoint for one in (demix, plans["demix, 3 rates"], plans["demix-dapt-yelp"])] == [
        49,
        0,
        10,
    ]
