"""Training as a SLURM job of one or more nodes, through submitit: submitting, finding, waiting, collecting results.

Files decide what a job does, and the controller (squeue, scontrol) knows the job's state. The accounting database is
never queried, because it may be down. A job writes its results below its checkpoints, and the process that waits for
the job moves them to their final paths.
"""

import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from demix.errors import DemixError
from demix.files import exclusive, linked, read_json, replacing, write_json
from demix.launch.controller import FINAL, JOB, SECONDS_BETWEEN_POLLS, ask, jobs_in, pause, show
from demix.launch.job import Cluster, TrainingJob
from demix.launch.progress import MishapError, failure, progress_line
from demix.launch.snakemake import is_job, orphaned, terminate, when_ended

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECONDS_BETWEEN_LINES = 15.0
# A final state is accepted only after this many polls in a row, because SLURM may requeue the job, and a shared file
# system may show the results late.
POLLS, POLLS_FOR_RESULTS = 6, 30
# How often one run resubmits a job that failed because a rank was killed, or by an error that demix itself did not
# raise.
RETRIES = 2


def run(job: TrainingJob, cluster: Cluster, entry: Callable[[Sequence[str]], None]) -> None:
    """Run `job` as a SLURM job, whose ranks call `entry` with the command, and collect the results.

    If the job has finished, its results are collected; if it is already submitted, this process waits for it. Otherwise
    a new job is submitted, which resumes from the last checkpoint. Raises DemixError that names the first failure. Also
    raises DemixError at SIGINT, SIGTERM or SIGHUP, and if the process that started this one ends; the SLURM job then
    keeps running.
    """
    # Only sbatch reads this variable, so squeue and scontrol would query another cluster.
    if clusters := os.environ.get("SBATCH_CLUSTERS"):
        os.environ["SLURM_CLUSTERS"] = clusters
    # If a snakemake was killed, its processes end a few seconds later and may hold the lock until then.
    lock = exclusive(job.checkpoints / "waiting.lock", "waits for this training", patience=30.0)
    with lock, _interruptible():
        for retries_left in reversed(range(RETRIES + 1)):
            if is_finished(job):
                break
            job_id = find(job)
            if job_id is None and is_finished(job):
                break
            if job_id is None:
                job_id = submit(job, cluster, entry)
                _print_line(job, f"submitted job {job_id}")
            else:
                _print_line(job, f"continues in job {job_id}, which was submitted before")
            try:
                _wait(job, job_id)
            except _InterruptedError as interrupted:
                cure = f"rerun to wait for it, or `scancel {job_id}`"
                error = DemixError(f"job {job_id}", f"is still running ({interrupted})", cure)
                # An interrupted snakemake shows no logs of its jobs.
                _print_line(job, str(error))
                raise error from None
            except MishapError as mishap:
                if not retries_left:
                    raise
                _print_line(job, f"{mishap}. Submitting the job again (at most {retries_left} more times)")
        collect(job)


def submit(job: TrainingJob, cluster: Cluster, entry: Callable[[Sequence[str]], None]) -> str:
    """Submit a SLURM job that runs `job`; returns the SLURM job's id."""
    # Importing submitit needs a second, and is not needed to wait for an existing job.
    from demix.launch.sbatch import Rank, executor_of, outside_jobs

    remove_finished(job)
    executor = executor_of(job, cluster)
    # A signal between the submission and the writing of job.json would lose the job.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with outside_jobs():
            job_id = executor.submit(Rank(job, entry)).job_id
        write_json(job.jobs / "job.json", {"job": job_id, "name": job.name, "fingerprint": job.fingerprint})
    except DemixError:
        raise
    except Exception as error:
        # submitit raises its own exceptions. The site may print more lines than sbatch.
        lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
        said = [line for line in lines if line.startswith(("sbatch: error", "sbatch: fatal"))] or lines
        cure = "fix the section cluster of the config (sbatch --test-only gives details), then rerun"
        raise DemixError(f"job {job.name}", f"was refused by SLURM ({said[-1]})", cure) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return job_id


def find(job: TrainingJob) -> str | None:
    """The id of the SLURM job that runs `job`, if one is pending or running.

    Raises DemixError if a SLURM job trains something else in the same place.
    """
    command = ["squeue", "--noheader", "--user", str(os.getuid()), "--name", job.name, "--format", f"{JOB}%k"]
    announced = False
    while found := jobs_in(ask(command)):
        # A job that is ending is soon requeued or gone, unless its node hangs.
        ending = [job_id for job_id, state, _ in found if state == "COMPLETING"]
        if not ending:
            break
        if not announced:
            _print_line(job, f"job {ending[0]} is ending (COMPLETING): waiting until SLURM has cleared it")
            announced = True
        time.sleep(SECONDS_BETWEEN_POLLS)
    with suppress(DemixError):
        recorded = read_json(job.jobs / "job.json")
        # Some sites change the comments of jobs, which hold the fingerprints.
        found = [
            (job_id, state, recorded["fingerprint"] if job_id == recorded["job"] else fingerprint)
            for job_id, state, fingerprint in found
        ]
    for job_id, _, fingerprint in found:
        if fingerprint != job.fingerprint:
            cause = f"still trains {job.label} with other settings or data"
            raise DemixError(f"job {job_id}", cause, f"wait for it, or `scancel {job_id}`, then rerun")
    return found[0][0] if found else None


