"""The stages: one command for each, as the Snakemake rules run it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from demix.config.domains import SplitRecipe, TokenizerSection
from demix.config.sections import Seed, fingerprinted
from demix.errors import DemixError
from demix.files import sha256_file, write_json
from demix.settings import Switch, Text, settings, settings_from

if TYPE_CHECKING:
    pass

app = typer.Typer()


@settings(kw_only=True)
class SplitSettings(SplitRecipe):
    """What `split` needs of the config: word budgets, the kind of domain, the run's seed."""

    training: Switch
    seed: Seed
    metadata: Switch


@settings()
class TrackingSettings:
    """An MLflow store and the experiment in it."""

    uri: Text
    experiment: Text


Ranks = Annotated[int, typer.Option(min=1, help="Processes of this machine that train together.")]
Settings = Annotated[str, typer.Option(help="The stage's part of the config, as JSON.")]
Files = Annotated[list[Path], typer.Argument(help="Input files.")]
Output = Annotated[Path, typer.Option(help="Where the result goes.")]
Kind = Annotated[str, typer.Argument(help="demix, dense, dense_unbalanced or domain_token.")]
TrainShards = Annotated[
    list[Path], typer.Argument(help="tokens/<domain>/train.arrow of each training domain (and dev.arrow, for dev).")
]
Metrics = Annotated[Path, typer.Option(help="Where the metrics go (JSON lines).")]
Checkpoints = Annotated[Path, typer.Option(help="Folder for the state that a killed run resumes from.")]
How = Annotated[
    str, typer.Option(help="Settings that change nothing but time and memory: compile=true,keep_checkpoints=3.")
]
Site = Annotated[
    str, typer.Option("--cluster", help="The config's section cluster as JSON: where and how the ranks are started.")
]
Replicas = Annotated[str, typer.Option(help="Ranks of single domains, such as legal=2,novels=3.")]


@app.command()
def download(
    domain: str,
    settings: Settings,
    output: Output,
    part: Annotated[int, typer.Option(help="Which of source.parts, from 0.")] = 0,
) -> None:
    """Read a part of a domain's raw text from its source into a private Parquet file."""
    from demix.data.sources import Source
    from demix.data.sources import download as run

    run(settings_from(Source, settings), domain, output, part)


@app.command()
def anonymize(
    raw: Annotated[Path, typer.Argument(help="Raw text as Parquet.")],
    output: Output,
    counts: Annotated[Path, typer.Option(help="Where the counts by category go.")],
    enabled: Annotated[bool, typer.Option(help="Replace personal data, or only normalise.")] = True,
    rules: Annotated[str, typer.Option(help="ours, or released: the rules published with the paper.")] = "ours",
) -> None:
    """Normalise a part of a domain's text and replace personal data by dummy tokens."""
    from demix.data.anonymize import anonymize_documents

    anonymize_documents(raw, output, counts, enabled=enabled, rules=rules)


@app.command()
def deduplicate(documents: Files, output: Output) -> None:
    """Give each text that the training domains hold to one of them (documents/<domain>/<part>.parquet)."""
    from demix.data.duplicates import mark_duplicates

    mark_duplicates(_parts_by_domain(documents), output)


@app.command("novel-duplicates")
def novel_duplicates(documents: Files, output: Output) -> None:
    """Count the texts that novel domains share with one another (documents/<domain>/<part>.parquet)."""
    from demix.data.duplicates import count_shared

    count_shared(_parts_by_domain(documents), output)


@app.command()
def split(
    domain: str,
    documents: Annotated[
        list[Path],
        typer.Argument(help="Its documents/<domain>/<part>.parquet, the counts (.json) beside each."),
    ],
    owners: Annotated[Path, typer.Option(help="Who keeps each text of the training domains.")],
    settings: Settings,
    output: Annotated[Path, typer.Option(help="Folder for train, dev and test.parquet and card.json.")],
) -> None:
    """Drop duplicates and split a domain by content hash, dev and test first."""
    from demix.data.corpus import split as run

    values = settings_from(SplitSettings, settings)
    run(
        domain,
        documents,
        [path.with_suffix(".json") for path in documents],
        owners,
        training=values.training,
        budget=values.words,
        seed=values.seed,
        outputs={name: output / f"{name}.parquet" for name in ("train", "dev", "test")},
        card=output / "card.json",
        near_duplicates=values.near_duplicates,
        metadata=values.metadata,
    )


