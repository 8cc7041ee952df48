"""What a training computes before its model does: learning rates, the order of data, batches."""

import math
import shutil
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from demix.config.counts import masked_places
from demix.config.training import RateSchedule
from demix.data.order import block_count, drawn_block, seen_blocks
from demix.data.shards import TokenShard, tokenize
from demix.data.tokenizer import train_tokenizer
from demix.files import seed_for
from demix.model.gpt import MASKED
from demix.run.placement import place
from demix.train.batches import batches_of, open_shards
from demix.train.parallel import World
from demix.train.schedule import Optimization
from support.errors import refused
from support.shards import shard_of
from support.tokens import NOVEL
from support.training import shard_paths


@settings(max_examples=200, deadline=None)
@given(
    begin=st.integers(0, 20),
    steps=st.integers(1, 40),
    warmup=st.sampled_from([0.0, 0.08, 0.3, 1.0]),
    kind=st.sampled_from([None, "linear", "cosine", "wsd"]),
    end=st.sampled_from([0.0, 0.25]),
    share=st.sampled_from([0.02, 0.2, 0.5]),
    stretch=st.sampled_from([None, 1.1, 2.0]),
)
def test_rates_rise_to_their_peak_and_fall_between_two_points(begin, steps, warmup, kind, end, share, stretch) -> None:
    how = {"kind": kind, "end": end} | ({"share": share} if kind == "wsd" else {"stretch": stretch})
    schedule = None if kind is None else RateSchedule(**how)
    optimization = Optimization(
        steps=begin + steps, begin=begin, warmup=warmup, learning_rate=3.0, learning_rate_schedule=schedule
    )
    rising = math.ceil(warmup * steps)
    last = steps * (stretch or 1) if kind in ("linear", "cosine") else steps
    first = steps - math.ceil(share * steps) if kind == "wsd" else rising
    for step in range(steps + 1):
        # The fall takes one update at least.
        fallen = np.interp(step, [min(first, last - 1), last], [0, 1])
        height = (1 + math.cos(math.pi * fallen)) / 2 if kind == "cosine" else 1 - fallen
        lowest = end if kind else 0.0
        expected = (step + 1) / rising if step < rising else lowest + (1 - lowest) * height
        assert optimization.learning_rate_at(begin + step) == pytest.approx(3 * expected, abs=1e-12)


def test_a_training_may_end_before_its_schedule() -> None:
    optimization = Optimization(steps=30, learning_rate=1.0)
    assert (optimization.begin, optimization.end) == (0, 30)
    assert optimization.replace(until=7).end == 7


# The order of data.


def in_order(count: int, seed: int, name: str, number: int) -> int:
    """The block that is drawn as `number`: a random order for each epoch, which depends on seed and name alone."""
    epoch, place_of = divmod(number, count)
    return np.random.Generator(np.random.PCG64(seed_for(seed, "order", name, epoch))).permutation(count)[place_of]


@given(st.integers(1, 9), st.integers(0, 3), st.sampled_from(["law", "news"]))
def test_each_epoch_draws_every_block_once(count: int, seed: int, name: str) -> None:
    drawn = [drawn_block(count, seed, name, number) for number in range(3 * count)]
    assert drawn == [in_order(count, seed, name, number) for number in range(3 * count)]
    assert Counter(drawn) == dict.fromkeys(range(count), 3)
    shard = shard_of(np.zeros(count * 4 + 3, np.uint16))
    assert block_count(shard, name, 4) == count
    for some in range(count + 2):
        seen = seen_blocks(shard, name, 4, seed, some)
        assert seen.dtype == np.bool_
        assert np.flatnonzero(seen).tolist() == sorted(drawn[: min(some, count)])


def test_a_domain_shorter_than_a_block_is_refused() -> None:
    with refused("domain law"):
        block_count(shard_of(np.zeros(3, np.uint16)), "law", 4)


# Batches.

DOMAINS, LENGTH = ("law", "news", "code"), 8


def shards_of(seed: int) -> list[TokenShard]:
    chance = np.random.default_rng(seed)
    return [shard_of(chance.integers(0, 99, size).astype(np.uint16)) for size in (40, 71, 12)]


def block_of(shard: TokenShard, number: int) -> list[int]:
    """The token before a block and its own."""
    flat = np.concatenate([[99], shard.read(0, len(shard))]).astype(int)
    return flat[number * LENGTH : (number + 1) * LENGTH + 1].tolist()


