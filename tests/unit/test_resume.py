"""A training that was killed, stopped or damaged goes on to the bit, or not at all."""

import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from demix.config.training import OptimizerSettings
from demix.errors import StoppedError
from demix.files import fingerprint
from demix.launch.job import Places
from demix.train import optimizers, stage, state, trainer
from demix.train.adapt import adapt
from demix.train.stage import ModelTraining
from support.cli import demix, succeeds
from support.forks import FORKS
from support.tokens import NOVEL
from support.training import (
    ADAPT,
    SIZES,
    TRAIN,
    dense_with_seeds,
    novel_shards,
    places,
    rows,
    shard_paths,
    stop_at,
    tensors,
    train_into,
    updates,
)

PAIR = {"experts": 2, "top_k": 2, "every": 1, "capacity": 2.0, "balance": 0.0}
FOUR = {"experts": 4, "top_k": 2, "every": 2, "capacity": 4.0, "balance": 0.1}
UPCYCLED = TRAIN.replace(architecture=SIZES | {"routed": FOUR})
ANCHORED = TRAIN.replace(architecture=SIZES | {"routed": PAIR}, weight_decay=0.0)
TABLES = TRAIN.replace(architecture=SIZES | {"bigrams": "experts", "value_embeddings": True})
MUON = TRAIN.replace(optimizer=OptimizerSettings(kind="muon", matrices=3.0))


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, its states after 10 and all updates, and a model of experts."""
    folder = tmp_path_factory.mktemp("run")
    dense_with_seeds(folder, shard_paths(tokens), [10, 24])
    train_into(folder / "demix", "demix", shard_paths(tokens))
    return folder


def seed(run: Path, step: int = 10) -> Path:
    return run / "seeds" / "dense" / f"step-{step:08d}"


TRAININGS: dict[str, Callable[[Path, Sequence[Path]], ModelTraining]] = {
    "experts": lambda run, shards: ModelTraining("demix", TRAIN, shards),
    "dropout": lambda run, shards: ModelTraining("demix", TRAIN.replace(dropout=0.25), shards),
    "fp16": lambda run, shards: ModelTraining("dense", TRAIN.replace(precision="fp16"), shards),
    "tables": lambda run, shards: ModelTraining("demix", TABLES, shards),
    "muon": lambda run, shards: ModelTraining("demix", MUON, shards),
    "seed": lambda run, shards: ModelTraining("demix", TRAIN, shards, branch=seed(run)),
    "restart": lambda run, shards: ModelTraining("demix", TRAIN, shards, branch=seed(run), restart=True),
    "upcycled": lambda run, shards: ModelTraining("routed", UPCYCLED, shards, branch=seed(run)),
    "whole model": lambda run, shards: ModelTraining("branched", TRAIN, shards, branch=seed(run)).of_expert(
        "scripture"
    ),
    "pair": lambda run, shards: ModelTraining("anchored", ANCHORED, shards, branch=run / "model").of_expert(
        "scripture"
    ),
}


def begun(name: str, run: Path, tokens: Path) -> tuple[Sequence[str], Callable[[Places], None]]:
    """The domains of a training, and what trains it into places."""
    if name == "adapted model":
        dev = shard_paths(tokens, split="dev")
        return NOVEL, partial(adapt, run / "model", novel_shards(tokens), ADAPT, training=dev)
    if name == "added expert":
        chosen = {"parent": "scripture", "parent_prior": 0.9}
        return NOVEL, partial(adapt, run / "demix" / "model", novel_shards(tokens), ADAPT, chosen=chosen)
    training = TRAININGS[name](run, shard_paths(tokens))
    return training.domains, partial(stage.train_model, training)


@pytest.mark.parametrize("name", [*TRAININGS, "adapted model", "added expert"])
def test_a_stopped_training_goes_on_to_the_bit(
    name: str, run: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "FIRST_SCALE", 2.0**36)
    monkeypatch.setattr(optimizers, "GROW_AFTER", 4)
    domains, train = begun(name, run, tokens)
    train(places(tmp_path / "whole"))
    whole = updates(tmp_path / "whole")
    assert whole[-1]["loss"] < whole[0]["loss"] or name == "pair"
    # Before its first update, and twice between checkpoints.
    stops = {whole[0]["step"] - 1, 13, 17}
    drawn = stop_at(monkeypatch, stops, domains)
    while stops:
        with pytest.raises(StoppedError):
            train(places(tmp_path / "again"))
    train(places(tmp_path / "again"))
    assert rows(tmp_path / "again") == rows(tmp_path / "whole")
    assert tensors(tmp_path / "again") == tensors(tmp_path / "whole") != {}
    steps = [step for _, step in drawn]
    assert steps == sorted(steps), "no update is done again"
    assert not list((tmp_path / "again" / "checkpoints").rglob("*.safetensors"))


def train_and_die(shards: Sequence[Path], folder: Path, step: int | None, write: int | None) -> None:
    """Train in this process, which kills itself when it draws the data of `step`, or at its `write`-th fsync."""
    fsync, written = state.fsync, []

    def dying_fsync(path: Path) -> None:
        fsync(path)
        written.append(path)
        if len(written) == write:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, {step}, number=signal.SIGKILL)
        patch.setattr(state, "fsync", dying_fsync)
        train_into(folder, "demix", shards)


def test_a_training_killed_at_any_step_or_write_goes_on_to_the_bit(tokens: Path, tmp_path: Path, run: Path) -> None:
    # On the way to the first checkpoint, of five files and two folders; after it, and between later ones.
    moments = [*((None, write) for write in (1, 4, 5, 6, 7, 8)), (12, None), (23, None)]
    for moment in moments:
        process = FORKS.Process(target=train_and_die, args=(shard_paths(tokens), tmp_path, *moment))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    train_into(tmp_path, "demix", shard_paths(tokens))
    assert rows(tmp_path) == rows(run / "demix")
    assert tensors(tmp_path) == tensors(run / "demix")


def end_and_die(words: Sequence[str], name: str) -> None:
    """Be the command `demix` and kill this process after the function `name` of `demix.train.stage`."""
    function = getattr(stage, name)

    def dying(*arguments: object) -> None:
        function(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(stage, name, dying)
    demix(*words)


@pytest.mark.parametrize("last", ["save_shared", "remove_states"])
def test_a_training_that_ended_is_never_lost(
    last: str, tokens: Path, tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at its first output, or when its checkpoints are gone; Snakemake deletes the outputs of a killed job."""
    at = places(tmp_path)
    settings = json.dumps(TRAIN.replace(checkpoint_every=1000).as_dict())
    words = ["train", "demix", *map(str, shard_paths(tokens)), "--settings", settings]
    words += ["--output", str(at.output), "--metrics", str(at.metrics), "--checkpoints", str(at.checkpoints)]
    process = FORKS.Process(target=end_and_die, args=(words, last))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    shutil.rmtree(at.output, ignore_errors=True)
    drawn = stop_at(monkeypatch, set())
    succeeds(*words)
    assert drawn == []
    assert (rows(tmp_path), tensors(tmp_path)) == (rows(run / "demix"), tensors(run / "demix"))


