"""Waiting for many SLURM jobs: submissions, queries to the controller, file operations, CPU time and memory.

    NODE_CPUS=128 bash tests/slurm/up.sh    # a SLURM of this machine, which tests/slurm/down.sh ends
    python benchmarks/cluster_jobs.py [--json rows.json] [--jobs 16,64,128] [--seconds 30] [--folder /tmp]

So many trainings are submitted at once and waited for, each by `demix.launch.slurm.run` in a process of its own. The
jobs are real, but in place of a rank each runs a shell script: it writes a row of metrics, sleeps for `--seconds`, and
puts results in place that were written before. As soon as all jobs are submitted, all waiting processes get SIGTERM and
others begin, which find the jobs again and collect the results. Jobs that have no CPU wait in the queue.

Queries are the starts of squeue and scontrol; the peer of their rate is a query every two seconds from each process.
Files are those of the run: stat is os.stat's calls, the rest are events of Python's audit. CPU is that of a waiting
process with the commands that it starts; memory is what a process has of its own, forked from one that has imported all
(a process of `demix train` has more: docs/cluster.md). Of other numbers the peer is that of the fewest jobs. About
two minutes on two cores.
"""

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tables import show

from demix.errors import DemixError
from demix.files import write_json, write_json_lines
from demix.launch.controller import SECONDS_BETWEEN_POLLS
from demix.launch.job import Cluster, TrainingJob
from demix.launch.slurm import run

