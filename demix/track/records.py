"""What MLflow gets of a finished run, from the run's files: one record per MLflow run."""

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from demix.config.systems import Adaptation, Model, adaptations, folder_of, planned, trained
from demix.errors import DemixError
from demix.files import check_sealed, digest, is_made, read_json, sha256_file
from demix.report import report_files
from demix.report.all_tables import main_systems
from demix.report.cells import kinds_of_domains, mean_of
from demix.report.read import (
    Results,
    novel_domains,
    of_seed,
    perplexities,
    read_metrics,
    read_results,
    training_domains,
)
from demix.track.client import Point, elapsed, named, points

PARAM_KEY_LENGTH, PARAM_VALUE_LENGTH = 250, 6000
Span = tuple[float, float]
TABLES = (
    *("config.json", "results.parquet", "priors.parquet"),
    *("differences.parquet", "posteriors.parquet", "audit.parquet", "tasks.parquet"),
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

    def sha256(self) -> str:
        """The hash of the whole content, including the bytes of the artifacts; times are not hashed."""
        files = [(folder, path.name, sha256_file(path)) for path, folder in self.artifacts]
        data = {domain: digest(read_json(path)) for domain, path in self.datasets.items()}
        table = None if self.table is None else self.table.to_json(orient="split", double_precision=15)
        metrics = [point[:3] for point in self.metrics]
        content = json.dumps([self.key, self.kind, self.params, metrics, files, data, table], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def records(run_dir: Path, config: dict[str, Any]) -> list[Record]:
    """The records of a run, first that of the whole run. Raises DemixError if a file is missing or damaged."""
    results = read_results(run_dir / "results.parquet")
    learned = [*_trainings(run_dir, config)]
    parent = _pipeline(run_dir, config, (*_headlines(results, config), *_dev_curves(learned)))
    return [parent, *learned, *_evaluations(run_dir, config, results)]


def _jobs(run_dir: Path, *patterns: str) -> list[Span]:
    """When the jobs whose benchmark files fit `patterns` began and ended."""
    spans: list[Span] = []
    for path in (path for pattern in patterns for path in run_dir.glob(f"benchmarks/{pattern}")):
        # A file that somebody has changed costs no more than a time.
        with suppress(ValueError, KeyError, TypeError), open(path, encoding="utf-8", newline="") as stream:
            ended = path.stat().st_mtime
            spans += [(ended - float(row["s"]), ended) for row in csv.DictReader(stream, delimiter="\t")]
    return spans


def _whole(run_dir: Path, spans: Sequence[Span]) -> Span:
    """From the first begin to the last end; without spans the time of the results."""
    ended = (run_dir / "results.parquet").stat().st_mtime
    return min((begun for begun, _ in spans), default=ended), max((end for _, end in spans), default=ended)


def _headlines(results: Results, config: dict[str, Any]) -> Iterator[Point]:
    """The main table: mean test perplexities on the domains of each kind."""
    own, time = of_seed(results, config), int(1000 * Path(str(results.path)).stat().st_mtime)
    for _, system in main_systems(config):
        parts = [system.model, "all" if system.experts == "all" else "", system.method, system.weights]
        name = ".".join(part for part in dict.fromkeys(parts) if part)
        for kind, domains in kinds_of_domains(config):
            mean = mean_of(perplexities(own, system, domains))
            if mean == mean:
                yield named(f"perplexity_{kind}/{name}"), mean, 0, time


def _dev_curves(learned: Iterable[Record]) -> Iterator[Point]:
    for record in learned:
        for key, value, step, time in record.metrics:
            if key == "dev_loss":
                yield named(f"dev_loss/{record.key.partition('/')[2]}"), value, step, time


def _pipeline(run_dir: Path, config: dict[str, Any], metrics: tuple[Point, ...]) -> Record:
    """The parent run: the whole config, the tables, the report and the corpus cards.

    Raises DemixError if a part of the report is missing.
    """
    files = [(run_dir / name, "") for name in TABLES]
    cards = [run_dir / "corpus" / name / "card.json" for kind in config["domains"].values() for name in kind]
    files += [(path, f"cards/{path.parent.name}") for path in cards]
    sealed = [(path, folder) for path, folder in files if is_made(path)]
    for path, _ in sealed:
        check_sealed(path)
    # The report is for other software, and no file of it has a seal.
    report = [run_dir / "report" / name for name in report_files(config)]
    shown = [path for path in report if is_made(path)]
    if shown and len(shown) < len(report):
        missing = next(path for path in report if path not in shown)
        raise DemixError(missing, "is missing", "run `demix report` again")
    shown += [path for model in planned(config) if is_made(path := _card(run_dir, model.name))]
    artifacts = tuple(sorted([*sealed, *((path, path.parent.relative_to(run_dir).as_posix()) for path in shown)]))
    return Record(
        "pipeline", "pipeline", _whole(run_dir, _jobs(run_dir, "**/*.tsv")), flatten(config), metrics, artifacts
    )


def _card(run_dir: Path, model: str) -> Path:
    return run_dir / "report" / "cards" / f"{model}.md"


def _trainings(run_dir: Path, config: dict[str, Any]) -> Iterator[Record]:
    """One record per metrics file: a model, each of its experts that was trained by itself, or an adaptation."""
    for model in trained(config):
        for part in (part for job in model.jobs for part in job if part.part):
            if is_made(run_dir / "metrics" / f"{part.place}.jsonl"):
                yield _training(run_dir, config, part)
        if is_made(run_dir / "metrics" / f"{model.name}.jsonl"):
            yield _training(run_dir, config, model)
    for one in adaptations(config):
        if is_made(run_dir / "metrics" / f"{one.name}.jsonl"):
            yield _adaptation(run_dir, config, one)


def _training(run_dir: Path, config: dict[str, Any], model: Model) -> Record:
    directory = run_dir / model.folder
    settings = {part: config.get(part) or {} for part in ("architecture", "tokenizer", "training")}
    settings["models"] = {model.base: (config.get("models") or {}).get(model.base) or {}}
    chosen = run_dir / "sweep" / f"{model.rates_from}.json"
    # The file may be left over from a sweep that the config no longer asks for.
    if model.settings.get("sweep") and is_made(chosen):
        settings["sweep"] = read_json(chosen)
    files = [directory / "model.json", *sorted((directory / "experts").glob("*.json"))]
    # Experts added later have a run of their own.
    files = [file for file in files if is_made(file) and "adaptation" not in read_json(file)]
    return _learned(run_dir, config, f"training/{model.place}", f"train/{model.place}", settings, files)


def _adaptation(run_dir: Path, config: dict[str, Any], one: Adaptation) -> Record:
    directory = run_dir / "models" / one.model
    file = directory / "experts" / f"{one.expert}.json" if one.adds_expert else directory / "model.json"
    files = [file] if is_made(file) else []
    job, settings = f"{one.rule.replace('_', '-')}/{one.domain}", {"adaptation": config.get("adaptation") or {}}
    return _learned(run_dir, config, f"adaptation/{one.name}", job, settings, files)


def _learned(
    run_dir: Path, config: dict[str, Any], key: str, job: str, settings: dict[str, Any], described: list[Path]
) -> Record:
    """The record of a training or adaptation: `metrics/<name>.jsonl` and the descriptions of weights, `described`.

    `job` names the benchmark file. Weights are not sent: the record holds the folder of the weights and the
    descriptions with the hashes.
    """
    kind, _, name = key.partition("/")
    metrics = run_dir / "metrics" / f"{name}.jsonl"
    rows, ended = [*read_metrics(metrics)], metrics.stat().st_mtime
    seconds = max(elapsed(rows), default=0.0)
    # A training that was resumed took longer than its last job, and a job takes longer than its updates.
    begun = min([ended - seconds, *(begun for begun, _ in _jobs(run_dir, f"{job}.tsv"))])
    corpora = {}
    if described:
        first, *_ = described
        model = read_json(first)
        settings = settings | {"model": model | {"uri": first.parent.resolve().as_uri()}}
        read = model.get("data_sha256") or {}
        domains = [name for name in (*training_domains(config), *novel_domains(config)) if name in read]
        corpora = {name: run_dir / "corpus" / name / "card.json" for name in domains}
    files = [(metrics, ""), (_card(run_dir, name), "")]
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


def _evaluations(run_dir: Path, config: dict[str, Any], results: Results) -> Iterator[Record]:
    """One record per model and set of experts: perplexities, and means over all domains of a kind."""
    scored = results.rows.query("variant == ''")
    for (model, experts, seed), rows in scored.groupby(["model", "experts", "seed"], sort=True):
        # Models of further seeds are named as their folders are.
        model = folder_of(model, seed, config["seed"])
        # A job that scores several models is the job of each of them.
        jobs = _jobs(run_dir, f"score/{model}/*.tsv", f"score/{model}.tsv") or _jobs(run_dir, "score/others/*.tsv")
        metrics, span = [], _whole(run_dir, jobs)
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
            metrics += [(named(f"{prefix}/{domain}"), float(value), 0, time) for domain, value in values.items()]
            for kind, domains in kinds_of_domains(config):
                if domains and set(domains) <= set(values.index):
                    metrics.append((named(f"{prefix}/mean_{kind}"), float(values[domains].mean()), 0, time))
        settings = {"evaluation": config.get("evaluation") or {}, "model": model, "experts": experts}
        settings["n_experts"] = int(rows["n_experts"].max())
        table = rows[list(RESULT_COLUMNS)].sort_values([*by, "domain"], ignore_index=True)
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
