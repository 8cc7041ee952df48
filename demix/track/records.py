"""What MLflow gets of a finished run, from the run's files: one record per MLflow run."""

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from demix.errors import DemixError
from demix.files import check_sealed, digest, is_made, read_json, sha256_file
from demix.launch.pace import elapsed
from demix.report import report_files
from demix.report.ranking import representatives
from demix.report.read import Results, domains_of, read_metrics, read_results, read_rows
from demix.run.models import AdaptationJob, Model
from demix.run.run import Run, kept
from demix.run.systems import System, main_systems
from demix.settings import written
from demix.track.client import Point, named, points

# MLflow gets the perplexity of each expert on each domain in a run of so many domains at most.
PAIRS_SENT = 64
PARAM_KEY_LENGTH, PARAM_VALUE_LENGTH = 250, 6000
Span = tuple[float, float]
TABLES = (
    *("config.json", "results.parquet", "priors.parquet"),
    *("differences.parquet", "posteriors.parquet", "audit.parquet", "tasks.parquet", "task_weights.parquet"),
    "suites.parquet",
)
RESULT_COLUMNS = (
    *("domain", "method", "weights", "expert", "top_k", "perplexity", "perplexity_low", "perplexity_high"),
    *("bits_per_byte", "documents", "pieces", "tokens", "kind", "split", "oracle"),
)


