"""Sends the files of a finished run to MLflow. The files stay the source of truth.

Every MLflow run carries a deterministic key and the hash of its content. Sending unchanged files again changes
nothing; sending changed files replaces only the MLflow runs whose content changed.
"""

import hashlib
import json
import logging
import os
import platform
import re
import shlex
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import psutil

from demix.config.run import config_fingerprint
from demix.config.systems import Adaptation, Model, adaptations, folder_of, planned, trained
from demix.errors import DemixError
from demix.files import check_sealed, digest, exclusive, is_made, read_json, replacing, sha256_file
from demix.report import REPORT_FILES
from demix.report.read import novel_domains, read_metrics, read_results, training_domains

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Run
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)

METRICS_PER_BATCH, PARAMS_PER_BATCH = 1000, 100
PARAM_KEY_LENGTH, PARAM_VALUE_LENGTH = 250, 6000
SQLITE = "sqlite:///"
# Databases store rows but no files: artifacts need a folder. An MLflow server stores both.
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
# The longest wait for another process that writes to the same SQLite file.
PATIENCE_SECONDS = 900.0
# The PyPI names of database drivers whose modules have another name.
DRIVERS = {"psycopg2": "psycopg2-binary", "psycopg": "'psycopg[binary]'", "MySQLdb": "mysqlclient"}
# SQLite waits so long for a lock: another writer may end in time.
SECONDS_FOR_A_LOCK = 30.0
# File locks are unreliable or slow on these.
NETWORK_FILE_SYSTEMS = {
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "cifs", "smb3", "smbfs", "afs", "ceph", "fuse.ceph",
    "glusterfs", "fuse.glusterfs", "fuse.sshfs", "panfs", "orangefs", "wekafs", "9p",
}  # fmt: skip
TABLES = (
    *("config.json", "results.parquet", "priors.parquet"),
    *("differences.parquet", "posteriors.parquet", "audit.parquet"),
)
RESULT_COLUMNS = (
    *("domain", "method", "weights", "expert", "top_k", "perplexity", "perplexity_low", "perplexity_high"),
    *("bits_per_byte", "documents", "pieces", "tokens", "kind", "split", "oracle"),
)
RUN, CONFIG, KEY, HASH = "demix.run", "demix.config", "demix.key", "demix.sha256"


