"""Training as a SLURM job of one or more nodes, through submitit: submitted once, found again, watched to its end.

What a job does is decided by files, and where it stands by the controller (squeue, scontrol), never by the accounting,
which may be away. A job leaves its results below its checkpoints, and who waits for it puts them in place.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from demix.errors import DemixError
from demix.files import exclusive, read_json, replacing, write_json
from demix.launch.controller import SECONDS_BETWEEN_LOOKS, ask, show
from demix.launch.job import Cluster, TrainingJob
from demix.launch.outcome import MishapError, failure, progress_line
from demix.launch.parents import is_job, orphaned, terminate, when_ended
from demix.launch.rank import SECONDS_FOR_THE_OTHERS, Rank

if TYPE_CHECKING:
    import submitit

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECONDS_BETWEEN_LINES = 15.0
# A job in one of these states has ended, unless SLURM is about to queue it again. In any other state it may still run.
FINAL = {
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY",
    "REVOKED", "LAUNCH_FAILED", "gone",
}  # fmt: skip
# A final state counts only after this many polls in a row: SLURM may queue the job again, and a shared file system may
# show the results late.
POLLS, POLLS_FOR_RESULTS = 6, 30


def run(work: TrainingJob, cluster: Cluster, entry: Callable[[Sequence[str]], None]) -> None:
    """Have `work` done by a SLURM job, whose ranks call `entry` with its command, and put its results in place.

    A job that was submitted before is waited for, one that has finished is collected, and else one is submitted: it
    goes on from the last checkpoint. Raises DemixError that names what failed first. SIGINT and SIGTERM, and the end of
    the process that started this one, leave the job or cancel it as `cluster.on_interrupt` says.
    """
    with _alone(work.checkpoints), _interruptible():
        for retries_left in reversed(range(cluster.retries + 1)):
            if _is_finished(work):
                break
            job = find(work)
            if job is None and _is_finished(work):
                break
            if job is None:
                job = submit(work, cluster, entry)
                _print_line(work, f"submitted job {job}")
            else:
                _print_line(work, f"goes on in job {job}, which was submitted before")
            try:
                _wait(work, job)
            except _InterruptedError as interrupted:
                error = _interruption(job, cluster, str(interrupted))
                # An interrupted snakemake shows no logs.
                _print_line(work, str(error))
                raise error from None
            except MishapError as mishap:
                if not retries_left:
                    raise
                _print_line(work, f"{mishap}. Submitting it again, {retries_left} times at most")
        _collect(work)


def submit(work: TrainingJob, cluster: Cluster, entry: Callable[[Sequence[str]], None]) -> str:
    """Submit the job that does `work`; returns its id."""
    import submitit

    for other in work.checkpoints.glob("finished-*"):
        # The results of this same training must survive.
        if other != work.finished:
            shutil.rmtree(other, ignore_errors=True)
    executor = _executor(work, cluster)
    # A signal between the submission and the note would lose the job.
    waiting = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with submitit.helpers.clean_env():
            job = executor.submit(Rank(work, entry, cluster.requeues)).job_id
        write_json(work.jobs / "job.json", {"job": job, "name": work.name, "fingerprint": work.fingerprint})
    except DemixError:
        raise
    except Exception as error:
        # submitit raises its own kinds, with sbatch's words in them.
        last = [line for line in str(error).splitlines() if line.strip()][-1]
        cure = "mend the section cluster of the config (sbatch --test-only says more), then rerun"
        raise DemixError(f"job {work.name}", f"was not taken by SLURM ({last})", cure) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, waiting)
    return job


def sbatch_text(work: TrainingJob, cluster: Cluster) -> str:
    """The file that `submit` would give to sbatch."""
    return _executor(work, cluster)._make_submission_file_text("demix " + " ".join(work.command), "plan")


def find(work: TrainingJob) -> str | None:
    """The id of the job that does `work`, if one is pending or running.

    Raises DemixError when there is one that trains something else in the same place.
    """
    command = ["squeue", "--noheader", "--user", str(os.getuid()), "--name", work.name, "--format", "%A %T %k"]
    said = False
    while found := [line.split() for line in ask(command).splitlines() if line.strip()]:
        # One that is ending is either queued again or gone in a moment, unless its node hangs.
        ending = [job for job, state, *_ in found if state == "COMPLETING"]
        if not ending:
            break
        if not said:
            _print_line(work, f"job {ending[0]} is ending (COMPLETING): waiting until SLURM has cleared it")
            said = True
        time.sleep(SECONDS_BETWEEN_LOOKS)
    with suppress(DemixError):
        recorded = read_json(work.jobs / "job.json")
        # Some sites change comments.
        found = [
            [job, state, recorded["fingerprint"]] if job == recorded["job"] else [job, state, *rest]
            for job, state, *rest in found
        ]
    for job, _, *fingerprint in found:
        if fingerprint != [work.fingerprint]:
            cause = f"still trains {work.checkpoints.name} with other settings or data"
            raise DemixError(f"job {job}", cause, f"wait for it, or `scancel {job}`, then rerun")
    return found[0][0] if found else None


def _executor(work: TrainingJob, cluster: Cluster) -> "submitit.SlurmExecutor":
    import submitit

    nodes = cluster.nodes(work.ranks)
    per_node = work.ranks // nodes
    work.jobs.mkdir(parents=True, exist_ok=True)
    try:
        executor = submitit.SlurmExecutor(folder=work.jobs.resolve(), max_num_timeout=cluster.requeues)
    except RuntimeError:
        raise DemixError(
            "cluster.launch", "is slurm, but there is no srun here", "use local, or log in to the cluster"
        ) from None
    asked = {
        "mem": f"{cluster.memory_mb * per_node}M",
        # SLURM runs only one job of this name at a time.
        "dependency": "singleton",
        "qos": cluster.qos,
        "account": cluster.account,
        "constraint": cluster.constraint,
    }
    executor.update_parameters(
        job_name=work.name,
        comment=work.fingerprint,
        nodes=nodes,
        ntasks_per_node=per_node,
        cpus_per_task=work.threads,
        time=cluster.minutes,
        signal_delay_s=cluster.grace_seconds,
        setup=list(cluster.setup),
        srun_args=[
            f"--cpus-per-task={work.threads}",
            # Every rank gets time to report its own error before SLURM ends it.
            "--kill-on-bad-exit=0",
            f"--wait={SECONDS_FOR_THE_OTHERS}",
        ],
        additional_parameters={"requeue": True} | {key: value for key, value in asked.items() if value},
        **({"partition": cluster.partition} if cluster.partition else {}),
        **({"gpus_per_node": per_node} if cluster.gpus else {}),
    )
    return executor


def _wait(work: TrainingJob, job: str) -> None:
    """Until the job has left the queue, showing how far it is. Raises DemixError when it left no results."""
    last_line, said, final = 0.0, "", 0
    while True:
        shown = show(job)
        state = shown.get("JobState", "gone")
        final = final + 1 if state in FINAL else 0
        if final > 1 and _is_finished(work):
            _print_line(work, f"job {job} has finished")
            return
        if final == (POLLS_FOR_RESULTS if state in ("COMPLETED", "gone") else POLLS):
            raise failure(work, job, state, int(shown.get("Restarts", "0")))
        line = progress_line(work, job, shown)
        now = time.monotonic()
        if line != said and (now - last_line > SECONDS_BETWEEN_LINES or line.split("  ")[0] != said.split("  ")[0]):
            _print_line(work, line)
            said, last_line = line, now
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _is_finished(work: TrainingJob) -> bool:
    """Whether all files that the job left are here."""
    with suppress(DemixError, OSError, KeyError, AttributeError):
        # Listing the folder makes NFS refresh its cache.
        os.listdir(work.finished)
        sizes = read_json(work.finished / "done.json")["files"]
        return all((work.finished / name).stat().st_size == size for name, size in sizes.items())
    return False


def _collect(work: TrainingJob) -> None:
    """Put what the job left in its place: a model's folder file by file, its descriptions last."""
    for option, place in work.outputs.items():
        source = work.finished / option.strip("-")
        files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
        # A JSON file says that what it describes is there.
        for path in sorted(files, key=lambda path: (path.suffix == ".json", path.name == "model.json", path)):
            with replacing(place / path.relative_to(source) if source.is_dir() else place) as temporary:
                try:
                    os.link(path, temporary)
                except OSError:
                    shutil.copyfile(path, temporary)