FINGERPRINT = "0" * 16
# submitit gives the folder `jobs` as the fourth argument.
PROGRAM = """#!/bin/sh
top=${{4%/jobs}}
mkdir -p "$top/now"
echo '{{"step": 1, "loss": 9.0, "tokens": 1024, "tokens_per_second": 1000.0}}' > "$top/now/metrics.jsonl"
sleep {seconds}
[ ! -e "$top/prepared" ] || mv "$top/prepared" "$top/finished-{fingerprint}"
"""
CHANGES = {"os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "shutil.rmtree"}
LISTINGS = {"os.listdir", "os.scandir"}


def training(folder: Path, number: int) -> TrainingJob:
    """The training of a number, with results that its job has only to rename."""
    name = f"model{number:04}"
    outputs = {"--output": folder / "models" / name, "--metrics": folder / "metrics" / f"{name}.jsonl"}
    return TrainingJob(("train",), FINGERPRINT, outputs, 1, 1, folder / "checkpoints" / name, 100)


def prepare(job: TrainingJob) -> None:
    """Write the results of a training, where its job finds them."""
    done, weights = job.finished / "done.json", job.finished / "output" / "weights"
    write_json(job.finished / "output" / "model.json", {})
    write_json_lines(job.finished / "metrics", [])
    weights.write_bytes(bytes(1024))
    files = [path for path in job.finished.rglob("*") if path.is_file()]
    write_json(done, {"files": {str(path.relative_to(job.finished)): path.stat().st_size for path in files}})
    job.finished.rename(job.checkpoints / "prepared")


def counted(folder: Path, counts: Counter, queries: list) -> None:
    """Count in this process, from now on, what it asks of the file system below `folder` and of SLURM."""
    place, plain = str(folder), os.stat

    def stat(path: object, *more: object, **named: object) -> os.stat_result:
        counts["stat"] += str(path).startswith(place)
        return plain(path, *more, **named)

    def heard(event: str, arguments: tuple) -> None:
        if event == "subprocess.Popen":
            queries.append((time.time(), Path(arguments[1][0]).name))
        elif event in CHANGES | LISTINGS | {"open"} and str(arguments[0]).startswith(place):
            writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            kind = "open to write" if writes else "open to read" if event == "open" else "list"
            counts["change" if event in CHANGES else kind] += 1

    os.stat = stat
    sys.addaudithook(heard)


def waiting(folder: Path, number: int, which: int) -> None:
    """Wait for a training in this process, and write what that took."""
    counts, queries, before = Counter(), [], resource.getrusage(resource.RUSAGE_SELF)
    with open(folder / "lines" / f"{number}.{which}", "w") as lines:
        os.dup2(lines.fileno(), sys.stdout.fileno())
    counted(folder, counts, queries)
    ended = "collected"
    try:
        run(training(folder, number), Cluster(launch="slurm", minutes=30, memory_mb=1), main)
    except DemixError as error:
        ended = str(error)
    after, commands = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    own = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = {"own": own, "commands": commands.ru_utime + commands.ru_stime, "kB": private()}
    text = json.dumps(found | {"which": which, "ended": ended, "counts": counts, "queries": queries})
    (folder / "stats" / f"{number}.{which}.json").write_text(text)


def private() -> int:
    """The kB that this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def controller_seconds() -> float:
    """CPU seconds of SLURM's controller, which runs on this machine."""
    pid = subprocess.run(["pgrep", "-x", "-o", "slurmctld"], capture_output=True, text=True, check=True).stdout.strip()
    used = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")


def simulated(folder: Path, count: int, seconds: int) -> dict:
    """What so many trainings took in all."""
    for name in ("lines", "stats"):
        (folder / name).mkdir()
    program = folder / "program"
    program.write_text(PROGRAM.format(seconds=seconds, fingerprint=FINGERPRINT))
    program.chmod(0o755)
    sys.executable = str(program)
    jobs = [training(folder, number) for number in range(count)]
    for job in jobs:
        prepare(job)
    begin, used, fork = time.time(), controller_seconds(), multiprocessing.get_context("fork")
    for which in (0, 1):
        processes = [fork.Process(target=waiting, args=(folder, number, which)) for number in range(count)]
        for process in processes:
            process.start()
        if which == 0:
            while not all((job.jobs / "job.json").exists() for job in jobs):
                time.sleep(0.5)
            submitted = time.time() - begin
            for process in processes:
                process.terminate()
        for process in processes:
            process.join()
    found = [json.loads(path.read_text()) for path in sorted((folder / "stats").glob("*.json"))]
    again = sum("goes on in job" in path.read_text() for path in (folder / "lines").glob("*.1"))
    assert len(found) == 2 * count, "a waiting process has failed"
    ends = Counter(one["ended"] for one in found if one["which"])
    assert ends == {"collected": count}, ends
    return {
        "found": found, "again": again, "submitted": submitted, "wall": time.time() - begin,
        "controller": controller_seconds() - used,
    }  # fmt: skip


def numbers(count: int, measured: dict) -> dict[str, tuple[float, str]]:
    """The numbers of so many jobs, with their units."""
    found = measured["found"]
    queries = sorted(when for one in found for when, command in one["queries"] if command != "sbatch")
    commands = Counter(command for one in found for _, command in one["queries"])
    files = sum((Counter(one["counts"]) for one in found), Counter())
    busiest = max(sum(begin <= when < begin + 10 for when in queries) for begin in queries[:: max(1, count // 8)]) / 10
    return {
        "submitted in": (measured["submitted"], "s"),
        "collected in": (measured["wall"], "s"),
        "found again": (measured["again"] / count, "a job"),
        **{command: (number / count, "a job") for command, number in sorted(commands.items())},
        "queries": (len(queries) / measured["wall"], "a second"),
        "queries in the busiest 10 s": (busiest, "a second"),
        **{f"files: {kind}": (files[kind] / count, "a job") for kind in sorted(files)},
        "CPU of waiting": (sum(one["own"] for one in found) / count, "s a job"),
        "CPU of its commands": (sum(one["commands"] for one in found) / count, "s a job"),
        "CPU of the controller": (measured["controller"] / count, "s a job"),
        "memory": (max(one["kB"] for one in found) / 1024, "MB a job"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jobs", default="16,64,128")
    parser.add_argument("--seconds", type=int, default=30, help="how long each job sleeps")
    parser.add_argument("--folder", type=Path, help="where the temporary folder goes")
    given = parser.parse_args()
    there = shutil.which("sbatch") and subprocess.run(["scontrol", "ping"], capture_output=True, check=False)
    if not there or there.returncode:
        sys.exit("needs a SLURM on this machine: as root, `NODE_CPUS=128 bash tests/slurm/up.sh` brings one up")
    # What all processes have in common is imported before they begin.
    import filelock  # noqa: F401
    import submitit  # noqa: F401

    rows, least = [], {}
    for count in map(int, given.jobs.split(",")):
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            measured = numbers(count, simulated(Path(folder), count, given.seconds))
        least = least or measured
        for name, (value, unit) in measured.items():
            peer = count / SECONDS_BETWEEN_POLLS if name.startswith("queries") else least.get(name, (None,))[0]
            ratio = value / peer if peer else None
            rows.append({"name": f"{count} jobs: {name}", "ours": value, "peer": peer, "unit": unit, "ratio": ratio})
        print(f"{count} jobs: {measured}", file=sys.stderr)
    show(rows, given.json)


if __name__ == "__main__":
    main()
