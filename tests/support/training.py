"""Tiny trainings in this process."""

import dataclasses
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from demix.data.shards import TokenShard
from demix.files import read_json_lines
from demix.launch.job import Places
from demix.train import adapt, stage
from demix.train.adapt import Adaptation
from demix.train.batches import Batch, Batches, batches_of
from demix.train.branch import move_seed
from demix.train.stage import ModelTraining, Training
from support.tokens import TRAINING

balanced_batches = partial(batches_of, "by_domain")
SIZES = {"layers": 2, "width": 32, "heads": 2, "context": 32}
RECIPE = {"seed": 1, "warmup": 0.1, "clip": 1.0, "weight_decay": 0.1, "precision": "fp32", "threads": 1}
# 24 steps of 192 tokens on three domains.
TRAIN = Training(
    **RECIPE, architecture=SIZES, tokens=32 * 2 * 3 * 24, sequences=2, learning_rate=3e-3, checkpoint_every=5
)
ADAPT = Adaptation(
    **RECIPE,
    tokens=32 * 4 * 20,
    sequences=4,
    learning_rate_factor=0.5,
    checkpoint_every=7,
    evaluate_every=5,
    patience=3,
    dev_blocks=6,
    forgetting_blocks=2,
)


def shard_paths(tokens: Path, domains: Sequence[str] = TRAINING, split: str = "train") -> list[Path]:
    return [tokens / "tokens" / domain / f"{split}.arrow" for domain in domains]


def novel_shards(tokens: Path) -> tuple[Path, Path]:
    """The train and dev tokens of the novel domain."""
    return tokens / "tokens" / "fantasy" / "train.arrow", tokens / "tokens" / "fantasy" / "dev.arrow"


def opened(tokens: Path) -> list[TokenShard]:
    return [TokenShard.open(path) for path in shard_paths(tokens)]


def train_model(
    kind: str,
    training: Training,
    shards: Sequence[Path],
    output: Path | None,
    metrics: Path | None,
    checkpoints: Path,
    **more: Any,
) -> None:
    """Train one model as the stage does. `more` are fields of `ModelTraining`."""
    stage.train_model(ModelTraining(kind, training, shards, **more), Places(output, metrics, checkpoints))


def places(folder: Path) -> Places:
    return Places(folder / "model", folder / "metrics.jsonl", folder / "checkpoints")


def train_into(folder: Path, kind: str, shards: Sequence[Path], training: Training = TRAIN, **more: Any) -> Path:
    """Train one model with its places below `folder`, which is returned."""
    stage.train_model(ModelTraining(kind, training, shards, **more), places(folder))
    return folder


def dense_with_seeds(
    folder: Path, shards: Sequence[Path], steps: Sequence[int], training: Training = TRAIN
) -> dict[int, Path]:
    """Train a dense model into `folder`, and return its states after these `steps` as the seeds of other trainings."""
    train_into(folder, "dense", shards, training, keep=tuple(steps))
    seeds = {step: folder / "seeds" / "dense" / f"step-{step:08d}" for step in steps}
    for step, seed in seeds.items():
        identity = ModelTraining("dense", training, shards).identity
        assert move_seed(identity, step, folder / "checkpoints", seed)
    return seeds


def tensors(folder: Path) -> dict[str, bytes]:
    """The files of tensors of the model that was trained into `folder`."""
    files = (folder / "model").rglob("*.safetensors")
    return {path.relative_to(folder / "model").as_posix(): path.read_bytes() for path in files}


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics of a training into `folder`, without the times."""
    found = read_json_lines(folder / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in found]


def updates(folder: Path) -> list[dict[str, Any]]:
    """The rows of updates alone."""
    return [row for row in rows(folder) if "loss" in row]


def stop_at(
    monkeypatch: pytest.MonkeyPatch,
    steps: set[int],
    domains: Sequence[str] = TRAINING,
    number: signal.Signals = signal.SIGTERM,
) -> list[tuple[tuple[str, ...], int]]:
    """Send this process a signal before each of `steps` of a training of `domains`; the step is then removed.

    Returns a list to which every batch that is drawn adds its domains and its step.
    """
    drawn: list[tuple[tuple[str, ...], int]] = []

    def stopping(*arguments: Any) -> Batches:
        batches, names = batches_of(*arguments), tuple(arguments[2])

        def batch(step: int) -> Batch:
            drawn.append((names, step))
            if names == tuple(domains) and step in steps:
                steps.remove(step)
                os.kill(os.getpid(), number)
            return batches.draw(step)

        return dataclasses.replace(batches, draw=batch)

    monkeypatch.setattr(stage, "batches_of", stopping)
    monkeypatch.setattr(adapt, "batches_of", stopping)
    return drawn