@app.command()
def tokenizer(documents: Files, settings: Settings, output: Output) -> None:
    """Train a byte-level BPE on the training domains' text, or take GPT-2's."""
    from demix.data.tokenizer import gpt2_tokenizer, train_tokenizer

    values = settings_from(TokenizerSection, settings)
    if values.kind == "gpt2":
        gpt2_tokenizer(output)
    else:
        train_tokenizer(documents, values.vocab_size, output, values.words)


@app.command()
def tokenize(
    documents: Files,
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json")],
    output: Annotated[Path, typer.Option(help="Folder for one .arrow shard per input.")],
) -> None:
    """Turn corpus files into memory-mapped token shards."""
    from demix.data.shards import tokenize as run

    for path in documents:
        run(tokenizer, path, output / f"{path.stem}.arrow")


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
    how: How = "",
    cluster: Site = "",
    learning_rate_from: Annotated[
        Path | None, typer.Option(help="Take the peak learning rate that choose-rate wrote, not that of the settings.")
    ] = None,
) -> None:
    """Train one model from scratch, or resume its training."""
    merged = _merged(settings, how)
    _train(kind, shards, merged, output, metrics, checkpoints, ranks, replicas, cluster, learning_rate_from)


@app.command()
def sweep(
    kind: Kind,
    shards: TrainShards,
    settings: Settings,
    metrics: Metrics,
    checkpoints: Checkpoints,
    ranks: Ranks = 1,
    replicas: Replicas = "equal",
    how: How = "",
    cluster: Site = "",
) -> None:
    """Train a model with one learning rate of a sweep: only its metrics are kept, and that it diverged is no error."""
    _train(kind, shards, _merged(settings, how), None, metrics, checkpoints, ranks, replicas, cluster)


@app.command("choose-rate")
def choose_rate(
    metrics: Annotated[list[Path], typer.Argument(help="Metrics of `demix sweep`, each <learning rate>.jsonl.")],
    output: Output,
) -> None:
    """Choose the fastest learning rate of a sweep that does not diverge, and record why."""
    from demix.train.sweep import choose_rate as run

    print(f"{output.stem}: {run(metrics, output)}")


@app.command()
def score(
    model: Annotated[Path, typer.Argument(help="A model directory.")],
    shards: Annotated[list[Path], typer.Argument(help="tokens/<domain>/<split>.arrow to score.")],
    settings: Settings,
    output: Annotated[Path, typer.Option(help="The model's folder of score tables.")],
    experts: Annotated[str, typer.Option(help="Experts (or domain tokens) to score, separated by commas.")],
) -> None:
    """Score texts under experts: one log-probability per token, written once."""
    from demix.evaluate.score import Scoring
    from demix.evaluate.score import score as run

    run(model, tuple(experts.split(",")), shards, settings_from(Scoring, settings), output)


