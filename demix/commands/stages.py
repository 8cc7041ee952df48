"""The stages: one command for each, as the rules of the workflow run them."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from demix.commands.options import Files, Output, Settings
from demix.errors import DemixError
from demix.files import write_json

app = typer.Typer()

Part = Annotated[int, typer.Option(help="Number of the part, from 0 to source.parts - 1.")]
Counts = Annotated[Path, typer.Option(help="Path of the counts by category.")]
Enabled = Annotated[bool, typer.Option(help="Replace personal data; otherwise only normalise.")]
Rules = Annotated[str, typer.Option(help="ours, or released (the rules published with the paper).")]


@app.command()
def download(
    domain: str,
    settings: Settings,
    output: Output,
    part: Part = 0,
) -> None:
    """Read one part of a domain's raw text from its source into a private Parquet file."""
    from demix.data.sources import Source
    from demix.data.sources import download as run
    from demix.settings import settings_from

    run(settings_from(Source, settings), domain, output, part)


@app.command()
def read(
    domain: str,
    settings: Settings,
    raw: Annotated[Path, typer.Option(help="Path of the raw text on its way, private and removed at the end.")],
    output: Output,
    counts: Counts,
    part: Part = 0,
    enabled: Enabled = True,
    rules: Rules = "ours",
) -> None:
    """Read one part of a domain's text from its source, and anonymize it: download and anonymize in one."""
    from demix.data.anonymize import anonymize_documents
    from demix.data.shared import made_once
    from demix.data.sources import Source, discard, pinned
    from demix.data.sources import download as run
    from demix.settings import settings_from

    source = settings_from(Source, settings)

    def make() -> None:
        run(source, domain, raw, part)
        anonymize_documents(raw, output, counts, enabled=enabled, rules=rules, piece_words=source.piece_words)

    if (inputs := pinned(source, part)) is None:
        run(source, domain, raw, part)
        anonymize(raw, output, counts, enabled, rules, source.piece_words)
    else:
        values = {"source": asdict(source), "part": part, "enabled": enabled, "rules": rules}
        made_once(output, [output, counts], inputs, values, make)
    discard(raw)


@app.command()
def anonymize(
    raw: Annotated[Path, typer.Argument(help="Raw text as Parquet.")],
    output: Output,
    counts: Counts,
    enabled: Enabled = True,
    rules: Rules = "ours",
    piece_words: Annotated[
        int | None, typer.Option(min=1, help="Cut documents that are longer than this many words into pieces.")
    ] = None,
) -> None:
    """Normalise one part of a domain's text, replace personal data by dummy tokens, cut long documents."""
    from demix.data.anonymize import anonymize_documents
    from demix.data.shared import made_once

    values = {"enabled": enabled, "rules": rules, "piece_words": piece_words}
    make = partial(anonymize_documents, raw, output, counts, enabled=enabled, rules=rules, piece_words=piece_words)
    made_once(output, [output, counts], [raw], values, make, passing=True)


@app.command()
def deduplicate(documents: Files, output: Output) -> None:
    """Assign each text that several training domains hold to one of them (documents/<domain>/<part>.parquet)."""
    from demix.data.duplicates import mark_duplicates
    from demix.data.shared import made_once

    made_once(output, [output], documents, {}, partial(mark_duplicates, _parts_by_domain(documents), output))


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
        typer.Argument(help="documents/<domain>/<part>.parquet of the domain, each with its counts (.json) beside it."),
    ],
    owners: Annotated[Path, typer.Option(help="Table of the domain that keeps each text, from deduplicate.")],
    settings: Settings,
    output: Annotated[Path, typer.Option(help="Folder for train, dev and test.parquet and card.json.")],
) -> None:
    """Drop duplicates, and split a domain by content hash; dev and test are filled first."""
    from demix.data.corpus import Splitting
    from demix.data.corpus import split as run
    from demix.data.shared import made_once
    from demix.settings import settings_from

    values = settings_from(Splitting, settings)
    counts = [path.with_suffix(".json") for path in documents]
    splits = ("test.parquet",) if values.test_only else ("train.parquet", "dev.parquet", "test.parquet")
    files = [output / name for name in (*splits, "card.json")]
    make = partial(run, domain, documents, owners, values, output)
    made_once(output, files, [*documents, *counts, owners], asdict(values), make)


