"""The commands that train: from scratch, with the learning rates of a sweep, and on novel domains."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demix.commands.options import (
    Checkpoints,
    ExecutionOverrides,
    Live,
    Metrics,
    Output,
    Ranks,
    Settings,
    Site,
    TrainShards,
)
from demix.config.adaptation import PARENT_BLOCKS
from demix.config.evaluation import DECAY
from demix.config.models import KINDS
from demix.config.training import fingerprinted
from demix.errors import DemixError
from demix.files import sha256_file
from demix.launch.job import Places, TrainingJob, fingerprint_of
from demix.settings import settings_from
from demix.track.live import streaming

if TYPE_CHECKING:
    from demix.train.adapt import Adaptation
    from demix.train.stage import ModelTraining

app = typer.Typer()

Kind = Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.")]
RateFrom = Annotated[
    Path | None, typer.Option(help="Output of choose-rate, whose learning rate replaces that of the settings.")
]


@app.command()
def train(
    kind: Kind,
    shards: TrainShards,
    settings: Settings,
    output: Annotated[Path, typer.Option(help="The model directory.")],
    metrics: Metrics,
    checkpoints: Checkpoints,
    ranks: Ranks = 1,
    how: ExecutionOverrides = "",
    cluster: Site = "",
    live: Live = "",
    learning_rate_from: RateFrom = None,
    branch: Annotated[
        Path | None, typer.Option(help="Output of seed, the state of a dense training with which this one begins.")
    ] = None,
    keep: Annotated[
        str,
        typer.Option(help="Numbers of updates, separated by commas, after which the state is kept for `demix seed`."),
    ] = "",
    expert: Annotated[
        str,
        typer.Option(
            help="Train the expert of this domain or cluster of SHARDS alone, which is a whole model, with its share "
            "of the tokens."
        ),
    ] = "",
    schedule: Annotated[
        str, typer.Option(help="After --branch: continue the parent's schedule, or restart with fresh moments.")
    ] = "continue",
) -> None:
    """Train one model from scratch or from a seed, or resume its training."""
    training = _training(
        kind, shards, _merged(settings, how), learning_rate_from, branch=branch, schedule=schedule, keep=_steps(keep)
    )
    if expert:
        training = training.alone(expert)
    _train(training, Places(output, metrics, checkpoints), _Launch(ranks, cluster, live))


@app.command()
def seed(
    kind: Kind,
    shards: TrainShards,
    settings: Settings,
    step: Annotated[int, typer.Option(min=1, help="Number of updates of the training after which the state is taken.")],
    output: Annotated[Path, typer.Option(help="The folder of the state, seeds/<model>/step-<n>.")],
    kept: Annotated[Path, typer.Option(help="Checkpoints of the training, where `train --keep` left the state.")],
    checkpoints: Checkpoints,
    ranks: Ranks = 1,
    how: ExecutionOverrides = "",
    cluster: Site = "",
    learning_rate_from: RateFrom = None,
) -> None:
    """Move the kept state of a dense training to a place of its own, for other trainings to begin with.

    Without such a state the training is done again up to that step.
    """
    from demix.train.branch import take_seed

    training = _training(kind, shards, _merged(settings, how), learning_rate_from, until=step)
    if step > training.steps:
        raise DemixError(f"--step {step}", f"is beyond the {training.steps} updates of the training", "lower it")
    # Ranks that a launcher has started train, because there was no state to take.
    if "WORLD_SIZE" in os.environ or not take_seed(training.identity, step, kept, output):
        _train(training, Places(output, None, checkpoints), _Launch(ranks, cluster))


@app.command()
def sweep(
    kind: Kind,
    shards: TrainShards,
    settings: Settings,
    metrics: Metrics,
    checkpoints: Checkpoints,
    ranks: Ranks = 1,
    how: ExecutionOverrides = "",
    cluster: Site = "",
) -> None:
    """Train a model with one learning rate of a sweep. Only the metrics are kept; divergence is not an error."""
    training = _training(kind, shards, _merged(settings, how))
    _train(training, Places(None, metrics, checkpoints), _Launch(ranks, cluster))


@app.command("join-branches")
def join_branches_of(
    branches: Annotated[list[Path], typer.Argument(help="Model directories with one expert each, a whole model.")],
    metrics_of: Annotated[str, typer.Option(help="The metrics of their trainings, in the same order, with commas.")],
    output: Annotated[Path, typer.Option(help="The model directory.")],
    metrics: Metrics,
) -> None:
    """Join experts that are whole models, each trained by itself, to one model."""
    from demix.model.merge import join_branches, join_metrics

    join_branches(branches, output)
    join_metrics([Path(path) for path in metrics_of.split(",")], metrics)


@app.command("average-experts")
def average_experts(
    model: Annotated[Path, typer.Argument(help="A model directory.")],
    experts: Annotated[str, typer.Option(help="The experts to average, separated by commas.")],
    output: Annotated[Path, typer.Option(help="The directory of the average.")],
    scores: Annotated[Path | None, typer.Option(help="The model's folder of score tables, for a prior.")] = None,
    domain: Annotated[str, typer.Option(help="The domain whose cached prior on dev gives the weights.")] = "",
    blocks: Annotated[int, typer.Option(min=1, help="Dev blocks of the prior.")] = 100,
    decay: Annotated[float, typer.Option(help="Lambda of the prior (Eq. 7).")] = 0.3,
) -> None:
    """Average the parameters of experts, by equal weights or by the cached prior of a domain."""
    from demix.evaluate.choice import choose_parent
    from demix.model.merge import merge_experts

    names = experts.split(",")
    weights = dict.fromkeys(names, 1 / len(names))
    if scores is not None:
        weights = choose_parent(scores, domain, names, blocks=blocks, decay=decay)["priors"]
    merge_experts(model, weights, output, again=True)


@app.command("merge-routed")
def merge_routed_of(
    model: Annotated[Path, typer.Argument(help="A directory of a model of several experts.")],
    shards: Annotated[list[Path], typer.Argument(help="tokens/<domain>/dev.arrow of each expert to merge, in order.")],
    output: Annotated[Path, typer.Option(help="The directory of the merged model.")],
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Merge domain experts, without training, into a model whose tokens choose two of them in every layer."""
    from demix.model.device import set_threads
    from demix.model.merge_routed import merge_routed

    set_threads(threads)
    merge_routed(model, {path.parent.name: path for path in shards}, output, again=True)