@app.command()
def adapt(
    model: Annotated[Path, typer.Argument(help="The DEMix model to which the expert is added.")],
    shards: Annotated[list[Path], typer.Argument(help="train.arrow and dev.arrow of the novel domain.")],
    training: Annotated[str, typer.Option(help="The model's training domains, separated by commas.")],
    scores: Annotated[Path, typer.Option(help="The model's folder of score tables.")],
    settings: Settings,
    metrics: Metrics,
    checkpoints: Checkpoints,
    output: Annotated[Path | None, typer.Option(help="Where the expert goes; by default into the model.")] = None,
    ranks: Ranks = 1,
    how: How = "",
    cluster: Site = "",
) -> None:
    """DEMix-DAPT: add an expert for a novel domain, copied from the likeliest parent."""
    from demix.config.placement import place_experts
    from demix.evaluate.parent import choose_parent, own_dev_losses
    from demix.launch.local import Launched, world_size
    from demix.train.adapt import Adaptation, adapt_expert

    train_shard, dev_shard, *rest = _two_or_more(shards)
    if rest:
        raise DemixError(rest[0], "is one shard too many", "give train.arrow and dev.arrow of the novel domain")
    adaptation = settings_from(Adaptation, _merged(settings, how))
    place_experts([train_shard.parent.name], adaptation.sequences, world_size(ranks))
    outputs = {"--output": output or model, "--metrics": metrics}
    names = training.split(",")
    # What the parent is chosen by, and what is recorded beside.
    read = [scores / f"{train_shard.parent.name}.dev" / f"{name}.parquet" for name in names]
    read += [scores / f"{name}.dev" / f"{name}.parquet" for name in names]
    about = ("demix", names, [sha256_file(path) for path in read if path.exists()])
    # Before any rank starts, so that a table that is missing is told at once.
    chosen = choose_parent(
        scores, train_shard.parent.name, names, blocks=adaptation.parent_blocks, decay=adaptation.parent_decay
    )
    unchanged = own_dev_losses(scores, names, adaptation.forgetting_blocks)
    if _launched_adaptation(about, model, shards, adaptation, outputs, checkpoints, ranks, cluster) is Launched.DONE:
        return
    pair = (train_shard, dev_shard)
    adapt_expert(model, pair, chosen, unchanged, adaptation, outputs["--output"], metrics, checkpoints)


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
    how: How = "",
    cluster: Site = "",
) -> None:
    """Dense-DAPT: go on training all parameters of a dense model on a novel domain."""
    from demix.config.placement import place_experts
    from demix.launch.local import Launched, world_size
    from demix.train.adapt import Adaptation
    from demix.train.adapt import adapt_dense as run

    train_shard, dev_shard, *others = _two_or_more(shards)
    adaptation = settings_from(Adaptation, _merged(settings, how))
    place_experts([train_shard.parent.name], adaptation.sequences, world_size(ranks))
    outputs = {"--output": output, "--metrics": metrics}
    about = ("dense",)
    if _launched_adaptation(about, model, shards, adaptation, outputs, checkpoints, ranks, cluster) is Launched.HERE:
        run(model, (train_shard, dev_shard), others, adaptation, output, metrics, checkpoints)


@app.command()
def evaluate(
    domain: str,
    scores: Annotated[Path, typer.Option(help="The run's folder of score tables.")],
    settings: Settings,
    output: Output,
    priors: Annotated[Path, typer.Option(help="Where the cached priors go.")],
    differences: Annotated[Path, typer.Option(help="Where the differences between systems go.")],
    posteriors: Annotated[Path, typer.Option(help="Where the posteriors block by block go.")],
    losses: Annotated[Path, typer.Option(help="Where the losses by document go.")],
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json, to count bytes by.")] = None,
) -> None:
    """Mix the score tables of one domain by every method; no forward pass."""
    from demix.data.tokenizer import byte_lengths
    from demix.evaluate.domain import Evaluation, Outputs, evaluate_domain

    outputs = Outputs(output, priors, differences, posteriors, losses)
    lengths = None if tokenizer is None else byte_lengths(tokenizer)
    evaluate_domain(scores, domain, settings_from(Evaluation, settings), outputs, lengths)


@app.command()
def audit(
    domain: str,
    models: Annotated[Path, typer.Option(help="The run's folder of models.")],
    tokens: Annotated[Path, typer.Option(help="The domain's folder of tokens.")],
    priors: Annotated[Path, typer.Option(help="The domain's cached priors.")],
    settings: Settings,
    output: Output,
) -> None:
    """Continue documents of a removed domain: what is still known of them with its expert, without it, untrained."""
    from demix.evaluate.memorization import Audit, audit_domain

    audit_domain(domain, models, tokens, priors, settings_from(Audit, settings), output)


@app.command()
def join(tables: Files, output: Output) -> None:
    """Join Parquet tables of the same columns, in the order given."""
    from demix.evaluate.domain import join as run

    run(tables, output)


@app.command()
def overlap(
    shards: Annotated[
        list[Path], typer.Argument(help="tokens/<domain>/train.arrow of experts, test.arrow of domains.")
    ],
    output: Output,
) -> None:
    """Count the bigrams of each domain's test split that each training domain's train split holds too."""
    from demix.data.overlap import overlap as run

    run(shards, output)


@app.command("run-config")
def run_config(settings: Settings, output: Output) -> None:
    """Write the run's completed config, so that its folder explains itself."""
    from demix.config.run import write_run_config

    write_run_config(output, json.loads(settings))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The run's folder, results/<run>.")],
    output: Annotated[Path, typer.Option(help="Folder for tables, figures and claims.")],
) -> None:
    """Make the tables, figures and claims of a run."""
    from demix.config.run import read_run_config
    from demix.report import write_report

    write_report(run, read_run_config(run), output)