@dataclass(frozen=True)
class Record:
    """The content of one MLflow run: its metrics, and `artifacts` as (file, folder in the run).

    `span` are its begin and end in seconds since 1970. `datasets` are the corpus cards of the training data, by domain.
    MLflow shows `table` as results.json.
    """

    key: str
    kind: str
    span: Span
    params: dict[str, str] = field(default_factory=dict)
    metrics: tuple[Point, ...] = ()
    artifacts: tuple[tuple[Path, str], ...] = ()
    datasets: dict[str, Path] = field(default_factory=dict)
    table: pd.DataFrame | None = None

    @property
    def name(self) -> str:
        """What MLflow's list shows, which cuts long names; the tag demix.kind has the first part of the key."""
        return self.key.removeprefix(f"{self.kind}/")

    def sha256(self) -> str:
        """The hash of the whole content, including the bytes of the artifacts; times are not hashed."""
        files = [(folder, path.name, sha256_file(path)) for path, folder in self.artifacts]
        data = {domain: digest(read_json(path)) for domain, path in self.datasets.items()}
        table = None if self.table is None else self.table.to_json(orient="split", double_precision=15)
        metrics = [point[:3] for point in self.metrics]
        content = json.dumps([self.key, self.kind, self.params, metrics, files, data, table], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def records(run: Run) -> list[Record]:
    """The records of a run, first that of the whole run. Raises DemixError if a file is missing or damaged."""
    results = read_results(run.folder / "results.parquet")
    learned = [*_trainings(run, results)]
    parent = _pipeline(run, (*_headlines(results, run), *_harness(run), *_dev_curves(learned)))
    return [parent, *learned, *_evaluations(run, results)]


def _jobs(run: Run, *patterns: str) -> list[Span]:
    """When the jobs whose benchmark files fit `patterns` began and ended."""
    spans: list[Span] = []
    for path in (path for pattern in patterns for path in run.folder.glob(f"benchmarks/{pattern}")):
        # A file that somebody has changed costs no more than a time.
        with suppress(ValueError, KeyError, TypeError), open(path, encoding="utf-8", newline="") as stream:
            ended = path.stat().st_mtime
            spans += [(ended - float(row["s"]), ended) for row in csv.DictReader(stream, delimiter="\t")]
    return spans


def _whole(run: Run, spans: Sequence[Span]) -> Span:
    """From the first begin to the last end; without spans the time of the results."""
    ended = (run.folder / "results.parquet").stat().st_mtime
    return min((begun for begun, _ in spans), default=ended), max((end for _, end in spans), default=ended)


def _headlines(results: Results, run: Run) -> Iterator[Point]:
    """The main table: mean test perplexities on the domains of each kind."""
    own = results.of_seed(run.seed)
    for _, system in main_systems(run):
        parts = [system.model, "all" if system.experts == "all" else "", system.method, system.weights]
        name = ".".join(part for part in dict.fromkeys(parts) if part)
        for key, mean, step, time in _tested(system, own, run):
            yield named(f"{key}/{name}"), mean, step, time


def _harness(run: Run) -> Iterator[Point]:
    """The values of the harness's tasks by metric, of each model and rule that mixes its experts."""
    path = run.folder / "tasks.parquet"
    if run.config.lm_eval and is_made(path):
        time = int(1000 * path.stat().st_mtime)
        for row in read_rows(path, "harness").itertuples():
            rule = "" if row.routing == "dense" else f".{row.routing}"
            yield named(f"{row.task} {row.metric}/{row.model}{rule}"), row.value, 0, time


def _dev_curves(learned: Iterable[Record]) -> Iterator[Point]:
    for record in learned:
        for key, value, step, time in record.metrics:
            if key == "dev_loss":
                yield named(f"dev_loss/{record.key.partition('/')[2]}"), value, step, time


def _pipeline(run: Run, metrics: tuple[Point, ...]) -> Record:
    """The parent run: the whole run, the tables, the report and the corpus cards.

    Raises DemixError if a part of the report is missing.
    """
    files = [(run.folder / name, "") for name in TABLES]
    cards = [run.folder / "corpus" / name / "card.json" for name in run.domains]
    files += [(path, f"cards/{path.parent.name}") for path in cards]
    sealed = [(path, folder) for path, folder in files if is_made(path)]
    for path, _ in sealed:
        check_sealed(path)
    # The report is for other software, and no file of it has a seal.
    folder = run.folder / "report"
    report = [folder / name for name in report_files(run)]
    shown = [path for path in report if is_made(path)]
    if shown and len(shown) < len(report):
        missing = next(path for path in report if path not in shown)
        raise DemixError(missing, "is missing", f"make it again: demix report {run.folder} --output {folder}")
    shown += [path for model in run.planned if is_made(path := _card(run, model.name))]
    artifacts = tuple(sorted([*sealed, *((path, path.parent.relative_to(run.folder).as_posix()) for path in shown)]))
    span = _whole(run, _jobs(run, "**/*.tsv"))
    return Record("pipeline", "pipeline", span, flatten(kept(run.config)), metrics, artifacts)


def _card(run: Run, model: str) -> Path:
    return run.folder / "report" / "cards" / f"{model}.md"


def _trainings(run: Run, results: Results) -> Iterator[Record]:
    """One record per metrics file: a model, each of its experts that was trained by itself, or an adaptation."""
    systems = representatives(run)
    for model in run.trained:
        for part in (part for part in model.trainings if part.part):
            if is_made(run.folder / "metrics" / f"{part.place}.jsonl"):
                yield _training(run, part)
        if is_made(run.folder / "metrics" / f"{model.name}.jsonl"):
            record = _training(run, model)
            tested = _tested(systems[model.row], results.of_seed(model.seed), run) if model.row in systems else ()
            yield replace(record, metrics=(*record.metrics, *tested))
    for one in run.adaptations:
        if is_made(run.folder / "metrics" / f"{one.name}.jsonl"):
            yield _adaptation(run, one)


def _tested(system: System, results: Results, run: Run) -> Iterator[Point]:
    """Mean test perplexities on the domains of each kind, of the system that represents a model (`representatives`)."""
    time = int(1000 * Path(str(results.path)).stat().st_mtime)
    for domains in domains_of(run):
        if (mean := results.mean(system, domains.names)) == mean:
            yield f"perplexity_{domains.kind}", mean, 0, time


def _training(run: Run, model: Model) -> Record:
    directory = run.folder / model.folder
    config = run.config
    settings: dict[str, Any] = {
        "label": model.label,
        "architecture": written(config.architecture),
        "tokenizer": written(config.tokenizer),
        "training": written(config.training),
        "models": {model.base.name: written(config.models[model.base.name])},
    }
    chosen = run.folder / "sweep" / f"{model.rates_from}.json"
    # The file may be left over from a sweep that the config no longer asks for.
    if model.settings.sweep and is_made(chosen):
        settings["sweep"] = read_json(chosen)
    files = [directory / "model.json", *sorted((directory / "experts").glob("*.json"))]
    # Experts added later have a run of their own.
    files = [file for file in files if is_made(file) and "adaptation" not in read_json(file)]
    return _learned(run, f"training/{model.place}", f"train/{model.place}", settings, files)


def _adaptation(run: Run, one: AdaptationJob) -> Record:
    directory = run.folder / "models" / one.model
    file = directory / "experts" / f"{one.expert}.json" if one.adds_expert else directory / "model.json"
    files = [file] if is_made(file) else []
    job, settings = f"{one.rule.replace('_', '-')}/{one.domain}", {"adaptation": written(run.config.adaptation)}
    return _learned(run, f"adaptation/{one.name}", job, settings, files)


def _learned(run: Run, key: str, job: str, settings: dict[str, Any], described: list[Path]) -> Record:
    """The record of a training or adaptation: `metrics/<name>.jsonl` and the descriptions of weights, `described`.

    `job` names the benchmark file. Weights are not sent: the record holds the folder of the weights and the
    descriptions with the hashes.
    """
    kind, _, name = key.partition("/")
    metrics = run.folder / "metrics" / f"{name}.jsonl"
    rows, ended = [*read_metrics(metrics)], metrics.stat().st_mtime
    seconds = max(elapsed(rows), default=0.0)
    # A training that was resumed took longer than its last job, and a job takes longer than its updates.
    begun = min([ended - seconds, *(begun for begun, _ in _jobs(run, f"{job}.tsv"))])
    corpora = {}
    if described:
        first, *_ = described
        model = read_json(first)
        settings = settings | {"model": model | {"uri": first.parent.resolve().as_uri()}}
        read = model.get("data_sha256") or {}
        domains = [name for name in (*run.training, *run.novel) if name in read]
        corpora = {name: run.folder / "corpus" / name / "card.json" for name in domains}
    files = [(metrics, ""), (_card(run, name), "")]
    files += [(file, "model" if file.name == "model.json" else "model/experts") for file in described]
    return Record(
        key,
        kind,
        (begun, ended),
        flatten(settings),
        tuple(points(rows, ended - seconds)),
        tuple((path, folder) for path, folder in files if is_made(path)),
        {name: path for name, path in corpora.items() if is_made(path)},
    )


def _evaluations(run: Run, results: Results) -> Iterator[Record]:
    """One record per model and set of experts: perplexities, and means over all domains of a kind.

    Of single experts on domains other than their own a run of many domains has means alone.
    """
    scored, few = results.rows.query("variant == ''"), len(run.domains) <= PAIRS_SENT
    for (model, experts, seed), rows in scored.groupby(["model", "experts", "seed"], sort=True):
        # Models of further seeds are named as their folders are.
        model = run.folder_of(model, seed)
        # A job that scores several models is the job of each of them.
        jobs = _jobs(run, f"score/{model}/*.tsv", f"score/{model}.tsv") or _jobs(run, "score/others/*.tsv")
        metrics, span = [], _whole(run, jobs)
        time = int(1000 * span[1])
        # MLflow draws metrics of one name in one chart.
        masked = "scorer" in rows and rows["scorer"].str.startswith("masked").any()
        measure = "masked_perplexity" if masked else "perplexity"
        by = ["split", "method", "weights", "expert", "top_k"]
        # `naive` chooses another expert in each domain: the expert is no part of the method's name.
        by_name = rows.assign(expert=rows["expert"].where(rows["method"] == "expert", ""))
        for (split, method, weights, expert, top_k), group in by_name.groupby(by, sort=True, dropna=False):
            parts = [method, expert, weights, "" if pd.isna(top_k) else f"top{top_k:.0f}"]
            prefix = f"{'' if split == 'test' else f'{split}_'}{measure}/{'.'.join(filter(None, parts))}"
            values = group.set_index("domain")["perplexity"]
            sent = values if few or method != "expert" else values[values.index == expert]
            metrics += [(named(f"{prefix}/{domain}"), float(value), 0, time) for domain, value in sent.items()]
            for domains in domains_of(run):
                if set(domains.names) <= set(values.index):
                    mean = float(values[domains.names].mean())
                    metrics.append((named(f"{prefix}/mean_{domains.kind}"), mean, 0, time))
        settings = {"evaluation": written(run.config.evaluation), "model": model, "experts": experts}
        settings["n_experts"] = int(rows["n_experts"].max())
        told = rows if few else rows[(rows["method"] != "expert") | (rows["expert"] == rows["domain"])]
        table = told[list(RESULT_COLUMNS)].sort_values([*by, "domain"], ignore_index=True)
        key = f"evaluation/{model}/{experts}"
        yield Record(key, "evaluation", span, flatten(settings), tuple(sorted(metrics)), table=table)


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested mappings as one mapping with dotted keys and text values; lists become JSON."""
    if isinstance(value, dict) and (value or not prefix):
        items: dict[str, str] = {}
        for key, inner in value.items():
            items |= flatten(inner, f"{prefix}.{key}" if prefix else str(key))
        return items
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return {named(prefix)[:PARAM_KEY_LENGTH]: text[:PARAM_VALUE_LENGTH]}
