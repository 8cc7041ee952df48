"""What the benchmarks share: arguments, rows and their table, a process of its own, and variants that take turns."""

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "resources" / "sample"


def arguments(doc: str, **options: Any) -> argparse.Namespace:
    """`--json` and `options`, each with its default; a default of False makes a flag."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="a file for the rows")
    for name, default in options.items():
        how = {"action": "store_true"} if default is False else {"type": type(default), "default": default}
        parser.add_argument(f"--{name}", help=f"default: {default}", **how)
    # What a process of its own has to do (`alone`).
    parser.add_argument("--alone", type=json.loads, default=[], help=argparse.SUPPRESS)
    return parser.parse_args()


def row(name: str, ours: float | None, peer: float | None, unit: str) -> dict:
    """A row of the table; ratio is ours over the peer's."""
    return {"name": name, "ours": ours, "peer": peer, "unit": unit, "ratio": ours / peer if ours and peer else None}


def show(rows: list[dict], path: Path | None) -> None:
    """Print the rows as a table and, given a path, write them there as JSON."""
    width = max(len(row["name"]) for row in rows)
    print(f"{'':{width}}  {'ours':>10}  {'peer':>10}  {'ratio':>7}  unit")
    for row in rows:
        cells = [f"{'-' if row[key] is None else format(row[key], '.3f')}" for key in ("ours", "peer", "ratio")]
        print(f"{row['name']:{width}}  {cells[0]:>10}  {cells[1]:>10}  {cells[2]:>7}  {row['unit']}")
    if path:
        path.write_text(json.dumps(rows, indent=2) + "\n")


def peak() -> float:
    """The peak memory of this process in MB. `getrusage` begins with that of the process that started this one."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def alone(script: str, *work: Any, **how: Any) -> Any:
    """What `script --alone WORK` prints last, as JSON, in a process of its own."""
    command = [sys.executable, script, "--alone", json.dumps(work)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **how)
    return json.loads(done.stdout.splitlines()[-1])


class DoneError(Exception):
    """No more steps are wanted."""


@dataclass(frozen=True)
class Measured:
    """Median seconds of a step, and the peak memory above that of the imports in MB."""

    seconds: float
    memory: float


# A variant takes steps without end, and calls this before each of them.
Wait = Callable[[], None]


def in_turns(
    variants: Mapping[Any, tuple[Callable[..., None], Sequence[Any]]], turns: int, threads: int, warm: int = 1
) -> dict[Any, Measured]:
    """Variants, each a function of its arguments and `Wait`, in processes of their own: a step each, in turn.

    So on a shared machine ratios hold. One thread on a CPU counts CPU time, which other work changes least; of several
    it would hide that one waits for another.
    """
    context, ends, processes = multiprocessing.get_context("spawn"), {}, []
    for name, (run, given) in variants.items():
        ends[name], other = context.Pipe()
        processes.append(context.Process(target=_serve, args=(other, threads, run, given)))
        processes[-1].start()
        other.close()
        # Warm before the next one starts, else they would compile at once.
        for _ in range(warm):
            _step(ends[name])
    seconds: dict = {name: [] for name in ends}
    for turn in range(turns):
        print(f"turn {turn + 1} of {turns}", file=sys.stderr)
        for name, end in ends.items():
            seconds[name].append(_step(end))
    memory = {}
    for name, end in ends.items():
        end.send(False)
        memory[name] = end.recv()
    for process in processes:
        process.join()
    return {name: Measured(median(seconds[name]), memory[name]) for name in ends}


def _step(end: Connection) -> float:
    end.send(True)
    return end.recv()


def _serve(end: Connection, threads: int, run: Callable[..., None], given: Sequence[Any]) -> None:
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(threads)
    cuda, begun = torch.cuda.is_available(), 0.0
    clock = time.process_time if threads == 1 and not cuda else time.perf_counter
    before = peak()

    def wait() -> None:
        nonlocal begun
        if cuda:
            torch.cuda.synchronize()
        if begun:
            end.send(clock() - begun)
        if not end.recv():
            raise DoneError
        begun = clock()

    try:
        run(*given, wait)
    except DoneError:
        most = peak() - before
        end.send(torch.cuda.max_memory_allocated() / 2**20 if cuda else most)
