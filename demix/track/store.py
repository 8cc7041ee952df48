"""Sends the files of a finished run to MLflow. The files stay the source of truth.

Every MLflow run carries a deterministic key and the hash of its content. Sending unchanged files again changes
nothing; sending changed files replaces only the MLflow runs whose content changed.
"""

import json
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

from demix.config.addresses import LOG_IN_ELSEWHERE, refuse_secrets
from demix.errors import DemixError, printable
from demix.files import digest, read_json, write_json
from demix.run.run import Run, config_fingerprint
from demix.track.client import CONFIG, HASH, KEY, RUN, alone, experiment_of, log_points, opened, origin, runs_with
from demix.track.records import Record, records

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput
    from mlflow.tracking import MlflowClient


def track_folder(run: Path, uri: str = "", experiment: str = "", output: Path | None = None) -> None:
    """Send a run's parameters, metrics, tables and figures to MLflow. Sending them again changes nothing.

    By default to the store and the experiment of the run's config. `output` is a receipt: what was sent, and where.
    """
    refuse_secrets("--uri", uri, LOG_IN_ELSEWHERE)
    whole = Run.read(run)
    place = {"uri": uri or whole.config.tracking.uri, "experiment": experiment or whole.experiment}
    sent = track(whole, **place)
    if output is not None:
        write_json(output, {**place, "sent": sent})


def track(run: Run, uri: str, experiment: str) -> str:
    """Make the MLflow experiment hold what lies in the folder of `run`; return the printed summary line.

    A pipeline run has one parent run, and one nested run per training, adaptation and evaluation (a model with a set of
    experts). Their tags demix.run and demix.config are what `demix compare` prints. Unchanged runs are kept, changed
    runs are deleted and created again, and runs whose files are gone are deleted. With a SQLite `uri`, artifacts go to
    `mlartifacts/` beside the database, and one process at a time writes. With another database, artifacts go to
    `mlartifacts/` beside the folder. A server chooses the place itself.

    An MLflow run that a training began (`demix.track.live`) is replaced, too. Deleted runs stay in MLflow's bin until
    `mlflow gc`. Times are those of the jobs.

    Raises DemixError if files are missing or damaged, or if the tracking server does not answer.
    """
    # All files are read before anything is sent, so that a damaged file stops the whole.
    parent, *nested = records(run)
    with alone(uri):
        client, store_errors = opened(uri)
        try:
            experiment_id = experiment_of(client, uri, experiment, run.folder.resolve().parent)
            named = {RUN: run.name, CONFIG: config_fingerprint(run.config)}
            counts = _send(client, experiment_id, named, [parent, *nested])
        except store_errors as error:
            cause = str(error).strip().split("\n")[0]
            cure = "check tracking.uri and that the server is up, then rerun"
            raise DemixError(uri, f"does not take the runs ({cause})", cure) from error
    told = ", ".join(f"{count} {name}" for name, count in counts.items())
    shown = printable(" ".join(experiment.split()))
    summary = f"mlflow: {1 + len(nested)} runs in experiment {shown} at {uri}: {told}"
    print(summary)
    return summary


def _send(client: "MlflowClient", experiment_id: str, named: dict[str, str], records: list[Record]) -> dict[str, int]:
    """Send the records, of which the first is the parent; return how many MLflow runs are new, replaced, …"""
    from mlflow.entities import RunTag

    wanted = {record.key: record.sha256() for record in records}
    kept: dict[str, str] = {}
    outdated = set()
    for old in runs_with(client, experiment_id, {RUN: named[RUN]}):
        key, run_id = old.data.tags.get(KEY, ""), old.info.run_id
        # The hash is written last: an incomplete MLflow run has none and is made again.
        if wanted.get(key) == old.data.tags.get(HASH, "none") and key not in kept:
            kept[key] = run_id
        else:
            client.delete_run(run_id)
            outdated.add(key)
    made = wanted.keys() - kept.keys()
    for record in records:
        if record.key in kept:
            run_id = kept[record.key]
            client.log_batch(run_id, tags=[RunTag(name, value) for name, value in named.items()])
        else:
            run_id = _write(client, experiment_id, record, named | {HASH: wanted[record.key]})
        if record is records[0]:
            named = named | {"mlflow.parentRunId": run_id}
    return {
        "new": len(made - outdated),
        "replaced": len(made & outdated),
        "unchanged": len(kept),
        "deleted": len(outdated - wanted.keys()),
    }


def _write(client: "MlflowClient", experiment_id: str, record: Record, named: dict[str, str]) -> str:
    """Make the MLflow run of a record, with the tags `named`; return its id."""
    from mlflow.entities import Param

    begin, end = (int(1000 * time) for time in record.span)
    # MLflow's page opens the rows below a run where one of them is of this type.
    typed = {"mlflow.runType": "evaluation"} if record.kind == "evaluation" else {}
    tags = {KEY: record.key, "demix.kind": record.kind, **typed, **origin(), **named}
    last = tags.pop(HASH)
    run_id: str = client.create_run(experiment_id, start_time=begin, tags=tags, run_name=record.name).info.run_id
    log_points(client, run_id, record.metrics, params=[Param(key, value) for key, value in record.params.items()])
    for path, folder in record.artifacts:
        client.log_artifact(run_id, str(path), folder or None)
    if record.table is not None:
        # MLflow warns about pandas' own type of text, which pandas 2 does not have.
        texts = {name: object for name, kind in record.table.dtypes.items() if kind == "str"}
        client.log_table(run_id, record.table.astype(texts), "results.json")
    if record.kind == "pipeline":
        packages = sorted({f"{one.name}=={one.version}\n" for one in distributions()}, key=str.lower)
        client.log_text(run_id, "".join(packages), "environment.txt")
    if record.datasets:
        client.log_inputs(run_id, [_dataset(domain, path) for domain, path in record.datasets.items()])
    client.set_tag(run_id, HASH, last)
    client.set_terminated(run_id, "FINISHED", end_time=end)
    return run_id


def _dataset(domain: str, card: Path) -> "DatasetInput":
    """A domain's corpus, identified by its card: MLflow gets the folder and the counts, never the text."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = json.dumps({"uri": card.parent.resolve().as_uri()})
    counts = read_json(card)
    profile = json.dumps(counts, sort_keys=True)
    dataset = Dataset(domain, digest(counts)[:32], "local", source, profile=profile)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])