@dataclass(frozen=True)
class Record:
    """The content of one MLflow run: `metrics` as (key, value, step), `artifacts` as (file, folder in the run).

    `datasets` are the corpus cards of the training data, by domain. MLflow shows `table` as results.json.
    """

    key: str
    kind: str
    params: dict[str, str] = field(default_factory=dict)
    metrics: tuple[tuple[str, float, int], ...] = ()
    artifacts: tuple[tuple[Path, str], ...] = ()
    datasets: dict[str, Path] = field(default_factory=dict)
    table: pd.DataFrame | None = None

    def sha256(self) -> str:
        """The hash of the whole content, including the bytes of the artifacts."""
        files = [(folder, path.name, sha256_file(path)) for path, folder in self.artifacts]
        data = {domain: digest(read_json(path)) for domain, path in self.datasets.items()}
        table = None if self.table is None else self.table.to_json(orient="split", double_precision=15)
        content = json.dumps([self.key, self.kind, self.params, self.metrics, files, data, table], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def track(run_dir: str | Path, config: dict[str, Any], uri: str, experiment: str) -> str:
    """Make the MLflow experiment hold what lies below `run_dir` (`results/<run>/`); return the printed summary line.

    A pipeline run has one parent run, and one nested run per training, adaptation and evaluation (a model with a set of
    experts). Their tags demix.run and demix.config are what `demix compare` prints. Unchanged runs are kept, changed
    runs are deleted and created again, and runs whose files are gone are deleted. With a SQLite `uri`, artifacts go to
    `mlartifacts/` beside the database, and one process at a time writes. With another database, artifacts go to
    `mlartifacts/` beside `run_dir`. A server chooses the place itself.

    Deleted runs stay in MLflow's bin until `mlflow gc`. The times in MLflow are the time of `results.parquet`.

    Raises DemixError if files are missing or damaged, or if the tracking server does not answer.
    """
    run_dir = Path(run_dir)
    results = run_dir / "results.parquet"
    # All files are read before anything is sent, so that a damaged file stops the whole.
    parent, *nested = _pipeline(run_dir, config), *_trainings(run_dir, config), *_evaluations(run_dir, config)
    time = int(results.stat().st_mtime * 1000)
    with _alone(uri):
        client, store_errors = _client(uri)
        try:
            experiment_id = _experiment(client, uri, experiment, run_dir.resolve().parent)
            named = {RUN: str(config["run"]), CONFIG: config_fingerprint(config)}
            counts = _send(client, experiment_id, named, parent, nested, time=time)
        except store_errors as error:
            cause = str(error).strip().split("\n")[0]
            cure = "check tracking.uri and that the server is up, then rerun"
            raise DemixError(uri, f"does not take the runs ({cause})", cure) from error
    told = ", ".join(f"{count} {name}" for name, count in counts.items())
    summary = f"mlflow: {1 + len(nested)} runs in experiment {experiment} at {uri}: {told}"
    print(summary)
    return summary


def _alone(uri: str) -> AbstractContextManager[None]:
    """Wait for other processes that write to a SQLite `uri`. Other databases and servers handle concurrent writers."""
    if not uri.startswith(SQLITE):
        return nullcontext()
    path = _sqlite_path(uri)
    return exclusive(path.with_name(f".{path.name}.lock"), f"writes to {path.name}", PATIENCE_SECONDS)


def _client(uri: str) -> "tuple[MlflowClient, tuple[type[Exception], ...]]":
    """A client, and the exceptions that the client raises for an unusable store."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["DO_NOT_TRACK"] = "true"
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "1"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    if uri.startswith(SQLITE):
        folder = _sqlite_folder(uri)
        if (kind := file_system(folder)) in NETWORK_FILE_SYSTEMS:
            log.warning(
                "%s: SQLite on a network file system (%s) may be damaged by a second writer; put tracking.uri on a"
                " local disk, or name a server", folder, kind,
            )  # fmt: skip
        _try_sqlite(uri)
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient
    from sqlalchemy.exc import SQLAlchemyError

    errors = (MlflowException, SQLAlchemyError, ConnectionError)
    try:
        if uri.startswith(SQLITE) and not _sqlite_path(uri).stat().st_size:
            # MLflow creates tables one by one and refuses a database with only some of them: a kill must leave none.
            with replacing(_sqlite_path(uri)) as temporary:
                # A "?" in the path of the working folder would begin the options of an address.
                MlflowClient(tracking_uri=f"{SQLITE}{os.path.relpath(temporary)}")
        return MlflowClient(tracking_uri=uri), errors
    except errors as error:
        cause = str(error).strip().split("\n")[0]
        raise DemixError(uri, f"cannot be opened ({cause})", "check tracking.uri in the config") from error
    except ModuleNotFoundError as error:
        cure = f"pip install {DRIVERS.get(error.name or '', error.name)}"
        raise DemixError(uri, f"needs the Python package {error.name}", cure) from error


def _try_sqlite(uri: str) -> None:
    """Raise DemixError if a database cannot be read and written: MLflow would retry for minutes and print traces."""
    try:
        with closing(sqlite3.connect(_sqlite_path(uri), timeout=SECONDS_FOR_A_LOCK)) as database:
            database.isolation_level = None
            database.execute("begin immediate")
            database.execute("create table demix_writes (a)")
            database.execute("rollback")
    except sqlite3.Error as error:
        cure = "check tracking.uri in the config, end who holds it, or move the file away, then rerun"
        raise DemixError(uri, f"cannot be opened ({error})", cure) from error


def file_system(folder: Path) -> str:
    """The type of the file system of `folder`, from the mount table."""
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next(mounts[place] for place in (folder.resolve(), *folder.resolve().parents) if place in mounts)


def _sqlite_path(uri: str) -> Path:
    return Path(uri.removeprefix(SQLITE).partition("?")[0]).resolve()


def _sqlite_folder(uri: str) -> Path:
    return _sqlite_path(uri).parent


def _experiment(client: "MlflowClient", uri: str, name: str, results: Path) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        if found.lifecycle_stage == "deleted":
            restore = f"mlflow experiments restore --experiment-id {shlex.quote(found.experiment_id)}"
            raise DemixError(f"experiment {name}", f"was deleted in {uri}", f"run `{restore}` or choose another name")
        return found.experiment_id
    location = None
    if re.split(r"[:+]", uri)[0] in DATABASES:
        folder = _sqlite_folder(uri) if uri.startswith(SQLITE) else results
        location = f"{(folder / 'mlartifacts').as_uri()}/{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return client.create_experiment(name, artifact_location=location)


def _send(
    client: "MlflowClient", experiment_id: str, named: dict[str, str], parent: Record, nested: list[Record], time: int
) -> dict[str, int]:
    wanted = {record.key: record.sha256() for record in (parent, *nested)}
    counts = dict.fromkeys(("new", "replaced", "unchanged", "deleted"), 0)
    kept: dict[str, Run] = {}
    outdated = set()
    for old in _runs(client, experiment_id, named[RUN]):
        key = old.data.tags.get(KEY, "")
        # The hash is written last: an incomplete MLflow run has none and is created again.
        if key in wanted and old.data.tags.get(HASH) == wanted[key] and key not in kept:
            kept[key] = old
            continue
        client.delete_run(old.info.run_id)
        outdated.add(key)
    counts["deleted"] = len(outdated - wanted.keys())
    for record in (parent, *nested):
        if record.key in kept:
            counts["unchanged"] += 1
            run_id = kept[record.key].info.run_id
            for name, value in named.items() - kept[record.key].data.tags.items():
                client.set_tag(run_id, name, value)
        else:
            counts["replaced" if record.key in outdated else "new"] += 1
            tags = {KEY: record.key, "demix.kind": record.kind, **_origin(), **named}
            run_id = _write(client, experiment_id, record, tags, digest=wanted[record.key], time=time)
        if record is parent:
            named = named | {"mlflow.parentRunId": run_id}
    return counts


def _runs(client: "MlflowClient", experiment_id: str, run: str) -> "Iterator[Run]":
    token = None
    while True:
        page = client.search_runs([experiment_id], f"tags.`{RUN}` = '{run}'", max_results=1000, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _write(
    client: "MlflowClient", experiment_id: str, record: Record, tags: dict[str, str], *, digest: str, time: int
) -> str:
    from mlflow.entities import Metric, Param

    run_id: str = client.create_run(experiment_id, start_time=time, tags=tags, run_name=record.key).info.run_id
    params = [Param(key, value) for key, value in record.params.items()]
    for start in range(0, len(params), PARAMS_PER_BATCH):
        client.log_batch(run_id, params=params[start : start + PARAMS_PER_BATCH])
    metrics = [Metric(key, value, time, step) for key, value, step in record.metrics]
    for start in range(0, len(metrics), METRICS_PER_BATCH):
        client.log_batch(run_id, metrics=metrics[start : start + METRICS_PER_BATCH])
    for path, folder in record.artifacts:
        client.log_artifact(run_id, str(path), folder or None)
    if record.table is not None:
        # MLflow warns about pandas' own type of text.
        texts = dict.fromkeys(record.table.select_dtypes("str"), object)
        client.log_table(run_id, record.table.astype(texts), "results.json")
    if record.kind == "pipeline":
        client.log_text(run_id, _packages(), "environment.txt")
    if record.datasets:
        client.log_inputs(run_id, [_dataset(domain, path) for domain, path in record.datasets.items()])
    client.set_tag(run_id, HASH, digest)
    client.set_terminated(run_id, "FINISHED", end_time=time)
    return run_id


def _dataset(domain: str, card: Path) -> "DatasetInput":
    """A domain's corpus, identified by its card: MLflow gets the folder and the counts, never the text."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = json.dumps({"uri": card.parent.resolve().as_uri()})
    counts = read_json(card)
    profile = json.dumps(counts, sort_keys=True)
    dataset = Dataset(domain, digest(counts)[:32], "local", source, profile=profile)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])


