"""Who trains: this process, several of this machine that are started, watched and ended as one, or a SLURM job."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from queue import Empty, Queue
from tempfile import TemporaryDirectory

from demix.errors import DemixError
from demix.files import read_json, settings_from
from demix.train.slurm import Cluster, Work, identity_of, run

# Seconds that ranks have to end by themselves after one has failed, and after they were told to.
GRACE = 10.0


def launched(
    cluster: str,
    ranks: int,
    threads: int,
    checkpoints: Path,
    *,
    identity: Sequence[object],
    shards: Sequence[Path],
    outputs: Mapping[str, Path],
    steps: int,
) -> bool:
    """Have this process's own command done by `ranks` processes; True when they have done it all.

    `cluster` is the config's section for the stage, as JSON; with `launch: slurm` in it a SLURM job does the work (see
    `demix.train.slurm.Work`), else processes of this machine. False where this process is to do it: for one rank, and
    in a rank that was already started by either, torchrun or a batch system.
    """
    site = settings_from(Cluster, cluster, "--cluster") if cluster else None

    def name() -> str:
        data = {str(path): read_json(path.with_suffix(".json"))["sha256"] for path in shards}
        return identity_of(version("demix"), *identity, data)

    if "WORLD_SIZE" in os.environ:
        if "DEMIX_IDENTITY" in os.environ and os.environ["DEMIX_IDENTITY"] != name():
            raise DemixError("job", "was submitted for other settings or data than are there now", "rerun")
        return False
    if site is not None and site.launch == "slurm":
        run(
            Work(
                command=tuple(sys.argv[1:]),
                identity=name(),
                outputs=outputs,
                ranks=ranks,
                threads=threads,
                checkpoints=checkpoints,
                steps=steps,
            ),
            site,
        )
        return True
    if ranks == 1:
        return False
    if site is not None and site.launch == "inline":
        cure = "use local, or start the ranks yourself (torchrun)"
        raise DemixError("cluster.launch", f"is inline for {ranks} ranks", cure)
    from torch import cuda

    if cuda.is_available() and ranks > cuda.device_count():
        raise DemixError(
            "ranks", f"is {ranks} for {cuda.device_count()} GPUs", f"use at most {cuda.device_count()} here"
        )
    launch(sys.argv[1:], ranks, checkpoints / "logs")
    return True


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
    # torch takes a second to import: not for who asks for help only.
    from torch.distributed import TCPStore

    logs.mkdir(parents=True, exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alive, ours = os.pipe()
    processes: list[subprocess.Popen] = []
    ended: Queue[int] = Queue()
    try:
        # What ranks note when they fail is of this start alone; their logs go on where others ended.
        with TemporaryDirectory(dir=logs, prefix=".failed.") as notes, _passing_on(processes):
            for rank in range(ranks):
                environment = {
                    "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "DEMIX_LAUNCHED": notes,
                    # The store above is everybody's meeting point: no port to guess.
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True",
                }  # fmt: skip
                with open(logs / f"rank-{rank}.log", "ab") as log:
                    process = subprocess.Popen(
                        [sys.executable, "-m", "demix.cli", *command],
                        env=os.environ | {key: str(value) for key, value in environment.items()},
                        stdin=alive,
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
        os.close(ours)
        os.close(alive)


def _wait(rank: int, process: subprocess.Popen, ended: "Queue[int]") -> None:
    process.wait()
    ended.put(rank)


def _watch(processes: list[subprocess.Popen], ended: "Queue[int]", notes: Path, logs: Path) -> None:
    left = set(range(len(processes)))
    while left:
        rank = ended.get()
        left.discard(rank)
        if processes[rank].returncode:
            # The others lose their connection by this; what they then say is not the cause.
            deadline = time.monotonic() + GRACE
            killed = [rank] if processes[rank].returncode < 0 else []
            while left and (wait := deadline - time.monotonic()) > 0:
                try:
                    rank = ended.get(timeout=wait)
                except Empty:
                    break
                left.discard(rank)
                killed += [rank] if processes[rank].returncode < 0 else []
            raise _failure(processes, killed, notes, logs)


def _failure(processes: list[subprocess.Popen], killed: list[int], notes: Path, logs: Path) -> DemixError:
    """What failed first: a rank that was killed, else the one that was the first to note an error."""
    cure = "mend the cause and rerun: training goes on from the last checkpoint"
    noted = []
    for path in notes.glob("rank-*.json"):
        # A rank that was ended while it wrote leaves half a note.
        with suppress(ValueError, KeyError):
            note = json.loads(path.read_text())
            noted.append((note["time"], note["rank"], note["message"]))
    # NCCL's watchdog aborts the ranks that wait for one that failed.
    killed = [rank for rank in killed if not (noted and processes[rank].returncode == -signal.SIGABRT)]
    if killed:
        number = -processes[killed[0]].returncode
        name = signal.Signals(number).name
        subject = f"rank {killed[0]} of {len(processes)}"
        return DemixError(subject, f"was killed by {name}", f"see {_log(logs, killed[0])}; {cure}")
    if not noted:
        rank = next(rank for rank, process in enumerate(processes) if process.returncode)
        cause = f"ended with status {processes[rank].returncode}"
        return DemixError(f"rank {rank} of {len(processes)}", cause, f"see {_log(logs, rank)}; {cure}")
    _, rank, message = min(noted)
    return DemixError(f"rank {rank} of {len(processes)}", message, f"log: {_log(logs, rank)}")


def _log(logs: Path, rank: int) -> str:
    return str(logs / f"rank-{rank}.log") if rank else "the lines above"


@contextmanager
def _passing_on(processes: list[subprocess.Popen]) -> Iterator[None]:
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
    notes = os.environ.get("DEMIX_LAUNCHED")
    if notes is None:
        yield
        return

    def leave() -> None:
        # Nobody writes to this pipe: reading ends when the launcher does.
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()
    with noting(Path(notes), int(os.environ["RANK"])):
        yield


@contextmanager
def noting(folder: Path, rank: int) -> Iterator[None]:
    """Note in `folder` by what error a rank ends, so that the one which failed first can be named."""
    try:
        yield
    except BaseException as error:
        message = str(error).splitlines()[0] if str(error) else repr(error)
        expected = isinstance(error, DemixError)
        note = {
            "rank": rank,
            "node": socket.gethostname(),
            "time": time.time(),
            "message": message,
            "expected": expected,
        }
        # On a full disk the error itself is what matters.
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"rank-{rank}.json").write_text(json.dumps(note))
        raise
