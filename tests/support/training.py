"""Tiny trainings, in this process and in one that is killed."""

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from demix.data.shards import TokenShard
from demix.files import read_json_lines
from demix.launch.job import Places
from demix.train import stage
from demix.train.adapt import Adaptation
from demix.train.batches import Batch, Batches, batches_of
from demix.train.stage import ModelTraining, Training
from support.cli import said
from support.forks import FORKS
from support.tokens import TRAINING

SIZES = {"layers": 2, "width": 32, "heads": 2, "context": 32}
TRAIN = Training(
    seed=1, architecture=SIZES, tokens=32 * 2 * 3 * 24, sequences=2, learning_rate=3e-3, warmup=0.1, clip=1.0,
    weight_decay=0.1, precision="fp32", threads=1, checkpoint_every=5,
)  # fmt: skip
ADAPT = Adaptation(
    seed=1, tokens=32 * 4 * 20, sequences=4, learning_rate_factor=0.5, warmup=0.1, clip=1.0, weight_decay=0.1,
    precision="fp32", threads=1, checkpoint_every=7, evaluate_every=5, patience=3, dev_blocks=6, forgetting_blocks=2,
    parent_blocks=5, parent_decay=0.3,
)  # fmt: skip


def shard_paths(tokens: Path, domains=TRAINING, split: str = "train") -> list[Path]:
    return [tokens / "tokens" / domain / f"{split}.arrow" for domain in domains]


def opened(tokens: Path) -> list[TokenShard]:
    return [TokenShard.open(path) for path in shard_paths(tokens)]


def train_model(
    kind: str, training: Training, shards: Sequence[Path], output: Path | None, metrics: Path | None, checkpoints: Path,
    replicas: Mapping[str, int] | None = None, **more: Any,
) -> None:  # fmt: skip
    """Train one model as the stage does. `more` are fields of `ModelTraining`."""
    stage.train_model(ModelTraining(kind, training, shards, **more), Places(output, metrics, checkpoints), replicas)


def stop_at(monkeypatch: pytest.MonkeyPatch, steps: set[int], domains=TRAINING) -> list[tuple[str, ...]]:
    """Stop trainings of `domains` by SIGTERM before each of `steps`, which is then removed.

    Returns a list to which every batch that is drawn adds its domains.
    """
    drawn: list[tuple[str, ...]] = []

    def stopping(*arguments: Any) -> Batches:
        batches, names = batches_of(*arguments), tuple(arguments[2])

        def batch(number: int) -> Batch:
            drawn.append(names)
            if names == tuple(domains) and number in steps:
                steps.remove(number)
                os.kill(os.getpid(), signal.SIGTERM)
            return batches.draw(number)

        return dataclasses.replace(batches, draw=batch)

    monkeypatch.setattr(stage, "batches_of", stopping)
    return drawn


def train_command(kind: str, tokens: Path, folder: Path, settings: Training = TRAIN) -> list[str]:
    return [
        sys.executable, "-m", "demix", "train", kind, *map(str, shard_paths(tokens)),
        "--settings", json.dumps(dataclasses.asdict(settings)), "--output", str(folder / "model"),
        "--metrics", str(folder / "metrics.jsonl"), "--checkpoints", str(folder / "checkpoints"),
    ]  # fmt: skip


def train_here(command: list[str]) -> None:
    """Do in this process what a command of `train_command` does."""
    assert said(command[3:]) is None


def train_until_killed(command: list[str], folder: Path, checkpoints: int = 1) -> None:
    """Run a training in a process until it has so many checkpoints, then kill the process."""
    process = FORKS.Process(target=train_here, args=(command,))
    process.start()
    deadline = time.monotonic() + 120
    while len(list(folder.glob("checkpoints/*/step-*/manifest.json"))) < checkpoints and process.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.join()
    assert not (folder / "metrics.jsonl").exists(), "it finished before it was killed"


def losses(metrics: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["gradient_norm"]) for row in read_json_lines(metrics)]