class _InterruptedError(BaseException):
    """A signal arrived, or the process that waited for this one has ended."""


def _interruption(job: str, cluster: Cluster, cause: str) -> DemixError:
    if cluster.on_interrupt == "cancel":
        try:
            subprocess.run(["scancel", job], check=True, capture_output=True, timeout=30)
        except (subprocess.SubprocessError, OSError):
            return DemixError(f"job {job}", f"could not be cancelled ({cause})", f"it may still run: `scancel {job}`")
        return DemixError(f"job {job}", f"was cancelled ({cause})", "rerun: training goes on from the last checkpoint")
    return DemixError(f"job {job}", f"was left running ({cause})", f"rerun to wait for it, or `scancel {job}`")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Signals, and the end of the process that started this one, raise _InterruptedError."""
    # nohup and `&` ignore some signals on purpose.
    numbers = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    done = threading.Event()

    def interrupt(number: int, _: object) -> None:
        # A second signal must not interrupt the handling of the first.
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise _InterruptedError("who waited for it has ended" if orphaned.is_set() else signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in numbers}
    # A job of snakemake already ends with snakemake.
    if len(numbers) == len(SIGNALS) and not is_job.is_set():
        when_ended(os.getppid(), lambda: None if done.is_set() else terminate())
    try:
        yield
    except _InterruptedError as interrupted:
        raise DemixError("demix", f"was interrupted ({interrupted}); a job goes on", "rerun to wait for it") from None
    finally:
        done.set()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _alone(checkpoints: Path) -> Iterator[None]:
    """Let only one process wait for a training; a process whose snakemake was killed ends a few seconds later."""
    with exclusive(checkpoints / "waiting.lock", "waits for this training", patience=30.0):
        yield


def _print_line(work: TrainingJob, line: str) -> None:
    """Print a line to standard output, which snakemake shows on the terminal; standard error goes to the log."""
    try:
        print(f"{work.checkpoints.name}: {line}", flush=True)
    except OSError:
        # The terminal is gone. Flushing the buffer at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
