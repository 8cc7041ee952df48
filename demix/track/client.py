"""How MLflow is reached, and what a training's metrics are there."""

import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from demix.errors import DemixError
from demix.files import digest, exclusive, remove_leftovers, replacing
from demix.launch.pace import elapsed

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)

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
RUN, CONFIG, KEY, HASH = "demix.run", "demix.config", "demix.key", "demix.sha256"
# On an MLflow run that a training writes to: how many points it has, and their digest.
LIVE = "demix.live"
# The name and the value of a metric, the step, and the time in milliseconds since 1970.
Point = tuple[str, float, int, int]


def alone(uri: str, seconds: float | None = None) -> AbstractContextManager[None]:
    """Wait for other processes that write to a SQLite `uri`. Other databases and servers handle concurrent writers."""
    seconds = PATIENCE_SECONDS if seconds is None else seconds
    if not uri.startswith(SQLITE):
        return nullcontext()
    path = _sqlite_path(uri)
    return exclusive(path.with_name(f".{path.name}.lock"), f"writes to {path.name}", seconds)


def opened(uri: str) -> "tuple[MlflowClient, tuple[type[Exception], ...]]":
    """A client, and the exceptions that the client raises for an unusable store."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["DO_NOT_TRACK"] = "true"
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "1"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    if uri.startswith(SQLITE):
        if kind := on_network(uri):
            log.warning(
                "%s: SQLite on a network file system (%s) may be damaged by a second writer; put tracking.uri on a"
                " local disk, or name a server", _sqlite_folder(uri), kind,
            )  # fmt: skip
        _try_sqlite(uri)
        # A process that was killed between its rename and its end leaves an empty folder beside a finished database.
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
        with closing(sqlite3.connect(_sqlite_path(uri), timeout=SECONDS_FOR_A_LOCK)) as database:
            database.isolation_level = None
            database.execute("begin immediate")
            database.execute("create table demix_writes (a)")
            database.execute("rollback")
    except sqlite3.Error as error:
        cure = "check tracking.uri in the run, end who holds it, or move the file away, then rerun"
        raise DemixError(uri, f"cannot be opened ({error})", cure) from error


def on_network(uri: str) -> str:
    """The type of the network file system that a SQLite `uri` lies on; empty for all else."""
    kind = file_system(_sqlite_folder(uri)) if uri.startswith(SQLITE) else ""
    return kind if kind in NETWORK_FILE_SYSTEMS else ""


def file_system(folder: Path) -> str:
    """The type of the file system of `folder`, from the mount table."""
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next(mounts[place] for place in (folder.resolve(), *folder.resolve().parents) if place in mounts)


def _sqlite_path(uri: str) -> Path:
    return Path(uri.removeprefix(SQLITE).partition("?")[0]).resolve()


def _sqlite_folder(uri: str) -> Path:
    return _sqlite_path(uri).parent


def experiment_of(client: "MlflowClient", uri: str, name: str, results: Path) -> str:
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


def runs_with(client: "MlflowClient", experiment_id: str, tags: Mapping[str, str]) -> "Iterator[Run]":
    """The MLflow runs of an experiment that have these values of tags."""
    wanted, token = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items()), None
    while True:
        page = client.search_runs([experiment_id], wanted, max_results=1000, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


@cache
def origin() -> dict[str, str]:
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


def points(rows: Sequence[Mapping[str, Any]], begun: float) -> list[Point]:
    """The numbers in the rows of a metrics file of a training that began at `begun`, in seconds since 1970."""
    return [
        (named(key), float(value), int(row.get("step", 0)), int(1000 * (begun + seconds)))
        for row, seconds in zip(rows, elapsed(rows), strict=True)
        for key, value in row.items()
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    ]


def live_tag(points: Sequence[Point]) -> str:
    """The tag `LIVE` of an MLflow run whose metrics are `points` and no others."""
    return f"{len(points)} {digest([point[:3] for point in points])}"


def log_points(client: "MlflowClient", run_id: str, points: Sequence[Point], **more: Any) -> None:
    """Add `points` to the metrics of an MLflow run, with `more` of what a batch of MLflow takes, which it divides."""
    from mlflow.entities import Metric

    client.log_batch(run_id, [Metric(key, value, time, step) for key, value, step, time in points], **more)


def named(name: str) -> str:
    """`name` with every character replaced that MLflow refuses in the name of a metric or a param."""
    return re.sub(r"[^\w\-. :/]", "_", name)
