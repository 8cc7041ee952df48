"""Sends the files of a finished run to MLflow. The files stay the source of truth.

Every MLflow run carries a deterministic key and the hash of its content. Sending unchanged files again changes
nothing; sending changed files replaces only the MLflow runs whose content changed.
"""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from demix.config.addresses import LOG_IN_ELSEWHERE, refuse_secrets
from demix.errors import DemixError, printable
from demix.files import write_json
from demix.run.run import Run, config_fingerprint
from demix.track.client import (
    CONFIG,
    HASH,
    KEY,
    RUN,
    can_continue,
    experiment_of,
    locked,
    log_points,
    opened,
    origin,
    runs_with,
)
from demix.track.records import Record, records

if TYPE_CHECKING:
    from mlflow.entities import Run as MlflowRun
    from mlflow.tracking import MlflowClient


def track_folder(run: Path, uri: str = "", experiment: str = "", output: Path | None = None) -> None:
    """Send a run's parameters, metrics, tables and figures to MLflow. Sending them again changes nothing.

    By default they go to the store and the experiment of the run's config. `output` is a receipt: what was sent, and
    where.
    """
    refuse_secrets("--uri", uri, LOG_IN_ELSEWHERE)
    whole = Run.read(run)
    place = {"uri": uri or whole.config.tracking.uri, "experiment": experiment or whole.experiment}
    sent = track(whole, **place)
    if output is not None:
        write_json(output, {**place, "sent": sent})


def track(run: Run, uri: str, experiment: str) -> str:
    """Make the MLflow experiment match the files in the folder of `run`; return the printed summary line.

    A pipeline run has one parent MLflow run, and one nested MLflow run per training and adaptation. `demix compare`
    prints their tags demix.run and demix.config (as Name and Settings). Unchanged MLflow runs are kept, changed ones
    are deleted and created again, and those whose files are gone are deleted. An MLflow run that a training began
    (`demix.track.live`), or that was interrupted, is completed. With a SQLite `uri`, artifacts go to `mlartifacts/`
    next to the database, and one process at a time writes. With another database, artifacts go to `mlartifacts/` next
    to the folder. A server chooses the place itself. Deleted MLflow runs stay in MLflow's bin until `mlflow gc`.

    Raises DemixError if files are missing or damaged, or if the tracking server does not answer.
    """
    # All files are read before anything is sent, so a damaged file prevents sending.
    found = records(run)
    with locked(uri):
        client, store_errors = opened(uri)
        try:
            experiment_id = experiment_of(client, uri, experiment, run.folder.resolve().parent)
            tags = {RUN: run.name, CONFIG: config_fingerprint(run.config)}
            counts = _send(client, experiment_id, tags, found)
        except store_errors as error:
            cause = str(error).strip().split("\n")[0]
            cure = "check tracking.uri and that the server is up, then rerun"
            raise DemixError(uri, f"does not accept the runs ({cause})", cure) from error
    listed = ", ".join(f"{counts[name]} {name}" for name in ("new", "replaced", "unchanged", "deleted", "completed"))
    summary = f"mlflow: {len(found)} runs in experiment {printable(' '.join(experiment.split()))} at {uri}: {listed}"
    print(summary)
    return summary


def _send(client: "MlflowClient", experiment_id: str, tags: dict[str, str], records: list[Record]) -> Counter[str]:
    """Send the records, of which the first is the parent; return how many MLflow runs are new, replaced, …"""
    from mlflow.entities import RunTag

    wanted = {record.key: (record, record.sha256()) for record in records}
    kept: dict[str, MlflowRun] = {}
    outdated = set()
    for old in runs_with(client, experiment_id, {RUN: tags[RUN]}):
        key = old.data.tags.get(KEY, "")
        if key in wanted and key not in kept and _is_kept(client, old, *wanted[key]):
            kept[key] = old
        else:
            client.delete_run(old.info.run_id)
            outdated.add(key)
    counts = Counter(deleted=len(outdated - wanted.keys()))
    for key, (record, sha256) in wanted.items():
        run = kept.get(key)
        if run is not None and run.data.tags.get(HASH) == sha256:
            client.log_batch(run.info.run_id, tags=[RunTag(*tag) for tag in tags.items()])
            counts["unchanged"] += 1
        else:
            counts["completed" if run else "replaced" if key in outdated else "new"] += 1
            run = _write(client, experiment_id, record, tags, run)
            client.set_tag(run.info.run_id, HASH, sha256)
        if record is records[0]:
            tags = tags | {"mlflow.parentRunId": run.info.run_id}
    return counts


def _is_kept(client: "MlflowClient", old: "MlflowRun", record: Record, sha256: str) -> bool:
    """Whether an MLflow run is that of `record`, or a part of it that can be completed."""
    points = record.since(old.info.start_time)
    return old.data.tags.get(HASH) == sha256 or can_continue(client, old, points, record.params)


def _write(
    client: "MlflowClient", experiment_id: str, record: Record, tags: dict[str, str], run: "MlflowRun | None"
) -> "MlflowRun":
    """Write a record with `tags` to `run`, or to a new MLflow run; return that run."""
    from mlflow.entities import Param, RunTag

    tags = {KEY: record.key, "demix.kind": record.kind, **origin(), **tags}
    if run is None:
        run = client.create_run(experiment_id, start_time=record.begun, tags=tags, run_name=record.name)
    run_id = run.info.run_id
    params = [Param(*param) for param in record.params.items()]
    metrics = record.since(run.info.start_time)
    log_points(client, run_id, metrics, params=params, tags=[RunTag(*tag) for tag in tags.items()])
    for path, folder in record.artifacts:
        client.log_artifact(run_id, str(path), None if folder == "." else folder)
    client.set_terminated(run_id, "FINISHED", end_time=record.ended)
    return run
