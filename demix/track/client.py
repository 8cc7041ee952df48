"""The connection to MLflow, and the metrics of a training in MLflow's form."""

import hashlib
import os
import re
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demix.errors import DemixError
from demix.files import exclusive, remove_leftovers, replacing
from demix.launch.progress import elapsed

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

SQLITE = "sqlite:///"
# Databases store rows but no files: artifacts need a folder. An MLflow server stores both.
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
# The longest wait for another process that writes to the same SQLite file.
PATIENCE_SECONDS = 900.0
# The PyPI names of database drivers whose modules have another name.
DRIVERS = {"psycopg2": "psycopg2-binary", "psycopg": "'psycopg[binary]'", "MySQLdb": "mysqlclient"}
# How long SQLite waits for a lock: another writer may finish by then.
SECONDS_FOR_A_LOCK = 30.0
RUN, CONFIG, KEY, HASH = "demix.run", "demix.config", "demix.key", "demix.sha256"
# The name and the value of a metric, the step, and the time in milliseconds since 1970.
Point = tuple[str, float, int, int]


def locked(uri: str, seconds: float | None = None) -> AbstractContextManager[None]:
    """Wait for other processes that write to a SQLite `uri`. Other databases and servers handle concurrent writers."""
    if not uri.startswith(SQLITE):
        return nullcontext()
    path = _sqlite_path(uri)
    patience = PATIENCE_SECONDS if seconds is None else seconds
    return exclusive(path.with_name(f".{path.name}.lock"), f"writes to {path.name}", patience)


def opened(uri: str) -> "tuple[MlflowClient, tuple[type[Exception], ...]]":
    """A client, and the exceptions that it raises if the store cannot be used."""
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    if uri.startswith(SQLITE):
        _try_sqlite(uri)
        # A process that was killed between its rename and its end leaves an empty folder next to a finished database.
        remove_leftovers(_sqlite_path(uri))
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
        with closing(sqlite3.connect(_sqlite_path(uri), SECONDS_FOR_A_LOCK, isolation_level=None)) as database:
            database.executescript("begin immediate; create table demix_writes (a); rollback")
    except sqlite3.Error as error:
        cure = "check tracking.uri in the run, end the process that uses the file, or move the file, then rerun"
        raise DemixError(uri, f"cannot be opened ({error})", cure) from error


def _sqlite_path(uri: str) -> Path:
    return Path(uri.removeprefix(SQLITE).partition("?")[0]).resolve()


def experiment_of(client: "MlflowClient", uri: str, name: str, results: Path) -> str:
    """The id of an experiment, which is created if it is missing. Its artifacts are stored next to the SQLite file or
    next to `results`."""
    found = client.get_experiment_by_name(name)
    if found is not None:
        return found.experiment_id
    location = None
    if re.split(r"[:+]", uri)[0] in DATABASES:
        folder = _sqlite_path(uri).parent if uri.startswith(SQLITE) else results
        location = f"{(folder / 'mlartifacts').as_uri()}/{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return client.create_experiment(name, artifact_location=location)


def runs_with(client: "MlflowClient", experiment_id: str, tags: Mapping[str, str]) -> "Sequence[Run]":
    """The MLflow runs of an experiment with these tags, at most 50,000 (MLflow's limit)."""
    wanted = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
    return client.search_runs([experiment_id], wanted, max_results=50_000)


def origin() -> dict[str, str]:
    """Tags with the version of the code. They are not hashed, so a new commit replaces no MLflow run."""
    from mlflow.utils.git_utils import get_git_commit

    checkout = Path(__file__).parents[2]
    # An installed demix may lie inside the repository of another project.
    commit = get_git_commit(str(checkout)) if (checkout / ".git").exists() else None
    tags = {"mlflow.source.name": "demix track", "mlflow.source.type": "LOCAL"}
    return tags | ({"mlflow.source.git.commit": commit} if commit else {})


def points(rows: Sequence[Mapping[str, Any]], begun: int) -> list[Point]:
    """The numbers in the rows of a training's metrics file. `begun` is its start, in milliseconds since 1970."""
    return [
        (named(key), float(value), int(row.get("step", 0)), begun + int(1000 * seconds))
        for row, seconds in zip(rows, elapsed(rows), strict=True)
        for key, value in row.items()
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    ]


def can_continue(client: "MlflowClient", run: "Run", points: Collection[Point], params: Mapping[str, str]) -> bool:
    """Whether an MLflow run is incomplete, and all its metrics and params are in `points` and `params`."""
    if HASH in run.data.tags or not run.data.params.items() <= params.items():
        return False
    histories = (client.get_metric_history(run.info.run_id, key) for key in run.data.metrics)
    return {(one.key, one.value, one.step, one.timestamp) for one in chain(*histories)} <= {*points}


def log_points(client: "MlflowClient", run_id: str, points: Sequence[Point], **more: Any) -> None:
    """Add `points` to the metrics of an MLflow run, with `more` arguments of MLflow's `log_batch`.

    MLflow splits them into batches that its server accepts, and stores no point twice.
    """
    from mlflow.entities import Metric

    client.log_batch(run_id, [Metric(key, value, time, step) for key, value, step, time in points], **more)


def named(name: str) -> str:
    """`name`, where a character that MLflow refuses in names of metrics or params is replaced."""
    return re.sub(r"[^\w\-. :/]", "_", name)
