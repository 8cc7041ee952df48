"""Training as a SLURM job of one or more nodes, through submitit: submitted once, found again, watched to its end.

What a job does is decided by files, and where it stands by the controller (squeue, scontrol), never by the accounting,
which may be away. A job leaves its results below its checkpoints, and who waits for it puts them in place.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import psutil

from demix.errors import DemixError
from demix.files import exclusive, read_json, replacing, write_json
from demix.orphans import orphaned

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SECONDS_BETWEEN_LOOKS = 2.0
SECONDS_BETWEEN_LINES = 15.0
# A controller that does not answer for so long is given up; the job itself goes on.
MOST_SILENCE = 6 * 3600.0
# After the first rank has ended: time for the others to say what they saw.
SECONDS_FOR_THE_OTHERS = 30
# What the first rank's log says at each start of the job.
START = "demix: start"
# In these a job has ended, unless it is queued again in a moment. Of whatever else there is it may come to something.
FINAL = {
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY",
    "REVOKED", "LAUNCH_FAILED", "gone",
}  # fmt: skip
# For so many looks one has to be in such a state before it is believed; results may take time to be seen here.
LOOKS, LOOKS_FOR_RESULTS = 6, 30


@dataclass(frozen=True)
class Cluster:
    """What the config's section `cluster` says of one stage; see config/README.md."""

    launch: str
    partition: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    minutes: int
    memory_mb: int
    gpus: int
    ranks_per_node: int
    setup: tuple[str, ...]
    grace_seconds: int
    requeues: int
    retries: int
    on_interrupt: str
    downloads: str

    def nodes(self, ranks: int) -> int:
        """How many nodes so many ranks take; DemixError if they do not fill them."""
        nodes = -(-ranks // self.ranks_per_node)
        if ranks % nodes:
            cause = f"is {self.ranks_per_node}, and {ranks} ranks do not fill {nodes} nodes evenly"
            raise DemixError("cluster.ranks_per_node", cause, "give a divisor of the ranks")
        return nodes


@dataclass(frozen=True)
class Work:
    """A training to be done by a job.

    `command` are the arguments of `demix`, `identity` what tells two trainings apart. `outputs` are the options that
    name results, by the places where they belong. `checkpoints` is the folder that all starts of the training share;
    it must be seen by all nodes. `steps` is how many updates it has, to tell how far it is.
    """

    command: tuple[str, ...]
    identity: str
    outputs: Mapping[str, Path]
    ranks: int
    threads: int
    checkpoints: Path
    steps: int

    @property
    def name(self) -> str:
        """The job's name, by which it is found again: one for each folder of checkpoints."""
        place = hashlib.sha256(str(self.checkpoints.resolve()).encode()).hexdigest()[:12]
        return f"demix-{self.checkpoints.name}-{place}"

    @property
    def finished(self) -> Path:
        """Where the job leaves its results. They stay, as other names of the same files, until another is submitted."""
        return self.checkpoints / f"finished-{self.identity}"

    @property
    def jobs(self) -> Path:
        """Where the files of the jobs and the logs of their ranks are."""
        return self.checkpoints / "jobs"


def identity_of(*parts: object) -> str:
    """A hash that two trainings share when they are the same."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def run(work: Work, cluster: Cluster) -> None:
    """Have `work` done by a SLURM job and put its results in place.

    A job that was submitted before is waited for, one that has finished is collected, and else one is submitted: it
    goes on from the last checkpoint. Raises DemixError that names what failed first. SIGINT and SIGTERM, and the end of
    the process that started this one, leave the job or cancel it as `cluster.on_interrupt` says.
    """
    with _alone(work.checkpoints), _interruptible():
        for left in reversed(range(cluster.retries + 1)):
            if _is_finished(work):
                break
            job = find(work)
            if job is None and _is_finished(work):
                break
            if job is None:
                job = submit(work, cluster)
                _say(work, f"submitted job {job}")
            else:
                _say(work, f"goes on in job {job}, which was submitted before")
            try:
                _wait(work, job)
            except _InterruptedError as interrupted:
                error = _interruption(job, cluster, str(interrupted))
                # An interrupted snakemake shows no logs.
                _say(work, str(error))
                raise error from None
            except _MishapError as mishap:
                if not left:
                    raise
                _say(work, f"{mishap}. Submitting it again, {left} times at most")
        _collect(work)


def submit(work: Work, cluster: Cluster) -> str:
    """Submit the job that does `work`; returns its id."""
    import submitit

    for other in work.checkpoints.glob("finished-*"):
        # Never what this training itself may have left.
        if other != work.finished:
            shutil.rmtree(other, ignore_errors=True)
    executor = _executor(work, cluster)
    # Between the job and the note of it nothing may come.
    waiting = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with submitit.helpers.clean_env():
            job = executor.submit(_Rank(work, cluster.requeues)).job_id
        write_json(work.jobs / "job.json", {"job": job, "name": work.name, "identity": work.identity})
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


def sbatch_text(work: Work, cluster: Cluster) -> str:
    """The file that `submit` would give to sbatch."""
    return _executor(work, cluster)._make_submission_file_text("demix " + " ".join(work.command), "plan")


def find(work: Work) -> str | None:
    """The id of the job that does `work`, if one is pending or running.

    Raises DemixError when there is one that trains something else in the same place.
    """
    command = ["squeue", "--noheader", "--user", str(os.getuid()), "--name", work.name, "--format", "%A %T %k"]
    said = False
    while found := [line.split() for line in _ask(command).splitlines() if line.strip()]:
        # One that is ending is either queued again or gone in a moment, unless its node hangs.
        ending = [job for job, state, *_ in found if state == "COMPLETING"]
        if not ending:
            break
        if not said:
            _say(work, f"job {ending[0]} is ending (COMPLETING): waiting until SLURM has cleared it")
            said = True
        time.sleep(SECONDS_BETWEEN_LOOKS)
    with suppress(DemixError):
        recorded = read_json(work.jobs / "job.json")
        # Some sites change comments.
        found = [
            [job, state, recorded["identity"]] if job == recorded["job"] else [job, state, *rest]
            for job, state, *rest in found
        ]
    for job, _, *identity in found:
        if identity != [work.identity]:
            cause = f"still trains {work.checkpoints.name} with other settings or data"
            raise DemixError(f"job {job}", cause, f"wait for it, or `scancel {job}`, then rerun")
    return found[0][0] if found else None


def _executor(work: Work, cluster: Cluster) -> "submitit.SlurmExecutor":  # noqa: F821
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
        # One of a name at a time, whoever submits it.
        "dependency": "singleton",
        "qos": cluster.qos,
        "account": cluster.account,
        "constraint": cluster.constraint,
    }
    executor.update_parameters(
        job_name=work.name,
        comment=work.identity,
        nodes=nodes,
        ntasks_per_node=per_node,
        cpus_per_task=work.threads,
        time=cluster.minutes,
        signal_delay_s=cluster.grace_seconds,
        setup=list(cluster.setup),
        srun_args=[
            f"--cpus-per-task={work.threads}",
            # All ranks say what they saw before the rest is ended.
            "--kill-on-bad-exit=0",
            f"--wait={SECONDS_FOR_THE_OTHERS}",
        ],
        additional_parameters={"requeue": True} | {key: value for key, value in asked.items() if value},
        **({"partition": cluster.partition} if cluster.partition else {}),
        **({"gpus_per_node": per_node} if cluster.gpus else {}),
    )
    return executor


class _Rank:
    """What each task of the job runs: the command of `demix`, as one rank of a world.

    submitit pickles it, and calls `checkpoint` for a signal that comes before training has begun.
    """

    def __init__(self, work: Work, requeues: int):
        self.identity, self.requeues = work.identity, requeues
        self.finished, self.jobs = work.finished.resolve(), work.jobs.resolve()
        self.outputs = {option: str(self.finished / option.strip("-")) for option in work.outputs}
        self.command, self.folder = work.command, os.getcwd()

    def __call__(self) -> None:
        import submitit

        from demix import cli
        from demix.train.launch import noting
        from demix.train.loop import StoppedError

        os.chdir(self.folder)
        environment = submitit.JobEnvironment()
        job, restarts = environment.raw_job_id, int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        rank, done = environment.global_rank, self.finished / "done.json"
        if done.exists():
            # Told to stop after all was done, and queued again for it.
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
            os.environ |= {"DEMIX_DONE": str(done), "DEMIX_IDENTITY": self.identity}
            try:
                cli.app([*self.command, *places], standalone_mode=False)
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

    def checkpoint(self, *_: object) -> "submitit.helpers.DelayedSubmission":  # noqa: F821
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
    state = _show(job).get("JobState")
    if state == "RUNNING":
        log.info("job %s: queueing it again", job)
        _ask(["scontrol", "requeue", job])
    else:
        log.info("job %s is %s: not queued again from here", job, state)


def _wait(work: Work, job: str) -> None:
    """Until the job has left the queue, showing how far it is. Raises DemixError when it left no results."""
    last_line, said, final = 0.0, "", 0
    while True:
        shown = _show(job)
        state = shown.get("JobState", "gone")
        final = final + 1 if state in FINAL else 0
        if final > 1 and _is_finished(work):
            _say(work, f"job {job} has finished")
            return
        if final == (LOOKS_FOR_RESULTS if state in ("COMPLETED", "gone") else LOOKS):
            raise _failure(work, job, state, int(shown.get("Restarts", "0")))
        line = _line(work, job, shown)
        now = time.monotonic()
        if line != said and (now - last_line > SECONDS_BETWEEN_LINES or line.split("  ")[0] != said.split("  ")[0]):
            _say(work, line)
            said, last_line = line, now
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _line(work: Work, job: str, shown: Mapping[str, str]) -> str:
    """`job 12 running on n[1-2], queued again 2 times  step 40/488  loss 5.321  2100 tokens/s  3:20 left`"""
    state, restarts = shown.get("JobState", "unknown").lower(), int(shown.get("Restarts", "0"))
    where = f" on {shown['NodeList']}" if shown.get("NodeList", "(null)") not in ("(null)", "") else ""
    why = f" ({shown['Reason']})" if state == "pending" and shown.get("Reason", "None") != "None" else ""
    again = f", queued again {restarts} times" if restarts > 1 else ", queued again once" if restarts else ""
    head = f"job {job} {state}{why}{where}{again}"
    rows: list[dict] = []
    if state == "running":
        # Not those of another training in this place.
        with suppress(ValueError, KeyError, OSError):
            rows = last_rows(work.checkpoints, datetime.fromisoformat(shown["StartTime"]).timestamp())
    steps = [row for row in rows if "loss" in row]
    if not steps:
        return head
    row, rate = steps[-1], sum(row["tokens_per_second"] for row in steps) / len(steps)
    tokens = row["tokens"] / row["step"]
    left = timedelta(seconds=round((work.steps - row["step"]) * tokens / rate))
    return f"{head}  step {row['step']}/{work.steps}  loss {row['loss']:.3f}  {rate:.0f} tokens/s  {left} left"


def last_rows(checkpoints: Path, since: float, most: int = 20) -> list[dict]:
    """The last rows of the metrics file that a training has written to since a time, seconds since 1970.

    Raises OSError where it has just been removed, as it is at the end.
    """
    written = {path: path.stat().st_mtime for path in checkpoints.glob("*/metrics.jsonl")}
    files = [path for path, changed in written.items() if changed >= since]
    if not files:
        return []
    with open(max(files, key=written.__getitem__), "rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - 4096 * most))
        lines = stream.read().split(b"\n")
    rows = []
    for line in lines[1:-1][-most:]:
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


class _MishapError(DemixError):
    """A job ended by something that may not happen again: a killed rank, an error that is none of demix's own."""


def _failure(work: Work, job: str, state: str, restarts: int) -> DemixError:
    """What failed first: a rank that was killed, else the first that noted an error, else what SLURM says."""
    cure = "mend the cause and rerun: training goes on from the last checkpoint"
    logs = work.jobs
    if state.startswith("CANCELLED"):
        return DemixError(f"job {job}", "was cancelled", "rerun: training goes on from the last checkpoint")
    if state == "TIMEOUT":
        cure = "raise cluster.grace_seconds, then rerun: training goes on from the last checkpoint"
        return _MishapError(f"job {job}", "reached its time limit before its state was saved", cure)
    noted = {}
    for path in (logs / f"{job}.{restarts}.notes").glob("rank-*.json"):
        with suppress(ValueError, KeyError):
            note = json.loads(path.read_text())
            noted[note["rank"]] = note
    killed = _killed(logs / f"{job}_0_log.err")
    # The watchdog of NCCL aborts the ranks that wait for one that failed.
    for rank, node, reason in killed:
        if rank not in noted and not (noted and reason.startswith("Abort")):
            where = f"rank {rank} of {work.ranks} on {node}"
            return _MishapError(where, f"ended first ({reason})", f"see {logs / f'{job}_{rank}_log.err'}; {cure}")
    if noted:
        first = min(noted.values(), key=lambda note: note["time"])
        where = f"rank {first['rank']} of {work.ranks} on {first['node']}"
        kind = DemixError if first["expected"] else _MishapError
        return kind(where, first["message"], f"log: {logs / '{}_{}_log.err'.format(job, first['rank'])}")
    return _MishapError(f"job {job}", f"ended as {state} without results", f"see {logs}/{job}_*_log.err; {cure}")


def _killed(path: Path) -> list[tuple[int, str, str]]:
    """Ranks that a signal ended, with their nodes and srun's words for it, in the order in which srun saw it.

    Only of the last start of the job, since they share a log, and before srun itself began to end ranks.
    """
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    found: list[tuple[int, str, str]] = []
    ended = False
    for line in lines:
        if line.startswith(START):
            found, ended = [], False
        ended = ended or any(words in line for words in ("First task exited", "Terminating StepId", "CANCELLED AT"))
        match = re.match(r"srun: error: (\S+): tasks? ([\d,-]+): (.*)", line)
        if match and not ended and "exit code" not in match[3]:
            found += [(rank, match[1], match[3]) for rank in _numbers(match[2])]
    return found


def _numbers(text: str) -> Iterator[int]:
    """1,3-5 as 1, 3, 4, 5."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _is_finished(work: Work) -> bool:
    """Whether all files that the job left are here."""
    with suppress(DemixError, OSError, KeyError, AttributeError):
        # Of a folder on another machine this has the listing looked at again.
        os.listdir(work.finished)
        sizes = read_json(work.finished / "done.json")["files"]
        return all((work.finished / name).stat().st_size == size for name, size in sizes.items())
    return False


def _collect(work: Work) -> None:
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
    """A signal came, or nobody waits any more."""


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
    # nohup and `&` have some of them ignored, and mean it.
    numbers = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    left = threading.Event()

    def interrupt(number: int, _: object) -> None:
        # Once: what is done about it must not be interrupted in its turn.
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        gone = left.is_set() or orphaned.is_set()
        raise _InterruptedError("who waited for it has ended" if gone else signal.Signals(number).name)

    def watch(parent: psutil.Process, ppid: int) -> None:
        # A shell between this and a snakemake that is killed stays, with another parent.
        while parent.is_running() and parent.ppid() == ppid and not done.wait(1.0):
            pass
        if not done.is_set():
            left.set()
            os.kill(os.getpid(), signal.SIGTERM)

    done = threading.Event()
    before = {number: signal.signal(number, interrupt) for number in numbers}
    if len(numbers) == len(SIGNALS) and (parent := psutil.Process().parent()) is not None:
        threading.Thread(target=watch, args=(parent, parent.ppid()), daemon=True).start()
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
    """Only one process waits for a training: of one whose snakemake was killed it takes moments to notice."""
    with exclusive(checkpoints / "waiting.lock", "waits for this training", patience=30.0):
        yield


def _show(job: str) -> dict[str, str]:
    """What the controller knows of a job, by its own names; nothing when it has forgotten it."""
    try:
        text = _ask(["scontrol", "show", "job", "--oneliner", job])
    except LookupError:
        return {}
    return dict(pair.split("=", 1) for pair in text.split() if "=" in pair)


def _ask(command: Sequence[str]) -> str:
    """What a command of SLURM prints, asked again while the controller is away; LookupError if there is no such job."""
    silent_since: float | None = None
    while True:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode == 0:
                return done.stdout
            message = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"status {done.returncode}"
        except subprocess.TimeoutExpired:
            message = "no answer in 120 s"
        except FileNotFoundError:
            raise DemixError(
                command[0], "is not installed here", "log in to the cluster, or use cluster.launch local"
            ) from None
        if "Invalid job id" in message:
            raise LookupError(message)
        if silent_since is None:
            silent_since = time.monotonic()
            log.warning("%s: %s; asking again until it answers", command[0], message)
        if time.monotonic() - silent_since > MOST_SILENCE:
            raise DemixError(command[0], f"has not answered for hours ({message})", "rerun when SLURM is back")
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _say(work: Work, line: str) -> None:
    """To the terminal, which shows the standard output of a job of snakemake; errors go to its log."""
    try:
        print(f"{work.checkpoints.name}: {line}", flush=True)
    except OSError:
        # The terminal is gone; what is left in the buffer must not fail at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
