"""Sends the metrics of a training to MLflow while it trains.

A process of its own beside the first rank reads the metrics file that the training writes. So nothing that MLflow does,
or its server, stops or slows the training, which waits a few seconds at its end at most. `demix.track.store.track`
sends the same metrics at the end of a run, whatever arrived before.
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
from typing import TYPE_CHECKING, Any

from demix.errors import DemixError, StoppedError
from demix.launch.pace import newest_metrics

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

# A training of fewer seconds loads no MLflow.
SECONDS_BEFORE_BATCHES = 30.0
SECONDS_BETWEEN_BATCHES, MOST_SECONDS_BETWEEN_BATCHES = 10.0, 600.0
SECONDS_BEFORE_RETRY = 2.0
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
    if status == "KILLED":
        with suppress(subprocess.TimeoutExpired):
            sender.communicate(status.encode(), timeout=0.1)
        return
    with _deaf():
        try:
            sender.communicate(status.encode(), timeout=SECONDS_AT_END)
        except subprocess.TimeoutExpired:
            sender.kill()
            sender.communicate()


@contextmanager
def _deaf() -> Iterator[None]:
    """Ignore the signals that stop a training."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Sender:
    """What is sent of one training: `sent` points to the MLflow run `run_id`, which has the tag `LIVE` of `tag`.

    `training` is the name of the folder of its checkpoints. There is no `tag` after a failure, and where the MLflow run
    is that of an earlier start: updates after its last checkpoint were done again, in another time.
    """

    def __init__(self, tracking: str, kind: str, checkpoints: str, metrics: str, begun: float):
        self.tracking: dict[str, str] = json.loads(tracking)
        self.kind, self.checkpoints, self.metrics, self.begun = kind, Path(checkpoints), Path(metrics), begun
        self.uri, self.started = self.tracking["uri"], begun
        self.client: MlflowClient | None = None
        self.run_id = self.training = self.tag = ""
        self.sent = 0

    def send(self, status: str = "") -> None:
        """Send the points that were written since the last call; with a `status` end the MLflow run."""
        from demix.track.client import LIVE, alone, live_tag, log_points, on_network, opened, points

        # A training of other settings may have left its file here; a training that goes on writes its own anew.
        path = newest_metrics(self.checkpoints, self.started)
        name = path.parent.name if path else self.training
        if path is None and status and self.run_id:
            path = self.metrics
        rows = _complete_rows(path) if path else []
        if not rows and not (status and self.run_id):
            return
        # To lock the file would write to the network, too.
        if kind := on_network(self.uri):
            raise DemixError(self.uri, f"is SQLite on a network file system, {kind}", "name a server")
        with alone(self.uri, SECONDS_FOR_SQLITE):
            client = self.client = self.client or opened(self.uri)[0]
            if name != self.training:
                self._begin(client, name)
            found = points(rows, self.begun)
            # A finished sweep leaves the metrics of its best trial.
            ours = not self.tag or live_tag(found[: self.sent]) == self.tag
            if ours and len(found) > self.sent:
                known, self.tag = bool(self.tag), ""
                # If this fails, nobody knows how many points have arrived, and `track` sends all of them anew.
                client.set_tag(self.run_id, LIVE, f"{self.sent} and some")
                log_points(client, self.run_id, found[self.sent :])
                self.sent, self.tag = len(found), live_tag(found) if known else ""
                client.set_tag(self.run_id, LIVE, self.tag or f"{self.sent} resumed")
            if status:
                client.set_terminated(self.run_id, status)

    def _begin(self, client: "MlflowClient", name: str) -> None:
        """Go on with the MLflow run of an earlier start of the training `name`, or with a new one.

        The next trial of a sweep is another training.
        """
        from demix.track.client import CONFIG, KEY, LIVE, RUN, experiment_of, live_tag, origin, runs_with

        if self.run_id:
            client.set_terminated(self.run_id, "FINISHED")
        place, results = self._place()
        experiment = experiment_of(client, self.uri, self.tracking["experiment"], results)
        tags = {KEY: f"{self.kind}/{place}", RUN: self.tracking["run"], "demix.training": name}
        known = ((one.data.tags.get(LIVE, "").partition(" ")[0], one) for one in runs_with(client, experiment, tags))
        sent, run = next(((number, one) for number, one in known if number.isdecimal()), ("0", None))
        if run is not None:
            client.update_run(run.info.run_id, "RUNNING")
            self.begun, tag = run.info.start_time / 1000, ""
        else:
            tags |= {CONFIG: self.tracking["config"], "demix.kind": self.kind, **origin()}
            begun, tag = int(1000 * self.begun), live_tag([])
            run = client.create_run(experiment, start_time=begun, tags=tags, run_name=place)
        self.training, self.run_id, self.sent, self.tag = name, run.info.run_id, int(sent), tag

    def _place(self) -> tuple[str, Path]:
        """The training's name, which for an expert that is a whole model has two parts, and the folder of all runs."""
        folder = self.checkpoints.resolve()
        above = folder.parent
        if above.name != "checkpoints" and above.parent.name == "checkpoints":
            above = above.parent
        return folder.relative_to(above).as_posix(), above.parents[1]


def _complete_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file but one that is being written. The last line of a finished file is its seal."""
    lines = path.read_bytes().rpartition(b"\n")[0].splitlines()
    return [row for row in map(json.loads, lines) if "tokens" in row]


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
        used = time.process_time()
        error = _attempt(sender, status)
        if error is not None and not ended and not told:
            time.sleep(SECONDS_BEFORE_RETRY)
            error = _attempt(sender, status)
        if error is not None and not told:
            told = True
            cause = error.cause if isinstance(error, DemixError) else str(error).strip().split("\n")[0]
            cure = "training goes on, and `demix track` sends them all at the end"
            print(DemixError(sender.uri, f"takes no metrics now ({cause})", cure), file=sys.stderr, flush=True)
        if ended:
            return
        used = time.process_time() - used
        pause = 2 * pause if error is not None else max(SECONDS_BETWEEN_BATCHES, used / SHARE)
        pause = min(pause, MOST_SECONDS_BETWEEN_BATCHES)


def _attempt(sender: Sender, status: str) -> Exception | None:
    try:
        sender.send(status)
    # MLflow, its database drivers and the network raise whatever they like.
    except Exception as error:
        return error
    return None


if __name__ == "__main__":
    import logging

    logging.disable()
    main(sys.argv[1], float(sys.argv[2]))