@app.command()
def card(
    run: Annotated[Path, typer.Argument(help="The run's folder, results/<run>.")],
    output: Annotated[Path, typer.Option(help="Folder for the cards, <model>.md.")],
    models: Annotated[list[str] | None, typer.Argument(help="By default every model of the run.")] = None,
) -> None:
    """Write the cards of a run's models: data, licences, training, lineage, results, limits."""
    from demix.files import write_text
    from demix.report.card import model_card

    for model in models or sorted(path.parent.name for path in (run / "models").glob("*/model.json")):
        write_text(output / f"{model}.md", model_card(run, model))


@app.command()
def track(
    run: Annotated[Path, typer.Argument(help="The run's folder, results/<run>.")],
    settings: Settings,
    output: Annotated[Path, typer.Option(help="A receipt: what was sent and where.")],
) -> None:
    """Send a run's parameters, metrics, tables and figures to MLflow; sending again changes nothing."""
    from demix.config.run import read_run_config
    from demix.track.store import track as send

    values = settings_from(TrackingSettings, settings)
    sent = send(run, read_run_config(run), values.uri, values.experiment)
    write_json(output, {"uri": values.uri, "experiment": values.experiment, "sent": sent})


def run_command(arguments: Sequence[str]) -> None:
    """Run one stage's command in this process; its errors are raised."""
    app(list(arguments), standalone_mode=False)


def _train(
    kind: str,
    shards: list[Path],
    settings: str,
    output: Path | None,
    metrics: Path,
    checkpoints: Path,
    ranks: int,
    replicas: str,
    cluster: str,
    learning_rate_from: Path | None = None,
) -> None:
    from demix.config.placement import place
    from demix.config.systems import KINDS
    from demix.launch.local import Launched, launched, world_size
    from demix.train.stage import Training, train_model
    from demix.train.sweep import chosen_rate

    if kind not in KINDS:
        raise DemixError(f"kind {kind}", "is not known", f"use one of {', '.join(KINDS)}")
    training = settings_from(Training, settings)
    if learning_rate_from is not None:
        training = replace(training, learning_rate=chosen_rate(learning_rate_from))
    copies = _numbers(replicas) if replicas != "equal" else {}
    domains = [path.parent.name for path in shards if path.stem != "dev"]
    # Before any process starts.
    place(kind, domains, training.sequences, world_size(ranks), copies)
    outputs = {"--metrics": metrics} | ({"--output": output} if output is not None else {})
    left = launched(
        cluster,
        ranks,
        training.threads,
        checkpoints,
        fingerprinted=(kind, fingerprinted(training), domains),
        shards=shards,
        outputs=outputs,
        steps=training.steps(len(domains)),
        entry=run_command,
    )
    if left is Launched.HERE:
        train_model(kind, training, shards, output, metrics, checkpoints, copies)


def _launched_adaptation(
    about: tuple,
    model: Path,
    shards: list[Path],
    adaptation: Any,
    outputs: dict[str, Path],
    checkpoints: Path,
    ranks: int,
    cluster: str,
) -> bool:
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
    """`settings` (JSON) with those of `how`, key=value and so on, each value as in JSON."""
    if not how:
        return settings
    try:
        return json.loads(settings) | {
            key: json.loads(value) for key, _, value in (entry.partition("=") for entry in how.split(","))
        }
    except (ValueError, TypeError) as error:
        cause = f"does not fit the settings ({error})"
        raise DemixError(f"--how {how}", cause, "copy both from the command that snakemake prints") from None


def _numbers(text: str) -> dict[str, int]:
    """legal=2,novels=3 as a mapping."""
    pairs = [entry.partition("=") for entry in text.split(",")]
    if not all(number.isdecimal() and int(number) for _, _, number in pairs):
        raise DemixError(f"--replicas {text}", "is no list of domains and ranks", "write legal=2,novels=3")
    return {name: int(number) for name, _, number in pairs}


def _parts_by_domain(documents: list[Path]) -> dict[str, list[Path]]:
    """documents/<domain>/<part>.parquet, grouped by domain."""
    parts: dict[str, list[Path]] = {}
    for path in documents:
        parts.setdefault(path.parent.name, []).append(path)
    return parts


def _two_or_more(shards: list[Path]) -> list[Path]:
    if len(shards) < 2:
        raise DemixError(shards[0], "is the only shard", "give train.arrow and dev.arrow of the novel domain")
    return shards
