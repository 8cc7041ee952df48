"""Progress and speed of a training, and which of its ranks failed first.

Progress is read from the metrics file that a training writes while it runs. Ranks write down their errors, and
launchers see signals.
"""

import json
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from demix.errors import DemixError
from demix.files import read_json, write_json
from demix.launch.job import TrainingJob
from demix.progress import clock

Row = Mapping[str, Any]

# The number of metric rows from which the speed of a training is computed.
MAX_ROWS = 20
# The line of the first rank's log that marks each start of a SLURM job.
START = "demix: start"


def newest_metrics(checkpoints: Path, since: float) -> Path | None:
    """The most recently changed metrics file below `checkpoints`, if it changed at `since` or later; otherwise None.

    Times are in seconds since 1970. Raises OSError if a file has just been removed, as at the end of a training.
    """
    written = {path: path.stat().st_mtime for path in checkpoints.glob("*/metrics.jsonl")}
    return max((path for path, changed in written.items() if changed >= since), key=written.__getitem__, default=None)


def last_rows(checkpoints: Path, since: float) -> list[dict[str, Any]]:
    """The last rows of `newest_metrics`, at most MAX_ROWS; none if there is no such file. May raise OSError."""
    path = newest_metrics(checkpoints, since)
    if path is None:
        return []
    with open(path, "rb") as stream:
        stream.seek(0, os.SEEK_END)
        begin = stream.seek(max(0, stream.tell() - 4096 * MAX_ROWS))
        lines = stream.read().split(b"\n")
    rows = []
    # The first line is incomplete, unless it is the beginning of the file.
    for line in lines[bool(begin) : -1][-MAX_ROWS:]:
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def elapsed(rows: Iterable[Row]) -> list[float]:
    """For each row of metrics, the seconds since the training began, from its tokens and tokens per second."""
    seconds, tokens, after = 0.0, 0, []
    for row in rows:
        if speed := row.get("tokens_per_second"):
            seconds += (row["tokens"] - tokens) / speed
        tokens = row["tokens"]
        after.append(seconds)
    return after


def speed(updates: Sequence[Row]) -> float:
    """The tokens per second of several updates of one size: their tokens divided by their seconds."""
    return float(len(updates) / sum(1 / row["tokens_per_second"] for row in updates))


def seconds_left(updates: Sequence[Row], steps: int) -> float:
    """The seconds from the last of several updates to update `steps`, at the speed of these updates."""
    return float((steps - updates[-1]["step"]) * tokens_of_update(updates) / speed(updates))


def tokens_of_update(updates: Sequence[Row]) -> float:
    """The tokens of one update, from the metrics of several. Updates of a dense warm start may have another size."""
    first, last = updates[0], updates[-1]
    if last["step"] > first["step"]:
        return float((last["tokens"] - first["tokens"]) / (last["step"] - first["step"]))
    return float(last["tokens"] / last["step"])


@dataclass(frozen=True)
class Failure:
    """The end of one rank.

    `expected` marks an error raised by demix itself, which the same command would raise again. `time` is in seconds
    since 1970, by the clock of the rank's node. With `killed` a signal ended the rank, and `message` names the signal.
    """

    rank: int
    node: str
    message: str
    expected: bool = False
    time: float = 0.0
    killed: bool = False

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Self:
        """The end of this process, the rank `rank`, by an error."""
        message = str(error).splitlines()[0] if str(error) else repr(error)
        return cls(rank, socket.gethostname(), message, isinstance(error, DemixError), time.time())


def key_of_failure() -> str:
    """The key in the ranks' store for the first error of any rank, as JSON."""
    # torchrun's store outlives its ranks, because torchrun restarts them.
    return f"demix/failure/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


@contextmanager
def noting(folder: Path, rank: int) -> Iterator[None]:
    """Write the error that ends a rank to `folder`, so that the rank that failed first can be named."""
    try:
        yield
    except BaseException as error:
        # On a full disk the note is lost, but the error itself must still be raised.
        with suppress(DemixError):
            write_json(folder / f"rank-{rank}.json", asdict(Failure.of(rank, error)))
        raise


def noted_in(folder: Path) -> list[Failure]:
    """The errors that ranks wrote to `folder`."""
    noted = list[Failure]()
    for path in folder.glob("rank-*.json"):
        # An unreadable note must not hide the other notes.
        with suppress(DemixError, TypeError):
            noted.append(Failure(**read_json(path)))
    return noted