@cache
def _origin() -> dict[str, str]:
    """Tags of the code and the software that send the run; not hashed, so that a new commit replaces nothing."""
    tags = {f"demix.environment.{name}": version(name) for name in ("torch", "numpy", "pyarrow", "snakemake", "mlflow")}
    tags |= {"demix.environment.python": platform.python_version(), "demix.environment.platform": platform.platform()}
    tags |= {"mlflow.source.name": "demix track", "mlflow.source.type": "LOCAL"}
    # An installed demix may lie inside the repository of another project.
    if _git("ls-files", "--error-unmatch", __file__) is not None:
        tags["mlflow.source.git.commit"] = _git("rev-parse", "HEAD") or "none"
        tags["mlflow.source.git.dirty"] = str(bool(_git("status", "--porcelain", "--untracked-files=no"))).lower()
    return tags


def _git(*arguments: str) -> str | None:
    """The output of git in the repository of this code; None if git fails or is not installed."""
    if (git := shutil.which("git")) is None:
        return None
    command = [git, "-C", str(Path(__file__).parent), *arguments]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return asked.stdout.strip() if asked.returncode == 0 else None


@cache
def _packages() -> str:
    """All installed packages, in the format of `pip install -r`."""
    found = {f"{package.name}=={package.version}" for package in distributions()}
    return "".join(f"{line}\n" for line in sorted(found, key=str.lower))


