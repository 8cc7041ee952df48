"""Gradients summed over ranks that share parameters, and clipped to one norm, against a single process."""

import logging
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from demix.run.placement import place, place_experts
from demix.train import parallel
from demix.train.parallel import GradientSync, World
from support.forks import FORKS, rank_environment

SEQUENCES, WIDTH = 4, 5


def parameters_of(experts: tuple[int, ...]) -> dict[str, nn.Parameter]:
    """Five shared parameters, the first of them unused, and two of the experts given."""
    chance = torch.Generator().manual_seed(1)
    shared = {f"shared{n}": torch.randn(WIDTH, WIDTH, generator=chance, dtype=torch.float64) for n in range(5)}
    every = torch.randn(2, 4, WIDTH, WIDTH, generator=chance, dtype=torch.float64)
    own = {f"expert{n}": every[n, list(experts)] for n in range(2)}
    return {name: nn.Parameter(tensor.clone()) for name, tensor in (shared | own).items()}


def loss_of(parameters: dict[str, nn.Parameter], experts: tuple[int, ...], first: int, last: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(2)
    x = torch.randn(4, SEQUENCES, WIDTH, generator=chance, dtype=torch.float64)[list(experts), first:last]
    # The first layer's parameters are the last that backward reaches.
    hidden = torch.tanh(x @ parameters["shared1"] @ parameters["shared2"]) @ parameters["expert0"]
    hidden = torch.tanh(hidden @ parameters["shared3"] @ parameters["shared4"]) @ parameters["expert1"]
    return hidden.square().sum()


def be_rank(rank: int, ranks: int, port: int, folder: Path) -> None:
    """A rank of a step of several: two micro-batches, then the clipping."""
    os.environ |= rank_environment(rank, ranks, port)
    parallel.BUCKET_BYTES = 2 * WIDTH * WIDTH * 8
    logging.getLogger().setLevel(logging.INFO)
    with parallel.joined() as world:
        assert (world.rank, world.size) == (rank, ranks)
        places = place_experts(["a", "b", "c", "d"], SEQUENCES, ranks)
        own = places[rank]
        world = world.placed(places)
        assert world.writes_experts == (own.ranks[0] == rank)
        parameters = parameters_of(own.experts)
        sync = GradientSync(parameters, lambda name: name.startswith("expert"), world)
        middle = (own.first + own.last) // 2
        for _ in range(2):
            sync.zero()
            loss_of(parameters, own.experts, own.first, middle).backward()
            sync.begin()
            loss_of(parameters, own.experts, middle, own.last).backward()
            sync.finish()
        gradients = {name: parameter.grad.numpy().copy() for name, parameter in parameters.items()}
        norm = sync.clip(0.5, scale=2.0)
        clipped = {f"clipped/{name}": parameter.grad.numpy() for name, parameter in parameters.items()}
        sums = world.sum([rank, 0.1])
        buckets, sent = [bucket.flat.numel() for bucket in sync.buckets], sync.sent
        found = {
            "norm": norm,
            "sent": sent,
            "buckets": buckets,
            "level": logging.getLogger().level,
        }
    assert not dist.is_initialized()
    np.savez(folder / f"{rank}.npz", **found, **gradients, **clipped, sum=sums)


@pytest.mark.parametrize("ranks", [2, 8])
def test_gradients_over_ranks_are_those_of_one_process(tmp_path: Path, ranks: int) -> None:
    """Several experts a rank, and several ranks an expert; buckets of two, and one that backward never fills."""
    # A fork of a process with threads may begin with a lock of the resolver held, and then the others wait for it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = [
        FORKS.Process(target=be_rank, args=(rank, ranks, store.port, tmp_path), daemon=True) for rank in range(ranks)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
    assert [process.exitcode for process in started] == [0] * ranks
    alone = parameters_of((0, 1, 2, 3))
    loss_of(alone, (0, 1, 2, 3), 0, SEQUENCES).backward()
    alone["shared0"].grad = torch.zeros_like(alone["shared0"])
    places = place_experts(["a", "b", "c", "d"], SEQUENCES, ranks)
    whole = {name: parameter.grad.clone() for name, parameter in alone.items()}
    # The factor by which the loss was scaled is divided out before gradients are clipped.
    for parameter in alone.values():
        parameter.grad /= 2
    norm = float(nn.utils.clip_grad_norm_(alone.values(), 0.5))
    assert norm > 0.5
    for rank, own in enumerate(places):
        found = np.load(tmp_path / f"{rank}.npz")
        for name, gradient in whole.items():
            part, clipped = gradient.numpy(), alone[name].grad.numpy()
            if name.startswith("expert"):
                part, clipped = part[list(own.experts)], clipped[list(own.experts)]
            np.testing.assert_allclose(found[name], part, rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(found[f"clipped/{name}"], clipped, rtol=1e-5, atol=1e-9)
        assert found["norm"] == pytest.approx(norm, rel=1e-9)
        assert found["sum"] == pytest.approx([sum(range(ranks)), ranks * 0.1], rel=1e-15)
        assert found["level"] == (logging.WARNING if rank else logging.INFO)
        size = WIDTH * WIDTH
        # The last parameters first, two in a bucket; a rank's own experts are in none.
        experts = [2 * len(own.experts) * size] if len(own.ranks) > 1 else []
        assert found["buckets"].tolist() == [2 * size, 2 * size, size, *experts]
        assert found["sent"] == 8 * (5 * size + sum(experts))


def test_one_process_sums_nothing() -> None:
    world = World()
    assert world.placed(place("demix", ["a", "b"], 4, 1)) is world
    assert world.sum([1.5, 2]) == [1.5, 2]
    world.wait()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        with parallel.joined() as joined:
            assert (joined.rank, joined.size, joined.groups, joined.writes_experts) == (0, 1, (None, None), True)
            assert joined.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def with_gradients(*gradients: list[float]) -> tuple[GradientSync, list[nn.Parameter]]:
    parameters = {str(n): nn.Parameter(torch.zeros(len(one))) for n, one in enumerate(gradients)}
    sync = GradientSync(parameters, lambda name: name == "1", World())
    for parameter, gradient in zip(parameters.values(), gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return sync, list(parameters.values())


def test_gradients_are_clipped_to_the_norm_of_all_unless_it_is_no_number() -> None:
    for most, factor in ((10.0, 1.0), (2.5, 0.5)):
        sync, parameters = with_gradients([3.0, 0.0], [4.0])
        assert sync.clip(most) == pytest.approx(5.0)
        assert [p.grad.tolist() for p in parameters] == [pytest.approx([3 * factor, 0]), pytest.approx([4 * factor])]
    sync, (parameter, _) = with_gradients([3.0, 0.0], [4.0])
    assert sync.clip(10.0, scale=2.0) == pytest.approx(2.5)
    assert parameter.grad.tolist() == pytest.approx([1.5, 0])
    for wrong in (math.inf, math.nan):
        sync, (parameter, _) = with_gradients([3.0, 1.0], [wrong])
        assert not math.isfinite(sync.clip(1.0, scale=2.0))
        assert parameter.grad.tolist() == [3.0, 1.0]
    # Nothing is divided by the norm where all is zero, and no parameter needs a gradient.
    sync, parameters = with_gradients([0.0], [0.0])
    assert sync.clip(1.0) == 0.0
    sync.zero()
    assert [parameter.grad for parameter in parameters] == [None, None]
    assert sync.clip(1.0) == 0.0
    sync.finish()
    assert [parameter.grad.tolist() for parameter in parameters] == [[0.0], [0.0]]


def test_squares_of_many_small_numbers_are_added_up_without_loss() -> None:
    """Added one after the other in fp32, the sum would stop to grow at 2**24 times a square."""
    sync, _ = with_gradients([1.0], [0.0])
    many = nn.Parameter(torch.zeros(1 << 25))
    sync = GradientSync({"many": many}, lambda name: False, World())
    many.grad = torch.ones(1 << 25)
    assert sync.clip(1e9) == pytest.approx(2**12.5, rel=1e-6)
