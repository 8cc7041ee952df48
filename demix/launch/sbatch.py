"""A training's requests to SLURM, its submission by submitit, and the program of each task of the job (one rank)."""

import logging
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import submitit
from submitit import SlurmExecutor

from demix.errors import DemixError, StoppedError
from demix.launch.controller import ask, show
from demix.launch.job import Cluster, TrainingJob
from demix.launch.progress import START, noting

log = logging.getLogger(__name__)

# The maximum number of times that a job is requeued: after its time limit, a preemption or the loss of a node.
REQUEUES = 1000
# After the first rank has ended, the other ranks have this many seconds to report their errors.
SECONDS_FOR_THE_OTHERS = 30


class Rank:
    """One rank of a training: the command of `demix`, as submitit runs it in each task of a job.

    submitit pickles this object, and calls `checkpoint` if a signal arrives before the training has begun.
    """

    def __init__(self, job: TrainingJob, entry: Callable[[Sequence[str]], None]):
        self.entry, self.fingerprint = entry, job.fingerprint
        self.finished, self.done, self.jobs = job.finished.resolve(), job.done.resolve(), job.jobs.resolve()
        self.options = job.places.below(self.finished).options
        self.command, self.folder = job.command, os.getcwd()

    def __call__(self) -> None:
        os.chdir(self.folder)
        environment = submitit.JobEnvironment()
        job_id, restarts = environment.raw_job_id, int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        rank, done = environment.global_rank, self.done
        if done.exists():
            # The training had already finished when the stop signal requeued the job.
            return
        if rank == 0:
            print(f"{START} {restarts} of job {job_id}", file=sys.stderr, flush=True)
        with noting(self.jobs / f"{job_id}.{restarts}.notes", rank):
            if restarts > REQUEUES:
                cure = "raise cluster.minutes, then rerun: training resumes from the last checkpoint"
                raise DemixError(f"job {job_id}", f"did not finish and was requeued {restarts} times", cure)
            distributed = submitit.helpers.TorchDistributedEnvironment()
            _resolve(distributed.master_addr)
            distributed.export(set_cuda_visible_devices=False, overwrite=True)
            logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr, force=True)
            self.finished.mkdir(parents=True, exist_ok=True)
            # Training writes DEMIX_DONE after its results are complete and before it removes its checkpoints.
            os.environ |= {"DEMIX_DONE": str(done), "DEMIX_FINGERPRINT": self.fingerprint}
            try:
                self.entry([*self.command, *self.options])
            except StoppedError as stopped:
                if rank == 0:
                    log.info("%s", stopped)
                    _requeue(job_id)
                else:
                    # SLURM ends this rank. An early exit would end the first rank before it has requeued the job.
                    time.sleep(4 * SECONDS_FOR_THE_OTHERS)
                return
            # SLURM ends all ranks some time after any rank has exited, and the first rank may still write results.
            while rank and not done.exists():
                time.sleep(1.0)

    def checkpoint(self, *_: object) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(self)


def _resolve(host: str) -> None:
    """Raise DemixError if the first node's name has no address; ranks would then wait for each other forever."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        cause = f"does not resolve on {socket.gethostname()} ({error})"
        raise DemixError(f"node {host}", cause, "fix /etc/hosts or DNS of the nodes") from None


def _requeue(job_id: str) -> None:
    """Requeue the running job, unless SLURM has already ended it."""
    state = show(job_id).get("JobState")
    if state == "RUNNING":
        log.info("job %s: requeueing the job", job_id)
        ask(["scontrol", "requeue", job_id])
    else:
        log.info("job %s is %s: demix does not requeue it", job_id, state)


# Variables that an enclosing job sets, and that the new job must not treat as its own; and the ones among them that
# describe the site or the user. Variables SBATCH_* are set by users.
OF_THE_SITE = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", "PMI_", "PMIX_")


@contextmanager
def outside_jobs() -> Iterator[None]:
    """Remove variables of an enclosing job, if there is one, from the environment."""
    inherited = {
        name: os.environ.pop(name)
        for name in list(os.environ if "SLURM_JOB_ID" in os.environ else ())
        if name.startswith(OF_A_JOB) and not name.startswith(OF_THE_SITE)
    }
    try:
        yield
    finally:
        os.environ.update(inherited)


class _Executor(SlurmExecutor):
    """submitit's executor with options on sbatch's command line, where they override the user's variables SBATCH_*."""

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        lines = submission_file_path.read_text().splitlines()
        options = [shlex.split(line)[1] for line in lines if line.startswith("#SBATCH ")]
        return ["sbatch", *options, str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        said = string if isinstance(string, str) else string.decode(errors="replace")
        if found := re.search(r"^Submitted batch job (\d+)\b", said, re.MULTILINE):
            return found[1]
        cure = "check `squeue --me`, `scancel` a job that was submitted, then rerun"
        raise DemixError("sbatch", f"did not print the id of a job ({said.strip()!r:.200})", cure)


def executor_of(job: TrainingJob, cluster: Cluster) -> SlurmExecutor:
    """The executor that submits `job`. Raises DemixError if SLURM is not installed."""
    job.jobs.mkdir(parents=True, exist_ok=True)
    try:
        executor = _Executor(folder=job.jobs.resolve(), max_num_timeout=REQUEUES)
    except RuntimeError:
        raise DemixError(
            "cluster.launch", "is slurm, but srun is not installed here", "use local, or log in to the cluster"
        ) from None
    executor.update_parameters(**_asked(job, cluster))
    return executor


def _asked(job: TrainingJob, cluster: Cluster) -> dict[str, Any]:
    """The job's requests to SLURM, by submitit's names."""
    nodes = cluster.nodes(job.ranks)
    per_node = job.ranks // nodes
    named = {"account": cluster.account, "constraint": cluster.constraint, "partition": cluster.partition}
    gpus = f"{cluster.gpu_type}:{per_node}" if cluster.gpu_type else str(per_node)
    named |= {"qos": cluster.qos, "gpus-per-node": gpus if cluster.gpus else None}
    return {
        "job_name": job.name,
        "comment": job.fingerprint,
        "nodes": nodes,
        "ntasks_per_node": per_node,
        "cpus_per_task": job.threads,
        "time": cluster.minutes,
        "signal_delay_s": cluster.grace_seconds,
        "setup": list(cluster.setup),
        # submitit's default is a value that a site may not know.
        "wckey": None,
        "srun_args": [
            f"--cpus-per-task={job.threads}",
            # Every rank gets time to report its own error before SLURM ends it.
            "--kill-on-bad-exit=0",
            f"--wait={SECONDS_FOR_THE_OTHERS}",
        ],
        "additional_parameters": {
            **cluster.sbatch,
            "requeue": True,
            "export": "ALL",
            "mem": f"{cluster.memory_mb * per_node}M",
            # SLURM runs only one job of this name at a time.
            "dependency": "singleton",
            **{key: value for key, value in named.items() if value},
        },
    }