def _pipeline(run_dir: Path, config: dict[str, Any]) -> Record:
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
    report = [run_dir / "report" / name for name in REPORT_FILES]
    shown = [path for path in report if is_made(path)]
    if shown and len(shown) < len(report):
        missing = next(path for path in report if path not in shown)
        raise DemixError(missing, "is missing", "run `demix report` again")
    shown += [path for model in planned(config) if is_made(path := _card(run_dir, model.name))]
    artifacts = tuple(sorted([*sealed, *((path, path.parent.relative_to(run_dir).as_posix()) for path in shown)]))
    return Record("pipeline", "pipeline", flatten(config), artifacts=artifacts)


def _card(run_dir: Path, model: str) -> Path:
    return run_dir / "report" / "cards" / f"{model}.md"


def _trainings(run_dir: Path, config: dict[str, Any]) -> Iterator[Record]:
    """One record per metrics file: a model trained from scratch, or an adaptation."""
    for model in trained(config):
        if is_made(run_dir / "metrics" / f"{model.name}.jsonl"):
            yield _training(run_dir, config, model)
    for one in adaptations(config):
        if is_made(run_dir / "metrics" / f"{one.name}.jsonl"):
            yield _adaptation(run_dir, config, one)


def _training(run_dir: Path, config: dict[str, Any], model: Model) -> Record:
    directory = run_dir / "models" / model.name
    settings = {part: config.get(part) or {} for part in ("architecture", "tokenizer", "training")}
    settings["models"] = {model.base: (config.get("models") or {}).get(model.base) or {}}
    chosen = run_dir / "sweep" / f"{model.rates_from}.json"
    # The file may be left over from a sweep that the config no longer asks for.
    if model.settings.get("sweep") and is_made(chosen):
        settings["sweep"] = read_json(chosen)
    files = [directory / "model.json", *sorted((directory / "experts").glob("*.json"))]
    # Experts added later have a run of their own.
    files = [file for file in files if is_made(file) and "adaptation" not in read_json(file)]
    return _learned(run_dir, config, f"training/{model.name}", settings, files)


