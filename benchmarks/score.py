"""Scoring under n experts in one batched pass, against n dense passes of ours and of Hugging Face's GPT-2.

    python benchmarks/score.py [--threads 1] [--json rows.json]

Ours is `demix.model.scoring.log_probabilities`, from token ids to a log-probability a token and expert. Each variant
is a process of its own; they take turns, a pass each, and medians over the turns count. A dense pass is measured alone
and its time taken n times: n models of the same size take so long one after the other, and the memory of one.

The bound is the share of n dense passes' FLOPs that one batched pass still has (`demix.plan.flops.scoring_flops`):
matrix products of attention, feedforwards and logits; embedding and first attention are done once, not n times.
Elementwise work (norms, GELU, softmax) is not counted. Ratios to the bound are of times: measured share / bound.

Seconds are CPU time with one thread, which other work on the machine changes least, and wall time otherwise. Memory is
the peak above that of the imports. Needs transformers. About three minutes of one core.
"""

import argparse
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import torch
from peers import hugging_face
from tables import show
from train import DEVICE, Setting

from demix.config.architecture import Architecture
from demix.model.gpt import GPT
from demix.model.scoring import log_probabilities
from demix.plan.flops import scoring_flops

# Blocks of 256 tokens keep a turn short at the larger size too; the bound printed is that of such blocks.
SETTINGS = (
    (Setting("3×128", Architecture(3, 128, 4, 256), 4096, 8, "fp32", False), 5),
    (Setting("12×768", Architecture(12, 768, 12, 256), 50257, 1, "fp32", False), 3),
)
EXPERTS = (1, 8, 16)


def main(threads: int, path: Path | None) -> None:
    rows = []
    for setting, turns in SETTINGS:
        seconds, memory = measure(setting, turns, threads)
        dense, theirs = ("ours", 1), ("hf", 1)
        for (whose, n), taken in seconds.items():
            print(f"{setting.size}, {whose} of {n}: {taken:.3f} s, {memory[whose, n]:.0f} MB", file=sys.stderr)
        unit = "CPU s" if threads == 1 and DEVICE.type == "cpu" else "s"

        def row(name: str, ours: float, peer: float, unit: str) -> None:
            rows.append({"name": name, "ours": ours, "peer": peer, "unit": unit, "ratio": ours / peer})

        for n in EXPERTS:
            batched = ("ours", n)
            name = f"{setting.size}, {n} expert{'s' if n > 1 else ''} at once"
            if n > 1:
                bound = flops(setting, n) / (n * flops(setting, 1))
                share = seconds[batched] / (n * seconds[dense])
                row(f"{name} / {n} dense passes", seconds[batched], n * seconds[dense], unit)
                row(f"{name}: share of dense passes / FLOP bound", share, bound, "share")
                row(f"{name} / a dense pass", memory[batched], memory[dense], "MB")
            row(f"{name} / {n} of Hugging Face", seconds[batched], n * seconds[theirs], unit)
            row(f"{name} / one of Hugging Face", memory[batched], memory[theirs], "MB")
    show(rows, path)


def flops(setting: Setting, experts: int) -> float:
    """Of the matrix products that score a token of a full block under so many experts."""
    return scoring_flops(setting.architecture, setting.vocabulary, experts)


def measure(setting: Setting, turns: int, threads: int) -> tuple[dict, dict]:
    """Median seconds of a pass and peak memory in MB of each variant: whose model, and how many experts."""
    variants = [*(("ours", n) for n in EXPERTS), ("hf", 1)]
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for variant in variants:
        pipes[variant], other = context.Pipe()
        context.Process(target=serve, args=(other, *variant, setting, threads), daemon=True).start()
        other.close()
        # Warm before the next one starts.
        pipes[variant].recv()
    times: dict = {variant: [] for variant in variants}
    for turn in range(turns):
        print(f"{setting.size}: turn {turn + 1} of {turns}", file=sys.stderr)
        for variant, pipe in pipes.items():
            pipe.send("go")
            times[variant].append(pipe.recv())
    memory = {}
    for variant, pipe in pipes.items():
        pipe.send(None)
        memory[variant] = pipe.recv()
    return {variant: median(seconds) for variant, seconds in times.items()}, memory


def serve(connection: Connection, whose: str, experts: int, setting: Setting, threads: int) -> None:
    """Be a variant's process: a pass for each message but the last, its seconds as the answer; then its memory."""
    torch.set_num_threads(threads)
    if whose == "hf":
        import transformers  # noqa: F401

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clock = time.process_time if threads == 1 and DEVICE.type == "cpu" else time.perf_counter
    run = (_hugging_face if whose == "hf" else _ours)(setting, experts)
    run()
    connection.send("warm")
    while connection.recv():
        begun = clock()
        run()
        connection.send(clock() - begun)
    most = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    connection.send(torch.cuda.max_memory_allocated() / 2**20 if DEVICE.type == "cuda" else most)


def _ids(setting: Setting) -> np.ndarray:
    shape = (2, setting.sequences, setting.architecture.context)
    return np.random.default_rng(0).integers(0, setting.vocabulary, shape)


def _ours(setting: Setting, experts: int) -> Callable[[], np.ndarray]:
    names = tuple(f"expert{number}" for number in range(experts))
    model = GPT(setting.architecture, setting.vocabulary, names).initialise(0).to(DEVICE)
    inputs, targets = _ids(setting)
    mask = np.ones(inputs.shape, bool)
    return lambda: log_probabilities(model, inputs, targets, mask)


def _hugging_face(setting: Setting, _: int) -> Callable[[], np.ndarray]:
    model = hugging_face(setting.architecture, setting.vocabulary).to(DEVICE).eval()
    inputs, targets = (torch.from_numpy(ids).to(DEVICE) for ids in _ids(setting))

    @torch.no_grad()
    def run() -> np.ndarray:
        logp = torch.log_softmax(model(inputs).logits, -1)
        return logp.gather(-1, targets[..., None]).double().cpu().numpy()

    return run


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    main(given.threads, given.json)
