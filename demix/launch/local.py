"""Starting a training: in this process, in several processes of this machine, or in a SLURM job."""

import enum
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from queue import Empty, Queue
from tempfile import TemporaryDirectory

from demix.errors import DemixError
from demix.files import fingerprint, read_json
from demix.launch.job import Cluster, TrainingJob
from demix.launch.notes import Failure, first_failure, noting
from demix.launch.parents import when_ended
from demix.launch.slurm import run
from demix.settings import settings_from

# Seconds that the other ranks have to end by themselves after one rank has failed.
GRACE = 10.0


class Launched(enum.Enum):
    """What is left for the process that asked for a training to be launched."""

    DONE = "other processes have done the work"
    HERE = "this process does the work, alone or as one rank"


def launched(
    cluster: str,
    ranks: int,
    threads: int,
    checkpoints: Path,
    *,
    fingerprinted: Sequence[object],
    shards: Sequence[Path],
    outputs: Mapping[str, Path],
    steps: int,
    entry: Callable[[Sequence[str]], None],
) -> Launched:
    """Have this process's own command done by `ranks` processes.

    `fingerprinted` tells this training from others, beside demix's version and the data of `shards`.
    `cluster` is the config's section for the stage, as JSON. With `launch: slurm` in it a SLURM job does the work (see
    `demix.launch.slurm.TrainingJob`) and calls `entry` with the command's arguments; otherwise processes of this
    machine do. `Launched.HERE` for one rank, and in a rank that was already started by either, torchrun or a batch
    system.
    """
    site = settings_from(Cluster, cluster, "--cluster") if cluster else None

    def of_training() -> str:
        data = {str(path): read_json(path.with_suffix(".json"))["sha256"] for path in shards}
        return fingerprint([version("demix"), *fingerprinted, data])

    if "WORLD_SIZE" in os.environ:
        if "DEMIX_FINGERPRINT" in os.environ and os.environ["DEMIX_FINGERPRINT"] != of_training():
            raise DemixError("job", "was submitted for other settings or data than are there now", "rerun")
        return Launched.HERE
    if site is not None and site.launch == "slurm":
        job = TrainingJob(
            command=tuple(sys.argv[1:]),
            fingerprint=of_training(),
            outputs=outputs,
            ranks=ranks,
            threads=threads,
            checkpoints=checkpoints,
            steps=steps,
        )
        run(job, site, entry)
        return Launched.DONE
    if ranks == 1:
        return Launched.HERE
    if site is not None and site.launch == "inline":
        cure = "use local, or start the ranks yourself (torchrun)"
        raise DemixError("cluster.launch", f"is inline for {ranks} ranks", cure)
    from torch import cuda

    if cuda.is_available() and ranks > cuda.device_count():
        raise DemixError(
            "ranks", f"is {ranks} for {cuda.device_count()} GPUs", f"use at most {cuda.device_count()} here"
        )
    launch(sys.argv[1:], ranks, checkpoints / "logs")
    return Launched.DONE


def world_size(ranks: int) -> int:
    """How many processes train together: `ranks`, or as torchrun or a batch system says; DemixError if they differ."""
    size = int(os.environ.get("WORLD_SIZE", ranks))
    if ranks not in (1, size):
        raise DemixError("ranks", f"is {ranks}, but WORLD_SIZE is {size}", "leave --ranks out, or unset WORLD_SIZE")
    return size


def launch(command: Sequence[str], ranks: int, logs: Path) -> None:
    """Run `demix` with the arguments `command` as `ranks` processes; returns when all have ended well.

    The first rank writes to this process's standard error, the others to `logs`/rank-<n>.log. When one fails all are
    ended, and DemixError names the one that failed first and why. SIGTERM, SIGUSR2 and SIGINT are passed on to all. If
    this process dies, so do they.
    """
    # Importing torch takes a second, which `--help` must not wait for.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    logs.mkdir(parents=True, exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[subprocess.Popen[bytes]] = []
    ended: Queue[int] = Queue()
    try:
        # What ranks note when they fail is of this start alone; their logs go on where others ended.
        with TemporaryDirectory(dir=logs, prefix=".failed.") as notes, _passing_on(processes):
            for rank in range(ranks):
                environment = {
                    "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks,
                    "DEMIX_NOTES": notes, "DEMIX_LAUNCHER": os.getpid(),
                    # All ranks meet at the store above, so no free port has to be guessed.
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True",
                }  # fmt: skip
                with open(logs / f"rank-{rank}.log", "ab") as log:
                    process = subprocess.Popen(
                        [sys.executable, "-m", "demix", *command],
                        env=os.environ | {key: str(value) for key, value in environment.items()},
                        stdin=subprocess.DEVNULL,
                        stderr=log if rank else None,
                        # Ctrl-C reaches this process alone, which passes it on once.
                        process_group=0,
                    )
                processes.append(process)
                threading.Thread(target=_wait, args=(rank, process, ended), daemon=True).start()
            _watch(processes, ended, Path(notes), logs)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _wait(rank: int, process: subprocess.Popen[bytes], ended: "Queue[int]") -> None:
    process.wait()
    ended.put(rank)


def _watch(processes: list[subprocess.Popen[bytes]], ended: "Queue[int]", notes: Path, logs: Path) -> None:
    left = set(range(len(processes)))
    while left:
        rank = ended.get()
        left.discard(rank)
        if processes[rank].returncode:
            # The failure cuts the connections of the other ranks; their errors are not the cause.
            deadline = time.monotonic() + GRACE
            failed = [rank]
            while left and (wait := deadline - time.monotonic()) > 0:
                try:
                    failed.append(ended.get(timeout=wait))
                except Empty:
                    break
                left.discard(failed[-1])
            raise _failure(processes, failed, notes, logs)


def _failure(processes: list[subprocess.Popen[bytes]], failed: list[int], notes: Path, logs: Path) -> DemixError:
    """The error of the ranks that ended, in the order in which they did."""
    cure = "mend the cause and rerun: training goes on from the last checkpoint"
    killed = [
        Failure(rank, "", signal.Signals(-processes[rank].returncode).name, killed=True)
        for rank in failed
        if processes[rank].returncode < 0
    ]
    first = first_failure(notes, killed)
    if first is None:
        rank = next(rank for rank in failed if processes[rank].returncode)
        cause = f"ended with status {processes[rank].returncode}"
        return DemixError(f"rank {rank} of {len(processes)}", cause, f"see {_log(logs, rank)}; {cure}")
    subject, log = f"rank {first.rank} of {len(processes)}", _log(logs, first.rank)
    if first.killed:
        return DemixError(subject, f"was killed by {first.message}", f"see {log}; {cure}")
    return DemixError(subject, first.message, f"log: {log}")


def _log(logs: Path, rank: int) -> str:
    return str(logs / f"rank-{rank}.log") if rank else "the lines above"


@contextmanager
def _passing_on(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    def pass_on(number: int, _: object) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def watched() -> Iterator[None]:
    """In a process that `launch` started: leave when the launcher is gone, and note the first error for it."""
    notes = os.environ.get("DEMIX_NOTES")
    if notes is None:
        yield
        return
    # Exit at once: all other ranks exit too, so no state can be saved.
    when_ended(int(os.environ["DEMIX_LAUNCHER"]), lambda: os._exit(1))
    with noting(Path(notes), int(os.environ["RANK"])):
        yield