@app.command()
def tokenizer(documents: Files, settings: Settings, output: Output) -> None:
    """Train a byte-level BPE on the training domains' text, or write GPT-2's tokenizer or that of another family."""
    from demix.config.tokenizer import TokenizerSection
    from demix.data.shared import made_once
    from demix.data.tokenizer import gpt2_tokenizer, train_tokenizer
    from demix.data.tokenizer_files import take_tokenizer
    from demix.settings import settings_from

    values = settings_from(TokenizerSection, settings)
    if values.kind == "gpt2":
        gpt2_tokenizer(output)
    elif values.kind in ("file", "parent"):
        take_tokenizer(Path(values.path or ""), output, values.end_of_text, values.types)
    else:
        make = partial(train_tokenizer, documents, values.vocab_size, output, values.words)
        made_once(output, [output], documents, asdict(values), make)


@app.command()
def tokenize(
    documents: Files,
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json of the run.")],
    output: Annotated[Path, typer.Option(help="Folder for one .arrow shard per input.")],
) -> None:
    """Convert corpus files to memory-mapped token shards."""
    from demix.data.shards import tokenize as run
    from demix.data.shared import made_once

    def make() -> None:
        for path in documents:
            run(tokenizer, path, output / f"{path.stem}.arrow")

    made_once(output, [output / f"{path.stem}.*" for path in documents], [*documents, tokenizer], {}, make)


@app.command()
def score(
    model: Annotated[Path, typer.Argument(help="A model directory; for several models the folder of these.")],
    shards: Annotated[list[Path], typer.Argument(help="tokens/<domain>/<split>.arrow to score.")],
    settings: Settings,
    output: Annotated[Path, typer.Option(help="The model's folder of score tables; for several models that of these.")],
    experts: Annotated[
        str,
        typer.Option(
            help="Experts or domain tokens, separated by commas; own: each domain under its own token; listed: several "
            "models, each with its experts, domains, splits, context and top_k, which `models` in the settings lists."
        ),
    ],
    context: Annotated[int, typer.Option(min=0, help="Tokens of a block; 0: those of the model's training.")] = 0,
    top_k: Annotated[int, typer.Option(min=0, help="Experts a token chooses in a layer; 0: as in training.")] = 0,
) -> None:
    """Score texts under experts: write the log-probability of every token."""
    from demix.evaluate.score import Scoring, score_models
    from demix.evaluate.score import score as run
    from demix.settings import settings_from

    values = settings_from(Scoring, settings)
    if (experts == "listed") != bool(values.models):
        cause = "needs `models` in --settings" if experts == "listed" else "is given beside `models` in --settings"
        raise DemixError(f"--experts {experts}", cause, "name the experts of one model, or list several models")
    if values.models:
        score_models(model, shards, values, output)
        return
    names = () if experts == "own" else tuple(experts.split(","))
    run(model, names, shards, values, output, context, top_k)


@app.command("score-ngrams")
def score_ngrams_of(shards: Files, settings: Settings, output: Output) -> None:
    """Count the n-grams of train.arrow shards, and score dev.arrow and test.arrow: output is the folder scores/."""
    from demix.evaluate.ngrams import NGramScoring, score_ngrams
    from demix.settings import settings_from

    score_ngrams(shards, settings_from(NGramScoring, settings), output)


@app.command()
def route(
    clusterer: Annotated[Path, typer.Argument(help="The folder of a clusterer, results/<run>/clusters/<clustering>.")],
    shards: Annotated[list[Path], typer.Argument(help="tokens/<domain>/<split>.arrow to route.")],
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json of the run.")],
    settings: Settings,
    output: Annotated[Path, typer.Option(help="Folder for one <domain>.<split>.parquet per input.")],
) -> None:
    """Measure how far the text before each scored token is from the centres of clusters."""
    from demix.evaluate.routing import Routing
    from demix.evaluate.routing import route as run
    from demix.settings import settings_from

    run(clusterer, shards, tokenizer, settings_from(Routing, settings), output)


