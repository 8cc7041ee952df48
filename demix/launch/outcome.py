"""The progress of a SLURM job, and the first failure of a job that ended without results."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from demix.errors import DemixError
from demix.launch.job import TrainingJob
from demix.launch.notes import Failure, first_failure, noted_in
from demix.launch.pace import last_rows, seconds_left, speed
from demix.launch.rank import START
from demix.progress import clock


def progress_line(job: TrainingJob, job_id: str, shown: Mapping[str, str]) -> str:
    """One line of progress, with loss and speed once a step of this start is done.

    For example: `job 12 running on n[1-2], queued again 2 times step 40/488 loss 5.321 2100 tokens/s 3:20 left`.
    """
    state, restarts = shown.get("JobState", "unknown").lower(), int(shown.get("Restarts", "0"))
    where = f" on {shown['NodeList']}" if shown.get("NodeList", "(null)") not in ("(null)", "") else ""
    why = f" ({shown['Reason']})" if state == "pending" and shown.get("Reason", "None") != "None" else ""
    again = f", queued again {restarts} times" if restarts > 1 else ", queued again once" if restarts else ""
    head = f"job {job_id} {state}{why}{where}{again}"
    rows: list[dict[str, Any]] = []
    if state == "running":
        # Rows that are older than this start belong to another training in the same folder.
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
    """A job ended by a cause that may not recur: a killed rank, or an error that is none of demix's own."""


def failure(job: TrainingJob, job_id: str, state: str, restarts: int) -> DemixError:
    """The error of a job that ended without results.

    The error names a rank that was killed, else the rank that noted an error first, else the state that SLURM shows.
    """
    cure = "fix the cause and rerun: training goes on from the last checkpoint"
    logs = job.jobs
    if state.startswith("CANCELLED"):
        return DemixError(f"job {job_id}", "was cancelled", "rerun: training goes on from the last checkpoint")
    if state == "TIMEOUT":
        cure = "raise cluster.grace_seconds, then rerun: training goes on from the last checkpoint"
        return MishapError(f"job {job_id}", "reached its time limit before its state was saved", cure)
    killed = [Failure(*one, killed=True) for one in _killed(logs / f"{job_id}_0_log.err")]
    if first := first_failure(noted_in(logs / f"{job_id}.{restarts}.notes"), killed):
        where, log = f"rank {first.rank} of {job.ranks} on {first.node}", logs / f"{job_id}_{first.rank}_log.err"
        if first.killed:
            return MishapError(where, f"ended first ({first.message})", f"see {log}; {cure}")
        kind = DemixError if first.expected else MishapError
        return kind(where, first.message, f"log: {log}")
    return MishapError(f"job {job_id}", f"ended as {state} without results", f"see {logs}/{job_id}_*_log.err; {cure}")


def _killed(path: Path) -> list[tuple[int, str, str]]:
    """Ranks that a signal ended, with their nodes and srun's messages, in the order of srun's log.

    All starts of a job share the log, so only the last start counts. Ranks that srun itself ended do not count.
    """
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    found: list[tuple[int, str, str]] = []
    ended = False
    for line in lines:
        if line.startswith(START):
            found, ended = [], False
        ended = ended or any(words in line for words in ("First task exited", "Terminating StepId", "CANCELLED AT"))
        match = re.match(r"srun: error: (\S+): tasks? ([\d,-]+): (.*)", line)
        if match and not ended and "exit code" not in match[3]:
            found += [(rank, match[1], match[3]) for rank in _numbers(match[2])]
    return found


def _numbers(text: str) -> Iterator[int]:
    """The numbers in a list of ranges: 1,3-5 means 1, 3, 4, 5."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
