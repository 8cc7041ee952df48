"""What a training asks of SLURM, and its submission by submitit."""

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor
from submitit.slurm.slurm import _make_sbatch_string

from demix.errors import DemixError
from demix.launch.job import Cluster, TrainingJob
from demix.launch.rank import SECONDS_FOR_THE_OTHERS

# Variables that an enclosing job sets, which the new job must not take for its own, and those of them that name the
# site or the user. A user sets those of sbatch, SBATCH_*.
OF_THE_SITE = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", "PMI_", "PMIX_")


@contextmanager
def outside_jobs() -> Iterator[None]:
    """Take from the environment what an enclosing job, if there is one, has set there."""
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
    """submitit's, whose options stand on sbatch's command line, where they win over the user's variables SBATCH_*."""

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        lines = submission_file_path.read_text().splitlines()
        options = [shlex.split(line)[1] for line in lines if line.startswith("#SBATCH ")]
        return ["sbatch", *options, str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        said = string if isinstance(string, str) else string.decode(errors="replace")
        if found := re.search(r"^Submitted batch job (\d+)\b", said, re.MULTILINE):
            return found[1]
        cure = "see `squeue --me`, and `scancel` a job that is there, then rerun"
        raise DemixError("sbatch", f"names no job that it submitted ({said.strip()!r:.200})", cure)


def executor_of(job: TrainingJob, cluster: Cluster) -> SlurmExecutor:
    """What submits `job`. Raises DemixError where there is no SLURM."""
    job.jobs.mkdir(parents=True, exist_ok=True)
    try:
        executor = _Executor(folder=job.jobs.resolve(), max_num_timeout=cluster.requeues)
    except RuntimeError:
        raise DemixError(
            "cluster.launch", "is slurm, but there is no srun here", "use local, or log in to the cluster"
        ) from None
    executor.update_parameters(**_asked(job, cluster))
    return executor


def sbatch_text(job: TrainingJob, cluster: Cluster) -> str:
    """The text of the file that is given to sbatch, made with or without a SLURM here."""
    text: str = _make_sbatch_string("demix " + " ".join(job.command), job.jobs.resolve(), **_asked(job, cluster))
    return text


def _asked(job: TrainingJob, cluster: Cluster) -> dict[str, Any]:
    """What the job asks of SLURM, by submitit's names."""
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
        # submitit's default names one that a site need not know.
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
