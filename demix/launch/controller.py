"""Queries to SLURM's controller (squeue, scontrol), never to the accounting database, which may be down."""

import logging
import re
import subprocess
import time
from collections.abc import Sequence

from demix.errors import DemixError

log = logging.getLogger(__name__)

SECONDS_BETWEEN_POLLS = 2.0
# A controller serves a whole site. The longer a job stays in its state, the longer demix waits between two queries.
MAX_BETWEEN_POLLS, SHARE_OF_STATE = 60.0, 1 / 30
# After this many seconds without an answer demix stops waiting, but the job keeps running.
MAX_SILENCE = 6 * 3600.0
# A job in one of these states has ended, unless SLURM is about to queue it again. In other states it may still run.
FINAL = {
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
    *("OUT_OF_MEMORY", "REVOKED", "LAUNCH_FAILED", "gone"),
}
# Each line that squeue prints begins with a mark, because a site or a federation may print further lines.
JOB = "demix-job %A %T "


def jobs_in(text: str) -> list[tuple[str, str, str]]:
    """Id, state and further fields of each job that squeue lists in the format `JOB`; other lines are ignored."""
    return re.findall(r"^demix-job (\d+) ([A-Z_]+) ?(.*?) *$", text, re.MULTILINE)


def show(job_id: str) -> dict[str, str]:
    """The controller's fields of a job, by SLURM's names; empty if the controller no longer knows the job."""
    # A site may print other lines, also of other jobs, before it.
    own = rf"\bJobId={job_id} .*\bJobState=[A-Z].*"
    try:
        (line, *_) = re.findall(own, ask(["scontrol", "show", "job", "--oneliner", job_id], own))
    except LookupError:
        return {}
    return dict(pair.split("=", 1) for pair in line.split() if "=" in pair)


def pause(seconds: float) -> float:
    """The seconds until the next query about a job that has been in its state for `seconds`."""
    return max(SECONDS_BETWEEN_POLLS, min(MAX_BETWEEN_POLLS, SHARE_OF_STATE * seconds))


def ask(command: Sequence[str], holds: str = "") -> str:
    """The output of a SLURM command, which is repeated until the output matches the pattern `holds`.

    Raises LookupError if there is no such job.
    """
    silent_since: float | None = None
    while True:
        try:
            done = subprocess.run(command, capture_output=True, errors="replace", timeout=120, check=False)
            if "Invalid job id" in done.stderr:
                raise LookupError(done.stderr)
            if done.returncode == 0 and re.search(holds, done.stdout):
                return done.stdout
            missing = f"the answer has no {holds}, and the exit status is {done.returncode}"
            message = (done.stderr.strip().splitlines() or [missing])[-1]
        except subprocess.TimeoutExpired:
            message = "no answer in 120 s"
        except FileNotFoundError:
            raise DemixError(
                command[0], "is not installed here", "log in to the cluster, or use cluster.launch local"
            ) from None
        if silent_since is None:
            silent_since = time.monotonic()
            log.warning("%s: %s; repeating the query until SLURM answers", command[0], message)
        if time.monotonic() - silent_since > MAX_SILENCE:
            raise DemixError(command[0], f"has not answered for hours ({message})", "rerun when SLURM is back")
        time.sleep(SECONDS_BETWEEN_POLLS)