@app.command("choose-mixing")
def choose_mixing(
    scores: Annotated[Path, typer.Argument(help="The model's folder of score tables, results/<run>/scores/<model>.")],
    domains: Annotated[str, typer.Option(help="The training domains, separated by commas.")],
    experts: Annotated[str, typer.Option(help="The experts to mix, separated by commas.")],
    output: Output,
) -> None:
    """Choose the parameters of the rule tempered for a model, on the dev splits of its training domains."""
    from demix.evaluate.choice import write_mixing
    from demix.evaluate.score_tables import read_scores

    names = domains.split(",")
    write_mixing(output, {domain: read_scores(scores / f"{domain}.dev", experts.split(",")) for domain in names})


@app.command()
def evaluate(
    domain: str,
    scores: Annotated[Path, typer.Option(help="The run's folder of score tables.")],
    settings: Settings,
    output: Output,
    priors: Annotated[Path, typer.Option(help="Path of the cached priors.")],
    differences: Annotated[Path, typer.Option(help="Path of the differences between systems.")],
    posteriors: Annotated[Path, typer.Option(help="Path of the posteriors by block.")],
    losses: Annotated[Path, typer.Option(help="Path of the losses by document.")],
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json, to count bytes per token.")] = None,
) -> None:
    """Mix the score tables of one domain by every method. Runs no forward pass."""
    from demix.data.tokenizer import byte_lengths
    from demix.evaluate.domain import Evaluation, Outputs, evaluate_domain
    from demix.settings import settings_from

    outputs = Outputs(output, priors, differences, posteriors, losses)
    lengths = None if tokenizer is None else byte_lengths(tokenizer)
    evaluate_domain(scores, domain, settings_from(Evaluation, settings), outputs, lengths)


@app.command()
def contexts(
    domain: str,
    scores: Annotated[Path, typer.Option(help="The run's folder of score tables.")],
    settings: Settings,
    output: Output,
) -> None:
    """Sum the losses of one domain by position in blocks of several lengths. Runs no forward pass."""
    from demix.evaluate.contexts import ContextEvaluation, evaluate_contexts
    from demix.settings import settings_from

    evaluate_contexts(scores, domain, settings_from(ContextEvaluation, settings), output)


@app.command()
def audit(
    domain: str,
    models: Annotated[Path, typer.Option(help="The run's folder of models.")],
    tokens: Annotated[Path, typer.Option(help="The domain's folder of tokens.")],
    priors: Annotated[Path, typer.Option(help="The domain's cached priors.")],
    settings: Settings,
    output: Output,
) -> None:
    """Continue documents of a removed domain: by the model with and without its expert, and by the retrained model."""
    from demix.evaluate.memorization import Audit, audit_domain
    from demix.settings import settings_from

    audit_domain(domain, models, tokens, priors, settings_from(Audit, settings), output)


@app.command()
def join(tables: Files, output: Output) -> None:
    """Join Parquet tables with the same columns, in the given order."""
    from demix.evaluate.columns import join as run

    run(tables, output)


@app.command()
def overlap(
    shards: Annotated[
        list[Path],
        typer.Argument(help="tokens/<domain>/train.arrow of training domains and test.arrow of all domains."),
    ],
    output: Output,
) -> None:
    """Count the bigrams of each domain's test split that also occur in each training domain's train split."""
    from demix.data.overlap import overlap as run

    run(shards, output)


@app.command("fit-clusters")
def fit_clusters_of(
    documents: Annotated[list[Path], typer.Argument(help="corpus/<domain>/train.parquet of the training domains.")],
    settings: Settings,
    output: Annotated[Path, typer.Option(help="Folder of the clusterer: its name is that of the clustering.")],
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 1,
) -> None:
    """Fit a clustering of documents to a sample of the training domains' text."""
    from demix.config.clustering import Clustering
    from demix.data.cluster import fit_clusters
    from demix.settings import settings_from

    by_domain = {path.parent.name: path for path in documents}
    fit_clusters(by_domain, settings_from(Clustering, settings), seed, output, output.name)


@app.command("assign")
def assign_documents(
    clusterer: Annotated[Path, typer.Argument(help="Folder of a clusterer.")],
    documents: Annotated[list[Path], typer.Argument(help="Splits of domains, corpus/<domain>/<split>.parquet.")],
    output: Annotated[Path, typer.Option(help="Folder for <domain>.<split>.parquet.")],
) -> None:
    """Assign each document of splits to a cluster."""
    from demix.data.cluster import Clusterer, assign

    opened = Clusterer.open(clusterer)
    for path in documents:
        assign(opened, path.parent.name, path, output / f"{path.parent.name}.{path.stem}.parquet")


