"""Launching a training: in this process, in several processes on this machine, or in a SLURM job."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING

from demix.errors import DemixError
from demix.launch.job import Cluster, Places, TrainingJob
from demix.launch.progress import Failure, first_failure, key_of_failure
from demix.launch.slurm import collect, is_finished, remove_finished, run
from demix.launch.snakemake import when_ended

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


def launched(
    job: TrainingJob,
    site: Cluster | None,
    entry: Callable[[Sequence[str]], None],
    work: Callable[[Places], None],
) -> None:
    """Run `job`, and move its results to their final paths.

    `site` is the config's section `cluster` for the stage. With `launch: slurm` a SLURM job runs the training and
    calls `entry` with the command's arguments. With `local` processes on this machine run it. A single rank trains in
    this process, by `work`; so does a rank that a launcher (this one, torchrun or a batch system) has already started.

    Results are first completed below the checkpoints, and stay there after they are moved (weights as hard links).
    Snakemake deletes the outputs of a job that is killed at the last moment, and a finished training has no checkpoint
    from which it could be repeated.
    """
    if "WORLD_SIZE" in os.environ:
        if os.environ.get("DEMIX_FINGERPRINT", job.fingerprint) != job.fingerprint:
            raise DemixError("job", "was submitted with other settings or data than the current ones", "rerun")
        work(job.places)
        return
    if site is not None and site.launch == "slurm":
        run(job, site, entry)
        return
    if not is_finished(job):
        remove_finished(job)
        job.finished.mkdir(parents=True, exist_ok=True)
        os.environ["DEMIX_DONE"] = str(job.done)
        try:
            _train_here(job, job.places.below(job.finished), work)
        finally:
            del os.environ["DEMIX_DONE"]
    collect(job)


def _train_here(job: TrainingJob, places: Places, work: Callable[[Places], None]) -> None:
    """Train with the results in `places`, in this process or by several ranks on this machine."""
    if job.ranks == 1:
        work(places)
        return
    from torch import cuda

    if cuda.is_available() and job.ranks > cuda.device_count():
        cause = f"is {job.ranks}, but there are {cuda.device_count()} GPUs"
        raise DemixError("ranks", cause, f"use at most {cuda.device_count()} here")
    launch([*job.command, *places.options], job.ranks, job.checkpoints / "logs")


def world_size(ranks: int) -> int:
    """The number of processes that train together: `ranks`, or the number set by torchrun or a batch system.

    Raises DemixError if the two differ, or if the variables of such a launcher are not all set.
    """
    if "WORLD_SIZE" not in os.environ:
        return ranks
    numbers = {name: os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK", "MASTER_PORT")}
    wrong = [name for name, number in numbers.items() if not number.isdecimal()]
    wrong += [] if os.environ.get("MASTER_ADDR") else ["MASTER_ADDR"]
    size = 0 if wrong else int(numbers["WORLD_SIZE"])
    if wrong or int(numbers["RANK"]) >= size:
        cause = f"is {os.environ['WORLD_SIZE']}, without a valid {' and '.join(wrong or ['RANK'])}"
        raise DemixError("the environment variable WORLD_SIZE", cause, "unset it, or start the ranks with torchrun")
    if ranks not in (1, size):
        raise DemixError("ranks", f"is {ranks}, but WORLD_SIZE is {size}", "omit --ranks, or unset WORLD_SIZE")
    return size


def launch(command: Sequence[str], ranks: int, logs: Path) -> None:
    """Run `demix` with the arguments `command` as `ranks` processes, until all have ended without an error.

    The first rank writes to this process's standard error, rank n to `logs`/rank-<n>.log. When a rank fails, all ranks
    are ended, and a DemixError names the rank that failed first and the cause. SIGTERM, SIGUSR2 and SIGINT are
    forwarded to all ranks. If this process dies, all ranks end.
    """
    # Importing torch needs a second, for which `--help` must not wait.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    logs.mkdir(parents=True, exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[subprocess.Popen[bytes]] = []
    ended: Queue[int] = Queue()
    try:
        with _forwarding_signals(processes):
            for rank in range(ranks):
                environment = {
                    "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "DEMIX_LAUNCHER": os.getpid(),
                    # The ranks meet at the store above, because a port that is free now may be used later.
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True",
                }  # fmt: skip
                with open(logs / f"rank-{rank}.log", "ab") as log:
                    process = subprocess.Popen(
                        [sys.executable, "-m", "demix", *command],
                        env=os.environ | {key: str(value) for key, value in environment.items()},
                        stdin=subprocess.DEVNULL,
                        stderr=log if rank else None,
                        # Ctrl-C must reach only this process, which forwards the signal once.
                        process_group=0,
                    )
                processes.append(process)
                threading.Thread(target=_wait, args=(rank, process, ended), daemon=True).start()
            _watch(processes, ended, store, logs)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _wait(rank: int, process: subprocess.Popen[bytes], ended: "Queue[int]") -> None:
    process.wait()
    ended.put(rank)


def _watch(processes: list[subprocess.Popen[bytes]], ended: "Queue[int]", store: "TCPStore", logs: Path) -> None:
    for _ in processes:
        if processes[rank := ended.get()].returncode:
            raise _failure(processes, rank, store, logs)


def _failure(processes: list[subprocess.Popen[bytes]], rank: int, store: "TCPStore", logs: Path) -> DemixError:
    """The error to raise if `rank` was the first rank to end."""
    cure = "fix the cause and rerun: training resumes from the last checkpoint"
    status, key = processes[rank].returncode, key_of_failure()
    noted = [Failure(**json.loads(store.get(key)))] if store.check([key]) else []
    killed = [Failure(rank, "", signal.Signals(-status).name, killed=True)] if status < 0 else []
    first = first_failure(noted, killed)
    if first is None:
        return DemixError(
            f"rank {rank} of {len(processes)}", f"ended with status {status}", f"see {_log(logs, rank)}; {cure}"
        )
    subject, log = f"rank {first.rank} of {len(processes)}", _log(logs, first.rank)
    if first.killed:
        return DemixError(subject, f"was killed by {first.message}", f"see {log}; {cure}")
    return DemixError(subject, first.message, f"log: {log}")


def _log(logs: Path, rank: int) -> str:
    return str(logs / f"rank-{rank}.log") if rank else "the lines above"


@contextmanager
def _forwarding_signals(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    def forward(number: int, _: object) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_launcher() -> None:
    """In a rank that `launch` started, exit when the launcher has ended; other processes do nothing here."""
    if launcher := os.environ.get("DEMIX_LAUNCHER"):
        # All other ranks exit, too, so no state can be saved.
        when_ended(int(launcher), lambda: os._exit(1))


def end_rank() -> None:
    """End this process with status 0 if it is a finished rank that `launch` started; other processes do nothing here.

    The interpreter is not shut down, because threads of the ranks' process group may still run. They could abort the
    process during a shutdown, and the launcher would report a failed rank.
    """
    if "DEMIX_LAUNCHER" in os.environ:
        sys.stderr.flush()
        os._exit(0)