def _adaptation(run_dir: Path, config: dict[str, Any], one: Adaptation) -> Record:
    directory = run_dir / "models" / one.model
    file = directory / "experts" / f"{one.expert}.json" if one.adds_expert else directory / "model.json"
    files = [file] if is_made(file) else []
    return _learned(run_dir, config, f"adaptation/{one.name}", {"adaptation": config.get("adaptation") or {}}, files)


def _learned(
    run_dir: Path, config: dict[str, Any], key: str, settings: dict[str, Any], described: list[Path]
) -> Record:
    """The record of a training or adaptation: `metrics/<name>.jsonl` and the descriptions of weights, `described`.

    Weights are not sent: the record holds the folder of the weights and the descriptions with the hashes.
    """
    kind, name = key.split("/")
    metrics = run_dir / "metrics" / f"{name}.jsonl"
    points = tuple(
        (_key(key), float(value), int(line.get("step", 0)))
        for line in read_metrics(metrics)
        for key, value in line.items()
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    )
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
        flatten(settings),
        points,
        tuple((path, folder) for path, folder in files if is_made(path)),
        {name: path for name, path in corpora.items() if is_made(path)},
    )


def _evaluations(run_dir: Path, config: dict[str, Any]) -> Iterator[Record]:
    """One record per model and set of experts: perplexities, and means over all domains of a kind."""
    results = read_results(run_dir / "results.parquet").rows.query("variant == ''")
    names = {"training": training_domains(config), "novel": novel_domains(config)}
    for (model, experts, seed), rows in results.groupby(["model", "experts", "seed"], sort=True):
        # Models of further seeds are named as their folders are.
        model = folder_of(model, seed, config["seed"])
        metrics = []
        by = ["split", "method", "weights", "expert", "top_k"]
        # `naive` chooses another expert in each domain: the expert is no part of the method's name.
        named = rows.assign(expert=rows["expert"].where(rows["method"] == "expert", ""))
        for (split, method, weights, expert, top_k), group in named.groupby(by, sort=True, dropna=False):
            parts = [method, expert, weights, "" if pd.isna(top_k) else f"top{top_k:.0f}"]
            prefix = f"{'' if split == 'test' else f'{split}_'}perplexity/{'.'.join(filter(None, parts))}"
            values = group.set_index("domain")["perplexity"]
            metrics += [(_key(f"{prefix}/{domain}"), float(value), 0) for domain, value in values.items()]
            for kind, domains in names.items():
                if domains and set(domains) <= set(values.index):
                    metrics.append((_key(f"{prefix}/mean_{kind}"), float(values[domains].mean()), 0))
        settings = {"evaluation": config.get("evaluation") or {}, "model": model, "experts": experts}
        settings["n_experts"] = int(rows["n_experts"].max())
        table = rows[list(RESULT_COLUMNS)].sort_values([*by, "domain"], ignore_index=True)
        key = f"evaluation/{model}/{experts}"
        yield Record(key, "evaluation", flatten(settings), tuple(sorted(metrics)), table=table)


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested mappings as one mapping with dotted keys and text values; lists become JSON."""
    if isinstance(value, dict) and (value or not prefix):
        items: dict[str, str] = {}
        for key, inner in value.items():
            items |= flatten(inner, f"{prefix}.{key}" if prefix else str(key))
        return items
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return {_key(prefix)[:PARAM_KEY_LENGTH]: text[:PARAM_VALUE_LENGTH]}


def _key(name: str) -> str:
    """`name` with every character replaced that MLflow refuses in the name of a metric or a param."""
    return re.sub(r"[^\w\-. :/]", "_", name)