@app.command("choose-rate")
def choose_rate(
    metrics: Annotated[list[Path], typer.Argument(help="Metrics of `demix sweep`, each <learning rate>.jsonl.")],
    output: Output,
) -> None:
    """Choose the largest learning rate of a sweep that does not diverge, and record the reason."""
    from demix.train.sweep import choose_rate as run

    print(f"{output.stem}: {run(metrics, output)}")


@app.command()
def adapt(
    model: Annotated[Path, typer.Argument(help="The model with experts, to which one is added, or the dense model.")],
    shards: Annotated[
        list[Path],
        typer.Argument(
            help="train.arrow and dev.arrow of the novel domain; for a dense model, then the training domains' dev."
        ),
    ],
    settings: Settings,
    metrics: Metrics,
    checkpoints: Checkpoints,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the files of the expert, by default that of the model; or the adapted model's."),
    ] = None,
    scores: Annotated[
        Path | None, typer.Option(help="The folder of score tables of a model with experts, which choose the parent.")
    ] = None,
    training: Annotated[str, typer.Option(help="With --scores, the model's training domains, with commas.")] = "",
    ranks: Ranks = 1,
    how: ExecutionOverrides = "",
    cluster: Site = "",
    live: Live = "",
    init: Annotated[
        str,
        typer.Option(
            help="What the expert begins with: the likeliest parent, or the average of all experts by posterior. By "
            "default the average for experts that are whole models, else the parent."
        ),
    ] = "",
) -> None:
    """Adapt a model to a novel domain: add an expert (DEMix-DAPT), or train a dense model further (Dense-DAPT)."""
    from demix.evaluate.choice import choose_parent, own_dev_losses
    from demix.train.adapt import adapt as run

    launch, places = _Launch(ranks, cluster, live), Places(output or (model if scores else None), metrics, checkpoints)
    pair, rest, adaptation = _adaptation(shards, _merged(settings, how), launch)
    if scores is None:
        work = partial(run, model, pair, adaptation, training=rest)
        _adapt(["dense"], model, shards, adaptation, places, launch, work)
        return
    if rest:
        raise DemixError(rest[0], "is one shard too many", "give train.arrow and dev.arrow of the novel domain")
    domain, names = pair[0].parent.name, training.split(",")
    # The first tables choose the parent. Forgetting is measured against the losses of the second tables.
    read = [scores / f"{domain}.dev" / f"{name}.parquet" for name in names]
    read += [scores / f"{name}.dev" / f"{name}.parquet" for name in names]
    about = ["demix", names, *filter(None, [init]), [sha256_file(path) for path in read if path.exists()]]
    # A missing table must be reported before any rank starts.
    chosen = choose_parent(scores, domain, names, blocks=PARENT_BLOCKS, decay=DECAY)
    unchanged = own_dev_losses(scores, names, adaptation.forgetting_blocks)
    work = partial(run, model, pair, adaptation, chosen=chosen, unchanged=unchanged, init=init)
    _adapt(about, model, shards, adaptation, places, launch, work)