@app.command("cluster-shards")
def cluster_shards_of(
    clusterer: Annotated[Path, typer.Argument(help="Folder of a clusterer, with assigned/ of each split in it.")],
    tokens: Annotated[list[Path], typer.Argument(help="Tokens of splits, tokens/<domain>/<split>.arrow.")],
    length: Annotated[int, typer.Option(min=1, help="Tokens of a block, the fewest that a cluster may have.")],
    output: Annotated[Path, typer.Option(help="Folder for <cluster>/<split>.arrow.")],
) -> None:
    """Write the documents of each cluster as a shard of spans, without a copy of any token."""
    from demix.data.cluster import Clusterer, cluster_shards

    opened = Clusterer.open(clusterer)
    for split in dict.fromkeys(path.stem for path in tokens):
        shards = {path.parent.name: path for path in tokens if path.stem == split}
        assigned = {domain: clusterer / "assigned" / f"{domain}.{split}.parquet" for domain in shards}
        cluster_shards(opened, assigned, shards, length, output, clusterer.name)


@app.command("run-config")
def run_config(settings: Settings, output: Output) -> None:
    """Write the run's completed config into its folder."""
    from demix.config.config import Config
    from demix.run.kept import write_run_config
    from demix.settings import settings_from

    write_run_config(output, settings_from(Config, settings))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The run's folder, results/<run>.")],
    output: Annotated[Path, typer.Option(help="Folder for tables, figures and claims.")],
) -> None:
    """Make the tables, figures and claims of a run."""
    from demix.report import write_report
    from demix.run.run import Run

    write_report(Run.read(run), output)


@app.command()
def card(
    run: Annotated[Path, typer.Argument(help="The run's folder, results/<run>.")],
    output: Annotated[Path, typer.Option(help="Folder for the cards, <model>.md and <model>.html.")],
    models: Annotated[
        list[str] | None, typer.Argument(help="Names of models; by default all models of the run.")
    ] = None,
) -> None:
    """Write the cards of a run's models: data, licences, training, lineage, results, limits.

    What belongs to a model wherever it is copied goes into its folder too: the card (README.md), how well each expert
    predicts its own domain (usual.json), and the clusters that can weight its experts (clusterer/).
    """
    from demix.files import write_text
    from demix.model.clusters import copy_clusters
    from demix.model.usual import usual_of, write_usual
    from demix.report.card import card_page, model_card
    from demix.run.run import Run

    whole = Run.read(run)
    for model in models or sorted(path.parent.name for path in (run / "models").glob("*/model.json")):
        text, directory = model_card(whole, model), run / "models" / model
        for path in (output / f"{model}.md", directory / "README.md"):
            write_text(path, text)
        write_text(output / f"{model}.html", card_page(whole, model, text))
        write_usual(directory, usual_of(directory))
        copy_clusters(directory, directory)


@app.command()
def track(
    run: Annotated[Path, typer.Argument(help="The run's folder, results/<run>.")],
    uri: Annotated[str, typer.Option(help="MLflow's store; by default tracking.uri of the run's config.")] = "",
    experiment: Annotated[str, typer.Option(help="MLflow experiment; default: the config's, or demix-<folder>.")] = "",
    output: Annotated[Path | None, typer.Option(help="Path of a receipt: what was sent, and where.")] = None,
) -> None:
    """Send a run's parameters, metrics, tables and figures to MLflow. Sending them again changes nothing."""
    from demix.config.addresses import LOG_IN_ELSEWHERE, refuse_secrets
    from demix.run.run import Run
    from demix.track.store import track as send

    refuse_secrets("--uri", uri, LOG_IN_ELSEWHERE)
    whole = Run.read(run)
    place = {"uri": uri or whole.config.tracking.uri, "experiment": experiment or whole.experiment}
    sent = send(whole, **place)
    if output is not None:
        write_json(output, {**place, "sent": sent})


def _parts_by_domain(documents: list[Path]) -> dict[str, list[Path]]:
    """The files documents/<domain>/<part>.parquet, grouped by domain."""
    names = dict.fromkeys(path.parent.name for path in documents)
    return {name: [path for path in documents if path.parent.name == name] for name in names}
