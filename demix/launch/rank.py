"""What each task of a SLURM job does: one rank of a training."""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from demix.errors import DemixError, StoppedError
from demix.launch.controller import ask, show
from demix.launch.job import TrainingJob
from demix.launch.notes import noting

if TYPE_CHECKING:
    import submitit

log = logging.getLogger(__name__)

# Seconds that the other ranks have to report their errors after the first rank has ended.
SECONDS_FOR_THE_OTHERS = 30
# What the first rank's log says at each start of the job.
START = "demix: start"


class Rank:
    """What each task of the job runs: the command of `demix`, as one rank of a world.

    submitit pickles it, and calls `checkpoint` for a signal that comes before training has begun.
    """

    def __init__(self, work: TrainingJob, entry: Callable[[Sequence[str]], None], requeues: int):
        self.entry, self.fingerprint, self.requeues = entry, work.fingerprint, requeues
        self.finished, self.jobs = work.finished.resolve(), work.jobs.resolve()
        self.outputs = {option: str(self.finished / option.strip("-")) for option in work.outputs}
        self.command, self.folder = work.command, os.getcwd()

    def __call__(self) -> None:
        import submitit

        os.chdir(self.folder)
        environment = submitit.JobEnvironment()
        job, restarts = environment.raw_job_id, int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        rank, done = environment.global_rank, self.finished / "done.json"
        if done.exists():
            # The training had finished when the signal to stop requeued the job.
            return
        if rank == 0:
            print(f"{START} {restarts} of job {job}", file=sys.stderr, flush=True)
        with noting(self.jobs / f"{job}.{restarts}.notes", rank):
            if restarts > self.requeues:
                cure = (
                    "raise cluster.requeues or cluster.minutes, then rerun: training goes on from the last checkpoint"
                )
                raise DemixError(f"job {job}", f"was queued again {restarts} times", cure)
            distributed = submitit.helpers.TorchDistributedEnvironment()
            _resolve(distributed.master_addr)
            distributed.export(set_cuda_visible_devices=False, overwrite=True)
            logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr, force=True)
            self.finished.mkdir(parents=True, exist_ok=True)
            places = [word for pair in self.outputs.items() for word in pair]
            # Written when the results are whole, before the state that they came from is removed.
            os.environ |= {"DEMIX_DONE": str(done), "DEMIX_FINGERPRINT": self.fingerprint}
            try:
                self.entry([*self.command, *places])
            except StoppedError as stopped:
                if rank == 0:
                    log.info("%s", stopped)
                    _requeue(job)
                else:
                    # SLURM ends this one; to leave would hurry the rank that asks to be queued again.
                    time.sleep(4 * SECONDS_FOR_THE_OTHERS)
                return
            # SLURM ends the rest some time after the first rank has ended.
            while rank and not done.exists():
                time.sleep(1.0)

    def checkpoint(self, *_: object) -> "submitit.helpers.DelayedSubmission":
        import submitit

        return submitit.helpers.DelayedSubmission(self)


def _resolve(host: str) -> None:
    """Without an address of the first node the ranks would wait for one another in vain."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        cause = f"does not resolve on {socket.gethostname()} ({error})"
        raise DemixError(f"node {host}", cause, "mend /etc/hosts or DNS of the nodes") from None


def _requeue(job: str) -> None:
    """Queue the running job again, unless it was not warned but ended."""
    state = show(job).get("JobState")
    if state == "RUNNING":
        log.info("job %s: queueing it again", job)
        ask(["scontrol", "requeue", job])
    else:
        log.info("job %s is %s: not queued again from here", job, state)
