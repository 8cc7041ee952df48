"""A training that was killed, stopped or damaged goes on to the bit, or not at all."""

import dataclasses
import logging
import os
import random
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from demix.files import read_json, sha256_file
from demix.train import loop, stage, state
from demix.train.batches import Batch, Batches, batches_of
from demix.train.parallel import World
from support.forks import FORKS
from support.training import TRAIN, losses, shard_paths, train_command, train_here, train_model, train_until_killed


def test_a_killed_run_resumes_to_the_bit(tokens: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    train_here(train_command("demix", tokens, tmp_path / "whole"))
    killed = tmp_path / "killed"
    for wanted in (1, 2):
        train_until_killed(train_command("demix", tokens, killed), killed, wanted)
    assert "resuming at step" not in caplog.text
    train_here(train_command("demix", tokens, killed))
    assert "resuming at step" in caplog.text
    assert losses(killed / "metrics.jsonl") == losses(tmp_path / "whole" / "metrics.jsonl")
    files = sorted(path.relative_to(killed) for path in (killed / "model").rglob("*.safetensors"))
    assert len(files) == 4
    for file in files:
        assert sha256_file(killed / file) == sha256_file(tmp_path / "whole" / file)
    assert not list((killed / "checkpoints").glob("*/*")), "a finished run leaves no state behind"


def train_and_die(tokens: Path, folder: Path, step: int | None, write: int | None) -> None:
    """Train in this process, which kills itself when it draws the data of `step`, or at its `write`-th fsync."""
    draw, fsync, written = stage.batches_of, state.fsync, []

    def dying_batches(*arguments: object) -> Batches:
        batches = draw(*arguments)

        def batch(number: int) -> Batch:
            if number == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return batches.draw(number)

        return dataclasses.replace(batches, draw=batch)

    def dying_fsync(path: Path) -> None:
        fsync(path)
        written.append(path)
        if len(written) == write:
            os.kill(os.getpid(), signal.SIGKILL)

    stage.batches_of, state.fsync = dying_batches, dying_fsync
    places = folder / "model", folder / "metrics.jsonl", folder / "checkpoints"
    train_model("demix", TRAIN, shard_paths(tokens), *places)


def test_sigkill_at_any_step_and_inside_the_write_loses_nothing(tokens: Path, tmp_path: Path) -> None:
    chance = random.Random(1)
    # A checkpoint is four files and two folders; the run writes four of them.
    moments = [(chance.randrange(24), None) for _ in range(10)] + [(None, write) for write in range(1, 9)]
    chance.shuffle(moments)
    died = 0
    for moment in [*moments, (None, None)]:
        process = FORKS.Process(target=train_and_die, args=(tokens, tmp_path, *moment))
        process.start()
        process.join(120)
        # The last one, and any that began beyond its step, ran through.
        assert process.exitcode in (-signal.SIGKILL, 0)
        died += process.exitcode != 0
        if process.exitcode == 0:
            found = losses(tmp_path / "metrics.jsonl")
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()
            places = tmp_path / "model", tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
            train_model("demix", TRAIN, shard_paths(tokens), *places)
            assert found == losses(tmp_path / "metrics.jsonl")
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()
    assert died >= 12


def numbered(step: int, dev_loss: float | None = None) -> state.State:
    return state.State(step, {"a": torch.full((2,), float(step))}, {"x": {"b": torch.zeros(1)}}, [], dev_loss)


def test_the_newest_checkpoints_and_the_best_one_are_kept(tmp_path: Path) -> None:
    for step, dev_loss in ((5, 2.0), (10, 3.0), (15, 4.0), (20, 5.0)):
        state.save_state(tmp_path, numbered(step, dev_loss), World(), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000015", "step-00000020"]


def test_damaged_checkpoints_are_neither_kept_nor_in_the_way(tmp_path: Path) -> None:
    world = World()
    for step, dev_loss in ((5, 3.0), (10, 2.0), (15, 4.0), (20, 5.0)):
        state.save_state(tmp_path, numbered(step, dev_loss), world, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000015", "step-00000020"]
    for step in (10, 20):
        manifest = tmp_path / f"step-{step:08d}" / "manifest.json"
        manifest.write_text(manifest.read_text()[:20])
    assert state.newest_state(tmp_path, ("x",), world).step == 15
    # Newer than what was resumed from, and damaged: not the newest of those to keep.
    state.save_state(tmp_path, numbered(17), world, keep=1)
    assert state.newest_state(tmp_path, ("x",), world).step == 17
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000015", "step-00000017"]
    state.remove_states(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000015"]


def test_all_ranks_go_back_to_the_step_that_each_of_them_can_read(tmp_path: Path) -> None:
    """Two ranks, as two threads: one's file of the newest checkpoint is damaged, the other's is whole."""
    both, barrier = {"x": {"b": torch.zeros(1)}, "y": {"b": torch.ones(1)}}, threading.Barrier(2, timeout=60)
    for step in (5, 10):
        state.save_state(tmp_path, state.State(step, {"a": torch.zeros(2)}, both, []), World(), keep=2)
    damaged = tmp_path / "step-00000010" / state.expert_file("y")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    given: dict[int, list[float]] = {}

    class Rank:
        def __init__(self, number: int):
            self.number = number

        def sum(self, values: list[float]) -> list[float]:
            given[self.number] = values
            barrier.wait()
            total = [sum(each) for each in zip(*given.values(), strict=True)]
            barrier.wait()
            return total

    def resumed(number: int, expert: str) -> int:
        return state.newest_state(tmp_path, (expert,), Rank(number)).step

    with ThreadPoolExecutor(2) as ranks:
        assert [*ranks.map(resumed, range(2), both)] == [5, 5]


def test_the_best_checkpoint_stays_only_if_the_finished_model_is_worse(tmp_path: Path) -> None:
    for step, dev_loss in ((5, 2.0), (10, 3.0)):
        state.save_state(tmp_path, numbered(step, dev_loss), World(), keep=2)
    state.remove_states(tmp_path, dev_loss=2.5)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    state.remove_states(tmp_path, dev_loss=1.9)
    assert not tmp_path.exists()


def test_a_signal_after_a_checkpoint_leaves_that_as_it_is(tokens: Path, tmp_path: Path) -> None:
    training = dataclasses.replace(TRAIN, dev_blocks=2)
    paths = [*shard_paths(tokens), *shard_paths(tokens, split="dev")]
    places = tmp_path / "model", tmp_path / "metrics.jsonl", tmp_path / "checkpoints"

    def dying_after(original: object, wanted: int) -> object:
        def draw(*arguments: object) -> Batches:
            batches = original(*arguments)

            def batch(number: int) -> Batch:
                if number == wanted:
                    os.kill(os.getpid(), signal.SIGTERM)
                return batches.draw(number)

            return dataclasses.replace(batches, draw=batch)

        return draw

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "batches_of", dying_after(batches_of, 10))
        with pytest.raises(loop.StoppedError, match="step 10: a signal stopped training"):
            train_model("demix", training, paths, *places)
    (kept,) = tmp_path.glob("checkpoints/*/step-00000010")
    assert read_json(kept / "manifest.json")["dev_loss"] is not None


def test_a_checkpoint_never_continues_another_run(
    tokens: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    other = dataclasses.replace(TRAIN, learning_rate=1e-3)
    train_until_killed(train_command("dense", tokens, tmp_path), tmp_path)
    train_here(train_command("dense", tokens, tmp_path, other))
    assert "resuming" not in caplog.text
    assert f"{tmp_path / 'checkpoints'}: holds states of other settings" in caplog.text
    assert list(tmp_path.glob("checkpoints/*/step-*")), "the other run's state is kept"


def test_domains_in_another_order_are_another_run(
    tokens: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The stacked experts come in the order of the domains: state of another order would swap them."""
    train_until_killed(train_command("demix", tokens, tmp_path), tmp_path)
    command = train_command("demix", tokens, tmp_path)
    paths = [*map(str, shard_paths(tokens))]
    turned = [paths[::-1][paths.index(word)] if word in paths else word for word in command]
    caplog.set_level(logging.INFO)
    train_here(turned)
    assert "holds states of other settings" in caplog.text
    assert "resuming" not in caplog.text


@pytest.fixture(scope="module")
def undisturbed(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    """The losses of a dense training that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train_here(train_command("dense", tokens, folder))
    return losses(folder / "metrics.jsonl")


@pytest.mark.parametrize("name", ["metrics.jsonl", "shared.safetensors", "expert-dense.safetensors", "manifest.json"])
def test_damaged_state_is_named_and_the_one_before_taken(
    tokens: Path,
    tmp_path: Path,
    undisturbed: list[tuple[int, float, float]],
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    train_until_killed(train_command("dense", tokens, tmp_path), tmp_path, checkpoints=2)
    before, newest = sorted(path.parent for path in tmp_path.glob("checkpoints/*/step-*/manifest.json"))
    content = (newest / name).read_bytes()
    flipped = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
    (newest / name).write_bytes(flipped if name != "manifest.json" else content[:40])
    caplog.set_level(logging.INFO)
    train_here(train_command("dense", tokens, tmp_path))
    assert f"{newest / name}" in caplog.text
    assert f"resuming at step {int(before.name[5:])} of" in caplog.text
    assert losses(tmp_path / "metrics.jsonl") == undisturbed
