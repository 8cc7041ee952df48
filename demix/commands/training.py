"""The commands that train: from scratch, with the learning rates of a sweep, and on novel domains."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    Replicas,
    Settings,
    Site,
    TrainShards,
)
from demix.config.models import KINDS
from demix.config.training import fingerprinted
from demix.errors import DemixError
from demix.files import sha256_file
from demix.settings import settings_from
from demix.track.live import streaming

if TYPE_CHECKING:
    from demix.launch.local import Launched

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
    replicas: Replicas = "equal",
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
    experts: Annotated[
        str,
        typer.Option(
            help="Of the domains or clusters of SHARDS, train the experts of these, which are whole models, one after "
            "the other, each with its share of the tokens. Output, metrics and checkpoints are then folders of "
            "one entry each."
        ),
    ] = "",
    schedule: Annotated[
        str, typer.Option(help="After --branch: continue the parent's schedule, or restart with fresh moments of Adam.")
    ] = "continue",
) -> None:
    """Train one model from scratch or from a seed, or resume its training."""
    outputs = {"--metrics": metrics, "--output": output}
    _train(
        kind, shards, _merged(settings, how), outputs, checkpoints, ranks, replicas, cluster, learning_rate_from,
        branch=branch, keep=_steps(keep), live=live, schedule=schedule,
        experts=tuple(filter(None, experts.split(","))),
    )  # fmt: skip


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
    replicas: Replicas = "equal",
    how: ExecutionOverrides = "",
    cluster: Site = "",
    learning_rate_from: RateFrom = None,
) -> None:
    """Move the kept state of a dense training to a place of its own, for other trainings to begin with.

    Without such a state the training is done again up to that step.
    """
    outputs = {"--output": output}
    _train(
        kind, shards, _merged(settings, how), outputs, checkpoints, ranks, replicas, cluster, learning_rate_from,
        until=step, kept=kept,
    )  # fmt: skip


@app.command()
def sweep(
    kind: Kind,
    shards: TrainShards,
    settings: Settings,
    metrics: Metrics,
    checkpoints: Checkpoints,
    ranks: Ranks = 1,
    replicas: Replicas = "equal",
    how: ExecutionOverrides = "",
    cluster: Site = "",
) -> None:
    """Train a model with one learning rate of a sweep. Only the metrics are kept; divergence is not an error."""
    _train(kind, shards, _merged(settings, how), {"--metrics": metrics}, checkpoints, ranks, replicas, cluster)


@app.command("join-branches")
def join_branches_of(
    branches: Annotated[list[Path], typer.Argument(help="Model directories with one expert each, a whole model.")],
    metrics_of: Annotated[str, typer.Option(help="The metrics of their trainings, in the same order, with commas.")],
    output: Annotated[Path, typer.Option(help="The model directory.")],
    metrics: Metrics,
) -> None:
    """Join experts that are whole models, each trained by itself, to one model."""
    from demix.train.join import join_branches, join_metrics

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
    from demix.evaluate.parent import choose_parent
    from demix.model.merge import merge_experts

    names = experts.split(",")
    weights = dict.fromkeys(names, 1 / len(names))
    if scores is not None:
        weights = choose_parent(scores, domain, names, blocks=blocks, decay=decay)["priors"]
    merge_experts(model, weights, output, again=True)


@app.command("merge-routed")
def merge_routed_of(
    model: Annotated[Path, typer.Argument(help="A DEMix model directory.")],
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
    model: Annotated[Path, typer.Argument(help="The DEMix model to which the expert is added.")],
    shards: Annotated[list[Path], typer.Argument(help="train.arrow and dev.arrow of the novel domain.")],
    training: Annotated[str, typer.Option(help="The model's training domains, separated by commas.")],
    scores: Annotated[Path, typer.Option(help="The model's folder of score tables.")],
    settings: Settings,
    metrics: Metrics,
    checkpoints: Checkpoints,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the files of the expert; by default that of the model.")
    ] = None,
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
    """DEMix-DAPT: add an expert for a novel domain, initialised from the likeliest parent expert, or from all."""
    from demix.evaluate.parent import choose_parent, own_dev_losses
    from demix.launch.local import Launched, world_size
    from demix.run.placement import place_experts
    from demix.train.adapt import Adaptation, adapt_expert

    train_shard, dev_shard, *rest = _two_or_more(shards)
    if rest:
        raise DemixError(rest[0], "is one shard too many", "give train.arrow and dev.arrow of the novel domain")
    adaptation = settings_from(Adaptation, _merged(settings, how))
    place_experts([train_shard.parent.name], adaptation.sequences, world_size(ranks))
    outputs = {"--output": output or model, "--metrics": metrics}
    names = training.split(",")
    # The first tables choose the parent. Forgetting is measured against the losses of the second tables.
    read = [scores / f"{train_shard.parent.name}.dev" / f"{name}.parquet" for name in names]
    read += [scores / f"{name}.dev" / f"{name}.parquet" for name in names]
    about = ("demix", names, *filter(None, [init]), [sha256_file(path) for path in read if path.exists()])
    # A missing table must be reported before any rank starts.
    chosen = choose_parent(
        scores, train_shard.parent.name, names, blocks=adaptation.parent_blocks, decay=adaptation.parent_decay
    )
    unchanged = own_dev_losses(scores, names, adaptation.forgetting_blocks)
    if _launched_adaptation(about, model, shards, adaptation, outputs, checkpoints, ranks, cluster) is Launched.DONE:
        return
    pair = (train_shard, dev_shard)
    with streaming(live, "adaptation", checkpoints, metrics):
        adapt_expert(model, pair, chosen, unchanged, adaptation, outputs["--output"], metrics, checkpoints, init)


@app.command("adapt-dense")
def adapt_dense(
    model: Annotated[Path, typer.Argument(help="The dense model to adapt.")],
    shards: Annotated[
        list[Path],
        typer.Argument(help="train.arrow and dev.arrow of the novel domain, then the training domains' dev."),
    ],
    settings: Settings,
    output: Annotated[Path, typer.Option(help="The adapted model's directory.")],
    metrics: Metrics,
    checkpoints: Checkpoints,
    ranks: Ranks = 1,
    how: ExecutionOverrides = "",
    cluster: Site = "",
    live: Live = "",
) -> None:
    """Dense-DAPT: continue to train all parameters of a dense model on a novel domain."""
    from demix.launch.local import Launched, world_size
    from demix.run.placement import place_experts
    from demix.train.adapt import Adaptation
    from demix.train.adapt import adapt_dense as run

    train_shard, dev_shard, *others = _two_or_more(shards)
    adaptation = settings_from(Adaptation, _merged(settings, how))
    place_experts([train_shard.parent.name], adaptation.sequences, world_size(ranks))
    outputs = {"--output": output, "--metrics": metrics}
    about = ("dense",)
    if _launched_adaptation(about, model, shards, adaptation, outputs, checkpoints, ranks, cluster) is Launched.HERE:
        with streaming(live, "adaptation", checkpoints, metrics):
            run(model, (train_shard, dev_shard), others, adaptation, output, metrics, checkpoints)


def run_command(arguments: Sequence[str]) -> None:
    """Run the command of one stage in this process. Errors are raised to the caller."""
    # typer ends an interrupted command with a status and no exception.
    if status := app(list(arguments), standalone_mode=False):
        raise SystemExit(status)


def _train(
    kind: str,
    shards: list[Path],
    settings: Mapping[str, Any] | str,
    outputs: dict[str, Path],
    checkpoints: Path,
    ranks: int,
    replicas: str,
    cluster: str,
    learning_rate_from: Path | None = None,
    *,
    branch: Path | None = None,
    keep: tuple[int, ...] = (),
    until: int | None = None,
    kept: Path | None = None,
    live: str = "",
    experts: tuple[str, ...] = (),
    schedule: str = "continue",
) -> None:
    from demix.launch.local import Launched, launched, world_size
    from demix.run.placement import place
    from demix.train.branch import read_seed
    from demix.train.in_turn import job_folder, train_in_turn
    from demix.train.stage import Training, identity_of, take_seed, train_model
    from demix.train.sweep import chosen_rate

    if kind not in KINDS:
        raise DemixError(f"kind {kind}", "is not known", f"use one of {', '.join(KINDS)}")
    training = settings_from(Training, settings)
    if learning_rate_from is not None:
        training = replace(training, learning_rate=chosen_rate(learning_rate_from))
    copies = _numbers(replicas) if replicas != "equal" else {}
    read = [path for path in shards if path.stem != "dev"]
    domains = [path.parent.name for path in read]
    if experts and KINDS[kind].expert_scope != "model":
        raise DemixError("--experts", f"is given to the kind {kind}, whose experts train together", "leave it out")
    if len({*experts} & {*domains}) < len(experts):
        cause = f"is {','.join(experts)}: a name stands twice, or none of the tokens has it"
        raise DemixError("--experts", cause, f"name each once, of {', '.join(domains)}")
    # A wrong number of ranks must be reported before any process starts.
    place(kind, experts[:1] or domains, training.sequences, world_size(ranks), copies)
    about: tuple[object, ...] = (kind, fingerprinted(training), domains, *([experts] if experts else []))
    if branch is not None:
        alone, share = (read[:1], len(read)) if experts else (read, 1)
        about = (*about, read_seed(branch, identity_of(kind, training, alone, share=share), schedule).origin)
    steps = training.steps(len(domains))
    if until is not None and kept is not None:
        if until > steps:
            raise DemixError(f"--step {until}", f"is beyond the {steps} updates of the training", "lower it")
        about, steps = (*about, until), until
        # Ranks that a launcher has started train, because there was no state to take.
        if "WORLD_SIZE" not in os.environ and take_seed(kind, training, read, until, kept, outputs["--output"]):
            return
    outcome = launched(
        cluster,
        ranks,
        training.threads,
        job_folder(checkpoints, experts) if experts else checkpoints,
        fingerprinted=about,
        shards=shards,
        outputs=outputs,
        steps=steps,
        entry=run_command,
        in_turn=[checkpoints / name for name in experts] if len(experts) > 1 else (),
    )
    if outcome is Launched.HERE and experts:
        train_in_turn(
            kind, training, shards, experts, outputs["--output"], outputs["--metrics"], checkpoints,
            branch=branch, schedule=schedule, beside=partial(streaming, live, "training"),
        )  # fmt: skip
    elif outcome is Launched.HERE:
        output, metrics = outputs.get("--output"), outputs.get("--metrics")
        with streaming(live, "training", checkpoints, metrics):
            train_model(
                kind, training, shards, output, metrics, checkpoints, copies,
                branch=branch, keep=keep, until=until, schedule=schedule,
            )  # fmt: skip


def _launched_adaptation(
    about: tuple[object, ...],
    model: Path,
    shards: list[Path],
    adaptation: Any,
    outputs: dict[str, Path],
    checkpoints: Path,
    ranks: int,
    cluster: str,
) -> "Launched":
    from demix.launch.local import launched
    from demix.model.checkpoint import describe

    description = describe(model)
    return launched(
        cluster,
        ranks,
        adaptation.threads,
        checkpoints,
        fingerprinted=(*about, fingerprinted(adaptation), description["shared_sha256"]),
        shards=shards,
        outputs=outputs,
        steps=adaptation.steps(description["architecture"]["context"]),
        entry=run_command,
    )


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


def _numbers(text: str) -> dict[str, int]:
    """The mapping in a text such as legal=2,novels=3."""
    pairs = [entry.partition("=") for entry in text.split(",")]
    if not all(number.isdecimal() and int(number) for _, _, number in pairs):
        raise DemixError(f"--replicas {text}", "is no list of domains and ranks", "write legal=2,novels=3")
    return {name: int(number) for name, _, number in pairs}


def _two_or_more(shards: list[Path]) -> list[Path]:
    if len(shards) < 2:
        raise DemixError(shards[0], "is the only shard", "give train.arrow and dev.arrow of the novel domain")
    return shards
