"""The content that MLflow gets from the files of a finished run: one record per MLflow run."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from demix.errors import DemixError
from demix.files import check_sealed, is_made, read_json, sha256_file
from demix.launch.progress import elapsed
from demix.report import report_files
from demix.report.ranking import representatives
from demix.report.read import Results, domains_of, mean_of, read_metrics, read_results
from demix.run.run import Run, kept
from demix.run.systems import System, main_systems
from demix.track.client import Point, named, points

PARAM_KEY_LENGTH, PARAM_VALUE_LENGTH = 250, 6000


@dataclass(frozen=True)
class Record:
    """The content of one MLflow run: params, metrics, and `artifacts` as (file, folder in the MLflow run).

    `begun` and `ended` are in milliseconds since 1970.
    """

    key: str
    kind: str
    begun: int
    ended: int
    params: dict[str, str]
    metrics: tuple[Point, ...]
    artifacts: tuple[tuple[Path, str], ...] = ()

    @property
    def name(self) -> str:
        """The name in MLflow's list, which cuts long names; the tag demix.kind has the first part of the key."""
        return self.key.removeprefix(f"{self.kind}/")

    def since(self, begun: int) -> list[Point]:
        """The metrics, with times shifted to a run that began at `begun`."""
        return [(name, value, step, time + begun - self.begun) for name, value, step, time in self.metrics]

    def sha256(self) -> str:
        """The hash of the whole content, including the bytes of the artifacts; times are not hashed."""
        files = [(folder, path.name, sha256_file(path)) for path, folder in self.artifacts]
        metrics = [point[:3] for point in self.metrics]
        content = json.dumps([self.key, self.kind, self.params, metrics, files], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def records(run: Run) -> list[Record]:
    """The records of a run, first the record of the whole run. Raises DemixError if a file is missing or damaged."""
    results = read_results(run.folder / "results.parquet")
    learned = [*_trainings(run, results)]
    parent = _pipeline(run, learned, tuple(_headlines(results, run)))
    return [parent, *learned]


def _changed(path: Path) -> int:
    """The time of a file's last change, in milliseconds since 1970."""
    return int(1000 * path.stat().st_mtime)


def _headlines(results: Results, run: Run) -> Iterator[Point]:
    """The main table: mean test perplexities on the domains of each kind."""
    own = results.of_seed(run.seed)
    for _, system in main_systems(run):
        parts = [system.model, "all" if system.experts == "all" else "", system.method, system.weights]
        name = ".".join(part for part in dict.fromkeys(parts) if part)
        for key, mean, step, time in _tested(system, own, run):
            yield named(f"{key}/{name}"), mean, step, time


def _pipeline(run: Run, learned: Sequence[Record], metrics: tuple[Point, ...]) -> Record:
    """The parent MLflow run: the whole run, with its tables, report and corpus cards.

    Raises DemixError if a part of the report is missing.
    """
    checked = [run.folder / "config.json", *run.folder.glob("*.parquet")]
    checked += [path for name in run.domains if is_made(path := run.folder / "corpus" / name / "card.json")]
    for path in checked:
        check_sealed(path)
    # The report is for other software: its files have no checksums.
    folder = run.folder / "report"
    report = [folder / name for name in report_files(run)]
    shown = [path for path in report if is_made(path)]
    if shown and len(shown) < len(report):
        missing = next(path for path in report if path not in shown)
        raise DemixError(missing, "is missing", f"make it again: demix report {run.folder} --output {folder}")
    files = [*checked, *shown, *(path for model in run.planned if is_made(path := _card(run, model.name)))]
    artifacts = tuple(sorted((path, path.parent.relative_to(run.folder).as_posix()) for path in files))
    ended = _changed(run.folder / "results.parquet")
    begun = min((record.begun for record in learned), default=ended)
    return Record("pipeline", "pipeline", begun, ended, flatten(kept(run.config)), metrics, artifacts)


def _card(run: Run, model: str) -> Path:
    return run.folder / "report" / "cards" / f"{model}.md"


def _trainings(run: Run, results: Results) -> Iterator[Record]:
    """One record per metrics file: a model, each of its experts that was trained by itself, or an adaptation."""
    systems = representatives(run)
    for model in run.trained:
        for part in [*(part for part in model.trainings if part.part), model]:
            if is_made(run.folder / "metrics" / f"{part.place}.jsonl"):
                record = _learned(
                    run, "training", part.place, run.folder / part.folder / "model.json", label=part.label
                )
                if not part.part and model.row in systems:
                    tested = _tested(systems[model.row], results.of_seed(model.seed), run, by_domain=True)
                    record = replace(record, metrics=(*record.metrics, *tested))
                yield record
    for one in run.adaptations:
        folder = run.folder / "models" / one.model
        described = folder / "experts" / f"{one.expert}.json" if one.adds_expert else folder / "model.json"
        if is_made(run.folder / "metrics" / f"{one.name}.jsonl"):
            yield _learned(run, "adaptation", one.name, described)


def _tested(system: System, results: Results, run: Run, *, by_domain: bool = False) -> Iterator[Point]:
    """Mean test perplexities of a system on the domains of each kind, and with `by_domain` that on each domain."""
    time = _changed(Path(str(results.path)))
    for domains in domains_of(run):
        found = results.perplexities(system, domains.names)
        if (mean := mean_of(found)) == mean:
            yield f"perplexity_{domains.kind}", mean, 0, time
        for domain, value in found.dropna().items() if by_domain else ():
            yield named(f"perplexity/{domain}"), value, 0, time


def _learned(run: Run, kind: str, name: str, described: Path, **settings: str) -> Record:
    """The record of a training or adaptation: `metrics/<name>.jsonl` and the description of the model or expert.

    Parameters of models are not sent: the description has their hashes, and the record has the address of their folder.
    """
    metrics = run.folder / "metrics" / f"{name}.jsonl"
    rows, ended = [*read_metrics(metrics)], _changed(metrics)
    begun = ended - int(1000 * max(elapsed(rows), default=0.0))
    model = read_json(described) | {"uri": described.parent.resolve().as_uri()} if is_made(described) else {}
    files = [(metrics, "."), (_card(run, name), "."), (described, "model")]
    artifacts = tuple((path, folder) for path, folder in files if is_made(path))
    params = flatten(settings | {"model": model})
    return Record(f"{kind}/{name}", kind, begun, ended, params, tuple(points(rows, begun)), artifacts)


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested mappings as one mapping with dotted keys and text values; lists become JSON."""
    if isinstance(value, dict) and (value or not prefix):
        items: dict[str, str] = {}
        for key, inner in value.items():
            items |= flatten(inner, f"{prefix}.{key}" if prefix else str(key))
        return items
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return {named(prefix)[:PARAM_KEY_LENGTH]: text[:PARAM_VALUE_LENGTH]}