def drawn_plainly(how: str, shards: list[TokenShard], step: int, sequences: int) -> list[list[tuple[int, int, int]]]:
    """Domain, block and number of each sequence of a step, by group."""
    counts = [len(shard) // LENGTH for shard in shards]
    if how == "proportional":
        every = [(d, block) for d, count in enumerate(counts) for block in range(count)]
        total = len(DOMAINS) * sequences
        return [
            [(*every[in_order(len(every), 5, "all domains", step * total + number)], number) for number in range(total)]
        ]
    groups = [
        [(d, in_order(counts[d], 5, name, step * sequences + number), number) for number in range(sequences)]
        for d, name in enumerate(DOMAINS)
    ]
    return groups if how == "by_domain" else [[one for group in groups for one in group]]


@settings(max_examples=60, deadline=None)
@given(
    how=st.sampled_from(["by_domain", "mixed", "proportional"]),
    ranks=st.sampled_from([None, 1, 3, 6]),
    sequences=st.integers(2, 4),
    step=st.integers(0, 6),
    objective=st.sampled_from(["clm", "mlm"]),
)
def test_batches_are_those_of_a_plain_loop_on_any_number_of_ranks(how, ranks, sequences, step, objective) -> None:
    shards = shards_of(3)
    kind = {"by_domain": "demix", "mixed": "dense", "proportional": "dense_unbalanced"}[how]
    groups = drawn_plainly(how, shards, step, sequences)
    places = [None] if ranks is None else place(kind, DOMAINS, sequences, ranks)
    for placement in places:
        made = batches_of(how, shards, DOMAINS, sequences, LENGTH, 5, placement, objective)
        assert made.tokens == len(DOMAINS) * sequences * LENGTH
        # 15% of 8 tokens, rounded.
        assert made.targets == (len(DOMAINS) * sequences if objective == "mlm" else None)
        batch = made.draw(step)
        part = groups
        if placement is not None:
            part = [groups[expert][placement.first : placement.last] for expert in placement.experts]
        assert batch.domains.tolist() == [[d for d, *_ in group] for group in part]
        names = [[(DOMAINS[d], n) for d, _, n in group] for group in part]
        if how == "mixed":
            names = [[(name, n % sequences) for name, n in group] for group in names]
        assert batch.seeds.tolist() == [[seed_for(5, "dropout", step, *one) for one in group] for group in names]
        blocks = torch.tensor([[block_of(shards[d], block) for d, block, _ in group] for group in part])
        if objective == "clm":
            assert torch.equal(batch.inputs, blocks[..., :-1])
            assert torch.equal(batch.targets, blocks[..., 1:])
            assert batch.places is None
        else:
            own = blocks[..., 1:]
            assert batch.places.shape == (*own.shape[:2], 1)
            assert torch.equal(batch.targets, own.gather(-1, batch.places))
            changed = batch.inputs != own
            assert not changed.scatter(-1, batch.places, False).any(), "only targets are hidden"
        for name, tensor in vars(batch.part(1, 2).to(torch.device("cpu"))).items():
            whole = getattr(batch, name)
            assert tensor is whole is None or torch.equal(tensor, whole[:, 1:2])
        assert batch.inputs.dtype == batch.targets.dtype == batch.domains.dtype == batch.seeds.dtype == torch.int64


def test_fifteen_of_a_hundred_tokens_are_targets() -> None:
    assert [masked_places(length) for length in (2, 10, 32, 256, 1024)] == [1, 2, 5, 38, 154]


def test_masks_follow_from_seed_step_domain_and_number() -> None:
    """The draw of a sequence, as a training that goes on has to repeat it."""
    shard = shard_of(np.arange(400, dtype=np.uint16) % 50)
    batches = batches_of("by_domain", [shard, shard], ["law", "news"], 3, 40, 7, None, "mlm")
    assert batches.targets == 2 * 3 * 6
    batch = batches.draw(2)
    for d, name in enumerate(["law", "news"]):
        for number in range(3):
            generator = np.random.Generator(np.random.PCG64(seed_for(7, "masks", 2, name, number)))
            places = np.sort(generator.permutation(40)[:6])
            assert batch.places[d, number].tolist() == places.tolist()
            how, others = generator.random(6), generator.integers(100, size=6)
            own = batch.targets[d, number].numpy()
            expected = np.where(how < 0.8, MASKED, np.where(how < 0.9, others, own))
            assert batch.inputs[d, number, places].tolist() == expected.tolist()


# Shards of tokens.
@pytest.mark.parametrize("rank", range(2))
def test_one_rank_verifies_a_shard(tokens: Path, tmp_path: Path, rank: int) -> None:
    first, second, third = shard_paths(tokens)
    damaged = Path(shutil.copytree(second.parent, tmp_path / "tokens" / second.parent.name), second.name)
    damaged.write_bytes(second.read_bytes()[:-900] + bytes(4) + second.read_bytes()[-896:])
    with refused(damaged) if rank else nullcontext():
        assert len(open_shards([first, damaged, third], World(rank, 2))) == 3


def test_shards_of_another_tokenizer_are_refused(tokens: Path, tmp_path: Path) -> None:
    text, other = tokens / "corpus" / NOVEL[0] / "train.parquet", tmp_path / NOVEL[0] / "train.arrow"
    train_tokenizer([text], 400, tmp_path / "tokenizer.json")
    tokenize(tmp_path / "tokenizer.json", text, other)
    with refused(other):
        open_shards([shard_paths(tokens)[0], other, other], World())