def run_command(arguments: Sequence[str]) -> None:
    """Run the command of one stage in this process. Errors are raised to the caller."""
    # typer ends an interrupted command with a status and no exception.
    if status := app(list(arguments), standalone_mode=False):
        raise SystemExit(status)


@dataclass(frozen=True)
class _Launch:
    """How a training is launched: by how many ranks, on which cluster, and where its metrics go while it runs."""

    ranks: int
    cluster: str
    live: str = ""

    def do(self, job: TrainingJob, places: Places, work: Callable[[Places], None]) -> None:
        """Have the job done by other processes, or by `work` in this one, with its results in `places`."""
        from demix.launch.local import launched

        launched(job, places, self.cluster, run_command, work)


def _training(
    kind: str, shards: list[Path], settings: Mapping[str, Any] | str, rate_from: Path | None = None, **more: Any
) -> "ModelTraining":
    """The training of a model, with the learning rate in the file `rate_from`. `more` are fields of `ModelTraining`."""
    from demix.train.stage import ModelTraining, Training
    from demix.train.sweep import chosen_rate

    given = settings_from(Training, settings)
    if rate_from is not None:
        given = replace(given, learning_rate=chosen_rate(rate_from))
    return ModelTraining(kind, given, shards, **more)


def _train(training: "ModelTraining", places: Places, launch: _Launch) -> None:
    """Train a model."""
    from demix.launch.local import world_size
    from demix.run.placement import place
    from demix.train.stage import train_model

    # A wrong number of ranks must be reported before any process starts.
    place(training.kind, training.domains, training.settings.sequences, world_size(launch.ranks))
    # A trial of a rate keeps no model: what it has done is not a training's.
    about = [training.identity, sorted(places.results), *filter(None, [training.until])]
    job = TrainingJob(
        command=tuple(sys.argv[1:]),
        fingerprint=fingerprint_of(about, training.shards),
        outputs=places.results,
        ranks=launch.ranks,
        threads=training.settings.threads,
        checkpoints=places.checkpoints,
        steps=training.until or training.steps,
    )

    def work(at: Places) -> None:
        with streaming(launch.live, "training", at.checkpoints, at.metrics):
            train_model(training, at)

    launch.do(job, places, work)


def _adaptation(
    shards: list[Path], settings: Mapping[str, Any] | str, launch: _Launch
) -> tuple[tuple[Path, Path], list[Path], "Adaptation"]:
    """The shards of the novel domain, the others, and the settings of the adaptation, whose ranks fit."""
    from demix.launch.local import world_size
    from demix.run.placement import place_experts
    from demix.train.adapt import Adaptation

    if len(shards) < 2:
        raise DemixError(shards[0], "is the only shard", "give train.arrow and dev.arrow of the novel domain")
    train_shard, dev_shard, *others = shards
    adaptation = settings_from(Adaptation, settings)
    place_experts([train_shard.parent.name], adaptation.sequences, world_size(launch.ranks))
    return (train_shard, dev_shard), others, adaptation


def _adapt(
    about: Sequence[object],
    model: Path,
    shards: list[Path],
    adaptation: "Adaptation",
    places: Places,
    launch: _Launch,
    adapt: Callable[[Places], None],
) -> None:
    """Have `adapt` done, the adaptation that `about` tells apart from others of the same model and data."""
    from demix.model.directory import describe

    described = describe(model)
    about = [*about, fingerprinted(adaptation), described.shared_sha256, sorted(places.results)]
    job = TrainingJob(
        command=tuple(sys.argv[1:]),
        fingerprint=fingerprint_of(about, shards),
        outputs=places.results,
        ranks=launch.ranks,
        threads=adaptation.threads,
        checkpoints=places.checkpoints,
        steps=adaptation.steps(described.architecture.context),
    )

    def work(at: Places) -> None:
        with streaming(launch.live, "adaptation", at.checkpoints, at.metrics):
            adapt(at)

    launch.do(job, places, work)


def _merged(settings: str, how: str) -> dict[str, Any] | str:
    """`settings` (JSON), overridden by the pairs key=value in `how`, whose values are JSON."""
    if not how:
        return settings
    try:
        given: dict[str, Any] = json.loads(settings)
        return given | {key: json.loads(value) for key, _, value in (entry.partition("=") for entry in how.split(","))}
    except (ValueError, TypeError) as error:
        cause = f"does not fit the settings ({error})"
        raise DemixError(f"--how {how}", cause, "copy both from the command that snakemake prints") from None


def _steps(text: str) -> tuple[int, ...]:
    """The numbers of updates in a text such as 61,122; none in an empty one."""
    steps = [step for step in text.split(",") if step]
    if not all(step.isdecimal() and int(step) for step in steps):
        raise DemixError(f"--keep {text}", "is no list of numbers of updates", "write 61,122")
    return tuple(map(int, steps))
