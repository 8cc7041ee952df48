"""The stages that train: models from scratch, the trials of a learning-rate sweep, and experts of novel domains."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from demix.commands.stages import run_command
from demix.config.adaptation import PARENT_BLOCKS
from demix.config.evaluation import DECAY
from demix.config.training import Execution, fingerprinted
from demix.errors import DemixError
from demix.evaluate.choice import choose_parent, own_dev_losses
from demix.files import sha256_file
from demix.launch.job import Cluster, Places, TrainingJob, fingerprint_of
from demix.launch.local import launched, world_size
from demix.model.directory import describe
from demix.run.placement import place, place_experts
from demix.track.live import streaming
from demix.train import adapt as adapting
from demix.train.branch import move_seed
from demix.train.stage import ModelTraining, Training, train_model
from demix.train.sweep import chosen_rate

T = TypeVar("T", Training, adapting.Adaptation)


def train(
    kind: str,
    shards: list[Path],
    settings: Training,
    metrics: Path,
    checkpoints: Path,
    output: Path | None = None,
    ranks: int = 1,
    how: Execution | None = None,
    cluster: Cluster | None = None,
    live: str = "",
    learning_rate_from: Path | None = None,
    branch: Path | None = None,
    keep: Sequence[str] = (),
    expert: str = "",
    restart: bool = False,
) -> None:
    """Train one model from scratch or from a dense warm start, or resume its training.

    `shards` are tokens/<domain>/train.arrow of each training domain, or clusters/<clustering>/shards/<cluster>/
    train.arrow of each cluster, and the dev.arrow to evaluate on. If `learning_rate_from`, an output of choose-rate, is
    given, the learning rate is read from it. `branch` is an output of seed: the state of a dense training, from which
    this training starts. The dense training's schedule then goes on; with `restart`, and for kinds with routers, the
    schedule starts again with fresh moments. `keep` lists the numbers of updates after which the state is kept for
    `seed`. With `expert`, only the expert of this domain or cluster is trained, as a whole model, with its share of the
    tokens. `live` says where metrics are sent while training: JSON with uri, experiment, run and config. Without
    `output` only the metrics are kept, as for a trial of a sweep, and divergence is not an error.
    """
    if wrong := [step for step in keep if not step.isdecimal() or not int(step)]:
        raise DemixError("--keep", f"has {wrong[0]}, which is not a number of updates", "write numbers as in 61,122")
    given, steps = _given(settings, how, learning_rate_from), tuple(map(int, keep))
    training = ModelTraining(kind, given, shards, branch=branch, restart=restart, keep=steps)
    if expert:
        training = training.of_expert(expert)
    _train(training, Places(output, metrics, checkpoints), ranks, cluster, live)


def seed(
    kind: str,
    shards: list[Path],
    settings: Training,
    step: int,
    output: Path,
    kept: Path,
    checkpoints: Path,
    ranks: int = 1,
    how: Execution | None = None,
    cluster: Cluster | None = None,
    learning_rate_from: Path | None = None,
) -> None:
    """Move the kept state of a dense training to `output`, so that other trainings can start from it.

    `kept` is the checkpoint folder of the training, in which `train --keep` kept the state after `step` updates. If
    that state is missing, the training is repeated up to that step.
    """
    training = ModelTraining(kind, _given(settings, how, learning_rate_from), shards, until=step)
    if not 0 < step <= training.steps:
        raise DemixError(f"--step {step}", f"is not from 1 to {training.steps}", "give the number of an update")
    # A process that a launcher has started (a rank) trains, because there was no state to move.
    if "WORLD_SIZE" in os.environ or not move_seed(training.identity, step, kept, output):
        _train(training, Places(output, None, checkpoints), ranks, cluster)


def adapt(
    model: Path,
    shards: list[Path],
    settings: adapting.Adaptation,
    output: Path,
    metrics: Path,
    checkpoints: Path,
    scores: Path | None = None,
    training: Sequence[str] = (),
    ranks: int = 1,
    how: Execution | None = None,
    cluster: Cluster | None = None,
    live: str = "",
) -> None:
    """Adapt a model to a novel domain: add an expert (DEMix-DAPT), or train a dense model further (Dense-DAPT).

    `shards` are train.arrow and dev.arrow of the novel domain; for a dense model, the dev.arrow of each training domain
    follows. `scores` is the folder of score tables of a model with experts, by which the parent is chosen, and
    `training` lists that model's training domains. `output` receives the files of the expert, or the adapted model. An
    expert starts as a copy of its likeliest parent; an expert that is a whole model starts as the average of all
    experts, weighted by the posterior. `live` is as in `train`.
    """
    if len(shards) < 2:
        raise DemixError(shards[0], "is the only shard", "give train.arrow and dev.arrow of the novel domain")
    places, adaptation, domain = Places(output, metrics, checkpoints), _given(settings, how), shards[0].parent.name
    pair, rest = (shards[0], shards[1]), shards[2:]
    place_experts([domain], adaptation.sequences, world_size(ranks))
    if scores is None:
        about: list[object] = ["dense"]
        work = partial(adapting.adapt, model, pair, adaptation, training=rest)
    elif rest:
        raise DemixError(rest[0], "is one shard too many", "give train.arrow and dev.arrow of the novel domain")
    else:
        # The first tables choose the parent. Forgetting is measured against the losses of the second tables.
        read = [scores / f"{domain}.dev" / f"{name}.parquet" for name in training]
        read += [scores / f"{name}.dev" / f"{name}.parquet" for name in training]
        about = ["demix", training, [sha256_file(path) for path in read if path.exists()]]
        # A missing table must be reported before any rank starts.
        chosen = choose_parent(scores, domain, training, blocks=PARENT_BLOCKS, decay=DECAY)
        unchanged = own_dev_losses(scores, training, adaptation.forgetting_blocks)
        work = partial(adapting.adapt, model, pair, adaptation, chosen=chosen, unchanged=unchanged)
    described = describe(model)
    about += [fingerprinted(adaptation), described.shared_sha256, sorted(places.results)]
    steps = adaptation.steps(described.architecture.context)
    identity = fingerprint_of(about, shards)
    job = TrainingJob(tuple(sys.argv[1:]), identity, places, ranks, adaptation.threads, steps)
    _do("adaptation", job, cluster, live, work)


def _given(settings: T, how: Execution | None, rate_from: Path | None = None) -> T:
    """The settings of a training, with those of time and memory from `how` and the learning rate from a file."""
    more: dict[str, Any] = {} if how is None else how.as_dict()
    return settings.replace(**more | ({"learning_rate": chosen_rate(rate_from)} if rate_from else {}))


def _train(training: ModelTraining, places: Places, ranks: int, cluster: Cluster | None, live: str = "") -> None:
    """Train a model."""
    # A wrong number of ranks must be reported before any process starts.
    place(training.kind, training.domains, training.settings.sequences, world_size(ranks))
    # The kept results belong to the identity: a trial of a learning rate keeps no model, so it is not a whole training.
    about = [training.identity, sorted(places.results), *filter(None, [training.until])]
    fingerprint, steps = fingerprint_of(about, training.shards), training.until or training.steps
    work = partial(train_model, training)
    job = TrainingJob(tuple(sys.argv[1:]), fingerprint, places, ranks, training.settings.threads, steps)
    _do("training", job, cluster, live, work)


def _do(kind: str, job: TrainingJob, cluster: Cluster | None, live: str, work: Callable[[Places], None]) -> None:
    """Do `job`, by `work` in this process or by other processes, and send its metrics meanwhile."""

    def streamed(at: Places) -> None:
        with streaming(live, kind, at.checkpoints, at.metrics):
            work(at)

    launched(job, cluster, run_command, streamed)