def first_failure(noted: Sequence[Failure], killed: Sequence[Failure]) -> Failure | None:
    """The first failure: the end of a rank that a signal killed, else the earliest error that a rank wrote.

    `killed` are the ranks killed by a signal, in the order in which this was noticed. Returns None if nothing is known.
    """
    for failure in killed:
        # NCCL's watchdog aborts every rank that waits for a failed rank.
        aborted = failure.message.startswith(("Abort", "SIGABRT"))
        if failure.rank not in [note.rank for note in noted] and not (noted and aborted):
            return failure
    return min(noted, key=lambda note: note.time, default=None)


def progress_line(job: TrainingJob, job_id: str, shown: Mapping[str, str]) -> str:
    """One line of progress, with loss and speed when a step has been done since this start.

    For example: `job 12 running on n[1-2], queued again 2 times step 40/488 loss 5.321 2100 tokens/s 3:20 left`.
    """
    state, restarts = shown.get("JobState", "unknown").lower(), int(shown.get("Restarts", "0"))
    where = f" on {shown['NodeList']}" if shown.get("NodeList", "(null)") not in ("(null)", "") else ""
    why = f" ({shown['Reason']})" if state == "pending" and shown.get("Reason", "None") != "None" else ""
    again = f", queued again {restarts} times" if restarts > 1 else ", queued again once" if restarts else ""
    head = f"job {job_id} {state}{why}{where}{again}"
    rows: list[dict[str, Any]] = []
    if state == "running":
        # Rows older than this start belong to another training in the same folder.
        with suppress(ValueError, KeyError, OSError):
            since = datetime.fromisoformat(shown["StartTime"]).timestamp()
            rows = last_rows(job.checkpoints, since)
    steps = [row for row in rows if "loss" in row]
    if not steps:
        return head
    row, remaining = steps[-1], clock(seconds_left(steps, job.steps))
    now = f"step {row['step']}/{job.steps}  loss {row['loss']:.3f}  {speed(steps):.0f} tokens/s"
    return f"{head}  {now}  {remaining} left"


class MishapError(DemixError):
    """A job ended by a cause that may not recur: a killed rank, or an error that demix itself did not raise."""


def failure(job: TrainingJob, job_id: str, state: str, restarts: int) -> DemixError:
    """The error of a job that ended without results.

    The error names a rank that was killed, else the first rank with an error, else the state that SLURM shows.
    """
    cure = "fix the cause and rerun: training resumes from the last checkpoint"
    logs = job.jobs
    if state.startswith("CANCELLED"):
        return DemixError(f"job {job_id}", "was cancelled", "rerun: training resumes from the last checkpoint")
    if state == "TIMEOUT":
        cure = "raise cluster.grace_seconds, then rerun: training resumes from the last checkpoint"
        return MishapError(f"job {job_id}", "reached its time limit before its state was saved", cure)
    killed = _killed(logs / f"{job_id}_0_log.err")
    if first := first_failure(noted_in(logs / f"{job_id}.{restarts}.notes"), killed):
        where, log = f"rank {first.rank} of {job.ranks} on {first.node}", logs / f"{job_id}_{first.rank}_log.err"
        if first.killed:
            return MishapError(where, f"ended first ({first.message})", f"see {log}; {cure}")
        kind = DemixError if first.expected else MishapError
        return kind(where, first.message, f"log: {log}")
    return MishapError(f"job {job_id}", f"ended as {state} without results", f"see {logs}/{job_id}_*_log.err; {cure}")


def _killed(path: Path) -> list[Failure]:
    """The ranks that were killed by a signal, with srun's messages, in the order of srun's log.

    All starts of a job share the log, so only the last start is used. Ranks that srun itself ended are ignored.
    """
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    found, ended = list[Failure](), False
    for line in lines:
        if line.startswith(START):
            found, ended = [], False
        ended = ended or any(words in line for words in ("First task exited", "Terminating StepId", "CANCELLED AT"))
        match = re.match(r"srun: error: (\S+): tasks? ([\d,-]+): (.*)", line)
        if match and not ended and "exit code" not in match[3]:
            found += [Failure(rank, match[1], match[3], killed=True) for rank in _numbers(match[2])]
    return found


def _numbers(text: str) -> Iterator[int]:
    """The numbers in a list of ranges: 1,3-5 means 1, 3, 4, 5."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
