"""Sends the metrics of a training to MLflow while it trains.

A separate process reads the metrics file that the training writes, so neither MLflow nor its server can stop or slow
the training. At its end the training waits a few seconds at most. At the end of a run `demix.track.store.track` adds
missing metrics to the same MLflow run.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from demix.errors import DemixError, StoppedError
from demix.launch.progress import elapsed, newest_metrics

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from demix.track.client import Point

# For a shorter training MLflow is not loaded.
SECONDS_BEFORE_BATCHES = 30.0
SECONDS_BETWEEN_BATCHES = 10.0
# How long the training waits for the last batch.
SECONDS_AT_END = 5.0
# The signals that stop a training.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
# How long a batch waits for other processes that write to the same SQLite file.
SECONDS_FOR_SQLITE = 60.0
# Reading and sending use at most this share of a processor.
SHARE = 0.1


@contextmanager
def streaming(tracking: str, kind: str, checkpoints: Path, metrics: Path | None) -> Iterator[None]:
    """While the block runs, send the metrics of the training below `checkpoints`, and at the end its file `metrics`.

    `tracking` is JSON with `uri`, `experiment`, and the tags `run` and `config`. Nothing is sent if it is empty, if
    `metrics` is None, or by ranks other than the first. `kind` is training or adaptation. Raises no errors of its own.
    """
    sender = None
    if tracking and metrics is not None and os.environ.get("RANK", "0") == "0":
        training = json.dumps([tracking, kind, str(checkpoints), str(metrics), time.time()])
        # With -P no file of the user's folder replaces a module.
        command = [sys.executable, "-P", "-W", "ignore", "-m", __name__, training, str(SECONDS_BEFORE_BATCHES)]
        with suppress(OSError):
            # Ctrl-C must reach only the training, which sends its status on standard input.
            sender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)
    status = "FINISHED"
    try:
        yield
    except BaseException as error:
        status = "KILLED" if isinstance(error, StoppedError) else "FAILED"
        raise
    finally:
        if sender is not None:
            _end(sender, status)


def _end(sender: "subprocess.Popen[bytes]", status: str) -> None:
    """Send the training's `status` to `sender`, and wait for its last batch unless the training was stopped.

    A stopped training must be queued again while there is time. A finished training has deleted its checkpoints, and a
    signal would make Snakemake delete its results, so signals are ignored during the wait.
    """
    ignored = STOPPING if status != "KILLED" and threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    with suppress(subprocess.TimeoutExpired):
        sender.communicate(status.encode(), timeout=0.1 if status == "KILLED" else SECONDS_AT_END)
    for number, handler in before.items():
        signal.signal(number, handler)


class Sender:
    """Sends the metrics of one training: `sent` are the points of the file `file` that the MLflow run `run_id` has."""

    def __init__(self, tracking: str, kind: str, checkpoints: str, metrics: str, begun: float):
        self.tracking: dict[str, str] = json.loads(tracking)
        self.kind, self.checkpoints, self.metrics, self.started = kind, Path(checkpoints), Path(metrics), begun
        self.uri, self.run_id, self.file, self.begun = self.tracking["uri"], "", Path(), 0
        self.client: MlflowClient | None = None
        self.sent: list[Point] = []

    def send(self, status: str = "") -> None:
        """Send the points that were written since the last call; with a `status`, end the MLflow run.

        A failed batch is sent again, since MLflow stores no point twice.
        """
        from demix.track.client import locked, log_points, opened, points

        # A training of other settings may have left its file here; a resumed training writes its own again.
        path = newest_metrics(self.checkpoints, self.started) or (self.metrics if status and self.run_id else None)
        if path is None:
            return
        # The last row may be incomplete. The last line of a finished file is its checksum.
        rows = [row for row in map(json.loads, path.read_bytes().rpartition(b"\n")[0].splitlines()) if "tokens" in row]
        with locked(self.uri, SECONDS_FOR_SQLITE):
            client = self.client = self.client or opened(self.uri)[0]
            if path not in (self.metrics, self.file):
                self._begin(client, path.stat().st_mtime - max(elapsed(rows), default=0.0))
                self.file = path
            found = points(rows, self.begun)
            # A finished sweep leaves the metrics of its best trial, which may be another than the last.
            if found[: len(self.sent)] == self.sent:
                log_points(client, self.run_id, found[len(self.sent) :])
                self.sent = found
            if status:
                client.set_terminated(self.run_id, status)

    def _begin(self, client: "MlflowClient", begun: float) -> None:
        """Create an MLflow run. One of an earlier start of the training, or of another learning rate, is deleted."""
        from demix.track.client import CONFIG, HASH, KEY, RUN, experiment_of, origin, runs_with

        folder = self.checkpoints.resolve()
        # An expert that is a whole model has a folder below that of its model.
        above = folder.parent if folder.parent.name == "checkpoints" else folder.parent.parent
        place = folder.relative_to(above).as_posix()
        experiment = experiment_of(client, self.uri, self.tracking["experiment"], above.parents[1])
        tags = {KEY: f"{self.kind}/{place}", RUN: self.tracking["run"]}
        for old in runs_with(client, experiment, tags):
            if HASH not in old.data.tags:
                client.delete_run(old.info.run_id)
        tags |= {CONFIG: self.tracking["config"], "demix.kind": self.kind, **origin()}
        run = client.create_run(experiment, start_time=int(1000 * begun), tags=tags, run_name=place)
        self.run_id, self.begun, self.sent = run.info.run_id, run.info.start_time, []


def main(training: str, before: float) -> None:
    """After `before` seconds send a batch from time to time, until the training's status arrives on standard input."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    # If the memory of a job runs out, this process is killed before the training.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    sender, pause, warned = Sender(*json.loads(training)), before, False
    while True:
        ended = bool(select.select([sys.stdin], [], [], pause)[0])
        status = (os.read(sys.stdin.fileno(), 64).decode() or "KILLED") if ended else ""
        if ended and not sender.run_id:
            return
        used = time.process_time()
        try:
            sender.send(status)
        # MLflow, its database drivers and the network raise exceptions of any type.
        except Exception as error:
            if not warned:
                cause = error.cause if isinstance(error, DemixError) else str(error).strip().split("\n")[0]
                cure = "training goes on, and `demix track` sends all metrics at the end"
                print(DemixError(sender.uri, f"accepts no metrics now ({cause})", cure), file=sys.stderr, flush=True)
            warned = True
        if ended:
            return
        pause = max(SECONDS_BETWEEN_BATCHES, (time.process_time() - used) / SHARE)


if __name__ == "__main__":
    import logging

    logging.disable()
    main(sys.argv[1], float(sys.argv[2]))
