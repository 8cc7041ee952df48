"""Sends the metrics of a training to MLflow while it trains.

A process of its own beside the first rank reads the metrics file that the training writes. So nothing that MLflow does,
or its server, stops or slows the training, which waits a few seconds at its end at most. `demix.track.store.track`
replaces what was sent here by the whole training at the end of a run.
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
from demix.launch.pace import elapsed, newest_metrics

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from demix.track.client import Point

# A training of fewer seconds loads no MLflow.
SECONDS_BEFORE_BATCHES = 30.0
SECONDS_BETWEEN_BATCHES, MOST_SECONDS_BETWEEN_BATCHES = 10.0, 600.0
# The training waits so long for the last batch.
SECONDS_AT_END = 5.0
# The signals that stop a training.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)
# A live batch waits so long for other processes that write to the same SQLite file.
SECONDS_FOR_SQLITE = 60.0
# Reading and sending take at most this share of a processor.
SHARE = 0.1


@contextmanager
def streaming(tracking: str, kind: str, checkpoints: Path, metrics: Path | None) -> Iterator[None]:
    """Send the metrics of the training below `checkpoints`, and at last its file `metrics`, while the block runs.

    `tracking` is JSON with `uri`, `experiment`, and the tags `run` and `config`; nothing is sent if it is empty, by
    another rank than the first, and without `metrics`. `kind` is training or adaptation. Raises nothing of its own.
    """
    sender = None
    if tracking and metrics is not None and os.environ.get("RANK", "0") == "0":
        training = json.dumps([tracking, kind, str(checkpoints), str(metrics), time.time()])
        # With -P no file of the user's folder takes the place of a module.
        command = [sys.executable, "-P", "-W", "ignore", "-m", __name__, training, str(SECONDS_BEFORE_BATCHES)]
        with suppress(OSError):
            # Ctrl-C is for the training alone, which tells the sender how it ended.
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
    """Tell `sender` how the training ended, and wait for its last batch unless the training was stopped.

    A stopped training has to be queued again while there is time. An ended training has no checkpoints any more, and
    a signal would make Snakemake delete its results, so signals are ignored meanwhile.
    """
    ignored = STOPPING if status != "KILLED" and threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    try:
        sender.communicate(status.encode(), timeout=0.1 if status == "KILLED" else SECONDS_AT_END)
    except subprocess.TimeoutExpired:
        if status != "KILLED":
            sender.kill()
            sender.communicate()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Sender:
    """What is sent of one training: `sent` points to the MLflow run `run_id` of this start of it.

    `training` is the name of the folder of its checkpoints.
    """

    def __init__(self, tracking: str, kind: str, checkpoints: str, metrics: str, begun: float):
        self.tracking: dict[str, str] = json.loads(tracking)
        self.kind, self.checkpoints, self.metrics, self.started = kind, Path(checkpoints), Path(metrics), begun
        self.uri, self.run_id, self.training, self.begun = self.tracking["uri"], "", "", 0.0
        self.client: MlflowClient | None = None
        self.sent: list[Point] = []

    def send(self, status: str = "") -> None:
        """Send the points that were written since the last call; with a `status` end the MLflow run.

        A batch that failed is sent again: MLflow keeps no point twice.
        """
        from demix.track.client import alone, log_points, on_network, opened, points

        # A training of other settings may have left its file here; a training that goes on writes its own anew.
        path = newest_metrics(self.checkpoints, self.started) or (self.metrics if status and self.run_id else None)
        if path is None:
            return
        # The last row may be in the writing. The last line of a finished file is its seal.
        rows = [row for row in map(json.loads, path.read_bytes().rpartition(b"\n")[0].splitlines()) if "tokens" in row]
        # To lock the file would write to the network, too.
        if kind := on_network(self.uri):
            raise DemixError(self.uri, f"is SQLite on a network file system, {kind}", "name a server")
        with alone(self.uri, SECONDS_FOR_SQLITE):
            client = self.client = self.client or opened(self.uri)[0]
            if path != self.metrics and path.parent.name != self.training:
                self._begin(client, path.parent.name, path.stat().st_mtime - max(elapsed(rows), default=0.0))
            found = points(rows, self.begun)
            # A finished sweep leaves the metrics of its best trial, which may be another than the last.
            if found[: len(self.sent)] == self.sent:
                log_points(client, self.run_id, found[len(self.sent) :])
                self.sent = found
            if status:
                client.set_terminated(self.run_id, status)

    def _begin(self, client: "MlflowClient", name: str, begun: float) -> None:
        """A new MLflow run for the training `name`, in the place of that of an earlier start of it.

        The next trial of a sweep is another training.
        """
        from demix.track.client import CONFIG, HASH, KEY, RUN, experiment_of, origin, runs_with

        if self.run_id:
            client.set_terminated(self.run_id, "FINISHED")
        folder = self.checkpoints.resolve()
        # An expert that is a whole model has a folder below that of its model.
        above = folder.parent if folder.parent.name == "checkpoints" else folder.parent.parent
        place = folder.relative_to(above).as_posix()
        experiment = experiment_of(client, self.uri, self.tracking["experiment"], above.parents[1])
        tags = {KEY: f"{self.kind}/{place}", RUN: self.tracking["run"], "demix.training": name}
        for old in runs_with(client, experiment, tags):
            if HASH not in old.data.tags:
                client.delete_run(old.info.run_id)
        tags |= {CONFIG: self.tracking["config"], "demix.kind": self.kind, **origin()}
        made = client.create_run(experiment, start_time=int(1000 * begun), tags=tags, run_name=place)
        self.training, self.run_id, self.begun, self.sent = name, made.info.run_id, begun, []


def main(training: str, before: float) -> None:
    """After `before` seconds send a batch now and then, until standard input says how the training ended."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    # Where a job's memory ends, this process ends before the training.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    sender, pause, told = Sender(*json.loads(training)), before, False
    while True:
        ended = bool(select.select([sys.stdin], [], [], pause)[0])
        status = (os.read(sys.stdin.fileno(), 64).decode() or "KILLED") if ended else ""
        if ended and not sender.run_id:
            return
        used, pause = time.process_time(), 2 * pause
        try:
            sender.send(status)
            pause = max(SECONDS_BETWEEN_BATCHES, (time.process_time() - used) / SHARE)
        # MLflow, its database drivers and the network raise whatever they like.
        except Exception as error:
            cause = error.cause if isinstance(error, DemixError) else str(error).strip().split("\n")[0]
            cure = "training goes on, and `demix track` sends them all at the end"
            if not told:
                print(DemixError(sender.uri, f"takes no metrics now ({cause})", cure), file=sys.stderr, flush=True)
            told = True
        if ended:
            return
        pause = min(pause, MOST_SECONDS_BETWEEN_BATCHES)


if __name__ == "__main__":
    import logging

    logging.disable()
    main(sys.argv[1], float(sys.argv[2]))