def test_what_changes_a_result_and_nothing_else_makes_another_training(run: Path, tokens: Path) -> None:
    """Trainings with the same fingerprint go on with one another's states."""
    shards = shard_paths(tokens)
    training = ModelTraining("demix", TRAIN, shards)
    others = [
        dataclasses.replace(training, kind="dense"),
        dataclasses.replace(training, settings=TRAIN.replace(learning_rate=1e-3)),
        # Of the same domains.
        dataclasses.replace(training, shards=shard_paths(tokens, split="test")),
        # Experts are stacked in the order of the domains.
        dataclasses.replace(training, shards=shards[::-1]),
        *(dataclasses.replace(training, branch=seed(run, step)) for step in (10, 24)),
        dataclasses.replace(training, branch=seed(run), restart=True),
        dataclasses.replace(training, share=2),
    ]
    found = {fingerprint(one.identity) for one in [training, *others]}
    assert len(found) == 1 + len(others)
    cheaper = TRAIN.replace(checkpoint_every=3, micro_sequences=1, shard_optimizer=True)
    assert fingerprint(dataclasses.replace(training, settings=cheaper, keep=(3,)).identity) in found


def test_states_of_another_training_are_left_alone(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = stop_at(monkeypatch, {7})
    with pytest.raises(StoppedError):
        train_into(tmp_path, "dense", shard_paths(tokens))
    drawn.clear()
    train_into(tmp_path, "dense", shard_paths(tokens), TRAIN.replace(learning_rate=1e-3))
    assert [step for _, step in drawn] == list(range(24))
    assert sorted(path.name for path in tmp_path.glob("checkpoints/*/step-*")) == ["step-00000005", "step-00000007"]


def test_a_signal_after_a_checkpoint_leaves_that_as_it_is(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [*shard_paths(tokens), *shard_paths(tokens, split="dev")]
    saved: list[int] = []
    save = trainer.save_state

    def noted(folder: Path, made: state.State, *how: object) -> None:
        saved.append(made.step)
        save(folder, made, *how)

    monkeypatch.setattr(trainer, "save_state", noted)
    stop_at(monkeypatch, {10})
    with pytest.raises(StoppedError):
        train_into(tmp_path, "demix", shards, TRAIN.replace(dev_blocks=2))
    assert saved == [5, 10]
