"""The program of each task of a SLURM job: one rank of a training."""

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

# After the first rank has ended, the other ranks have this many seconds to report their errors.
SECONDS_FOR_THE_OTHERS = 30
# The line of the first rank's log that marks each start of the job.
START = "demix: start"


class Rank:
    """One rank of a training: the command of `demix`, as submitit runs it in each task of a job.

    submitit pickles this object, and calls `checkpoint` if a signal arrives before the training has begun.
    """

    def __init__(self, job: TrainingJob, entry: Callable[[Sequence[str]], None], requeues: int):
        self.entry, self.fingerprint, self.requeues = entry, job.fingerprint, requeues
        self.finished, self.done, self.jobs = job.finished.resolve(), job.done.resolve(), job.jobs.resolve()
        self.outputs = {option: str(self.finished / option.strip("-")) for option in job.outputs}
        self.command, self.folder = job.command, os.getcwd()

    def __call__(self) -> None:
        import submitit

        os.chdir(self.folder)
        environment = submitit.JobEnvironment()
        job_id, restarts = environment.raw_job_id, int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        rank, done = environment.global_rank, self.done
        if done.exists():
            # The training had finished when the signal to stop requeued the job.
            return
        if rank == 0:
            print(f"{START} {restarts} of job {job_id}", file=sys.stderr, flush=True)
        with noting(self.jobs / f"{job_id}.{restarts}.notes", rank):
            if restarts > self.requeues:
                cure = (
                    "raise cluster.requeues or cluster.minutes, then rerun: training goes on from the last checkpoint"
                )
                raise DemixError(f"job {job_id}", f"was queued again {restarts} times", cure)
            distributed = submitit.helpers.TorchDistributedEnvironment()
            _resolve(distributed.master_addr)
            distributed.export(set_cuda_visible_devices=False, overwrite=True)
            logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr, force=True)
            self.finished.mkdir(parents=True, exist_ok=True)
            places = [word for pair in self.outputs.items() for word in pair]
            # Training writes DEMIX_DONE after its results are complete and before it removes its checkpoints.
            os.environ |= {"DEMIX_DONE": str(done), "DEMIX_FINGERPRINT": self.fingerprint}
            try:
                self.entry([*self.command, *places])
            except StoppedError as stopped:
                if rank == 0:
                    log.info("%s", stopped)
                    _requeue(job_id)
                else:
                    # SLURM ends this rank. An early exit would end the first rank before it has queued the job again.
                    time.sleep(4 * SECONDS_FOR_THE_OTHERS)
                return
            # SLURM ends all ranks some time after any rank has exited, and the first rank may still write results.
            while rank and not done.exists():
                time.sleep(1.0)

    def checkpoint(self, *_: object) -> "submitit.helpers.DelayedSubmission":
        import submitit

        return submitit.helpers.DelayedSubmission(self)


def _resolve(host: str) -> None:
    """Raise DemixError if the first node's name has no address, without which ranks wait for each other forever."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        cause = f"does not resolve on {socket.gethostname()} ({error})"
        raise DemixError(f"node {host}", cause, "fix /etc/hosts or DNS of the nodes") from None


def _requeue(job_id: str) -> None:
    """Queue the running job again, unless SLURM has already ended the job."""
    state = show(job_id).get("JobState")
    if state == "RUNNING":
        log.info("job %s: queueing the job again", job_id)
        ask(["scontrol", "requeue", job_id])
    else:
        log.info("job %s is %s: the job is not queued again from here", job_id, state)
