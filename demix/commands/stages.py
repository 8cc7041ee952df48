"""The stages: one command for each, as the Snakemake rules run it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from demix.commands.options import Files, Output, Settings
from demix.config.domains import SplitRecipe, TokenizerSection
from demix.config.sections import Seed
from demix.files import write_json
from demix.settings import Switch, Text, settings, settings_from

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


def _parts_by_domain(documents: list[Path]) -> dict[str, list[Path]]:
    """documents/<domain>/<part>.parquet, grouped by domain."""
    parts: dict[str, list[Path]] = {}
    for path in documents:
        parts.setdefault(path.parent.name, []).append(path)
    return parts