def _wait(job: TrainingJob, job_id: str) -> None:
    """Wait until the SLURM job has finished, and show its progress.

    Raises DemixError when the job has ended without results.
    """
    last_printed, printed, final, before, since = 0.0, "", 0, "", time.monotonic()
    while True:
        shown = show(job_id)
        state = shown.get("JobState", "gone")
        if state != before:
            before, since = state, time.monotonic()
        final = final + 1 if state in FINAL else 0
        if final > 1 and is_finished(job):
            _print_line(job, f"job {job_id} has finished")
            return
        if final == (POLLS_FOR_RESULTS if state in ("COMPLETED", "gone") else POLLS):
            raise failure(job, job_id, state, int(shown.get("Restarts", "0")))
        line = progress_line(job, job_id, shown)
        now = time.monotonic()
        if line != printed and (
            now - last_printed > SECONDS_BETWEEN_LINES
            # The first step of a training is shown as soon as it is known.
            or "  " not in printed
            or line.split("  ")[0] != printed.split("  ")[0]
        ):
            _print_line(job, line)
            printed, last_printed = line, now
        # The last polls, which decide that a job has ended, follow each other quickly.
        time.sleep(SECONDS_BETWEEN_POLLS if final else pause(now - since))


def is_finished(job: TrainingJob) -> bool:
    """Whether all results of the job are visible here."""
    with suppress(DemixError, OSError, KeyError, AttributeError):
        # Listing the folder makes NFS refresh its cache.
        os.listdir(job.finished)
        sizes = read_json(job.done)["files"]
        return all((job.finished / name).stat().st_size == size for name, size in sizes.items())
    return False


def remove_finished(job: TrainingJob) -> None:
    """Remove the results of other trainings in the folder of `job`; results of the same training must be kept."""
    for other in job.checkpoints.glob("finished-*"):
        if other != job.finished:
            shutil.rmtree(other, ignore_errors=True)


def remove_collected(checkpoints: Path) -> None:
    """Remove the collected results of trainings below `checkpoints`.

    Results count as collected if each file of weights has a second hard link, which `collect` makes. Other results are
    kept. Call this function when Snakemake has recorded the collected results.
    """
    for finished in [*checkpoints.rglob("finished-*")]:
        weights = [path.stat().st_nlink for path in finished.rglob("*.safetensors")]
        if weights and min(weights) > 1:
            shutil.rmtree(finished, ignore_errors=True)


def collect(job: TrainingJob) -> None:
    """Move the results of the job to their final paths, one at a time; JSON files that describe others come last."""
    waiting = job.places.below(job.finished).results.values()
    for source, place in zip(waiting, job.places.results.values(), strict=True):
        files = [source] if source.is_file() else [path for path in source.rglob("[!.]*") if path.is_file()]
        # If a JSON file exists, the files that it describes must exist.
        for path in sorted(files, key=lambda path: (path.suffix == ".json", path.name == "model.json", path)):
            target = place / path.relative_to(source) if source.is_dir() else place
            with replacing(target) as temporary:
                linked(path, temporary)


class _InterruptedError(BaseException):
    """A signal arrived, or the process that waited for this one has ended."""


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise _InterruptedError at a signal, and when the process that started this one has ended."""
    # nohup and `&` ignore some signals on purpose.
    numbers = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    done = threading.Event()

    def interrupt(number: int, _: object) -> None:
        # A second signal must not interrupt the handling of the first.
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise _InterruptedError(
            "the process that waited for it has ended" if orphaned.is_set() else signal.Signals(number).name
        )

    handlers = {number: signal.signal(number, interrupt) for number in numbers}
    # A job of snakemake ends with snakemake anyway.
    if len(numbers) == len(SIGNALS) and not is_job.is_set():
        when_ended(os.getppid(), lambda: None if done.is_set() else terminate())
    try:
        yield
    except _InterruptedError as interrupted:
        raise DemixError("demix", f"was interrupted ({interrupted}); a job still runs", "rerun to wait") from None
    finally:
        done.set()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _print_line(job: TrainingJob, line: str) -> None:
    """Print a line to standard output, which snakemake shows on the terminal. Standard error goes to the log."""
    try:
        print(f"{job.label}: {line}", flush=True)
    except OSError:
        # The terminal is closed. Flushing the buffer at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
