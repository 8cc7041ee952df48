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

import numpy as np
import torch
from common import Wait, arguments, in_turns, row, show
from peers import hugging_face
from train import DEVICE, Setting

from demix.config.architecture import Architecture
from demix.model.gpt import GPT
from demix.model.scoring import log_probabilities
from demix.plan.flops import scoring_flops

# Blocks of 256 tokens keep a turn short at the larger size too; the bound printed is that of such blocks.
SETTINGS = (
    (Setting("3×128", Architecture(layers=3, width=128, heads=4, context=256), 4096, 8), 5),
    (Setting("12×768", Architecture(layers=12, width=768, heads=12, context=256), 50257, 1), 3),
)
EXPERTS = (1, 8, 16)


def rows_of(setting: Setting, turns: int, threads: int) -> list[dict]:
    variants = {n: (ours, (setting, n)) for n in EXPERTS} | {"hf": (theirs, (setting,))}
    found, rows, unit = in_turns(variants, turns, threads), [], "CPU s" if threads == 1 else "s"
    dense, peer = found[1], found["hf"]
    for n in EXPERTS:
        seconds, memory = found[n].seconds, found[n].memory
        name = f"{setting.size}, {n} expert{'s' if n > 1 else ''} at once"
        if n > 1:
            bound, one = (scoring_flops(setting.architecture, setting.vocabulary, experts) for experts in (n, 1))
            share = seconds / (n * dense.seconds)
            rows.append(row(f"{name} / {n} dense passes", seconds, n * dense.seconds, unit))
            rows.append(row(f"{name}: share of dense passes / FLOP bound", share, bound / (n * one), "share"))
            rows.append(row(f"{name} / a dense pass", memory, dense.memory, "MB"))
        rows.append(row(f"{name} / {n} of Hugging Face", seconds, n * peer.seconds, unit))
        rows.append(row(f"{name} / one of Hugging Face", memory, peer.memory, "MB"))
    return rows


def ids_of(setting: Setting) -> np.ndarray:
    shape = (2, setting.sequences, setting.architecture.context)
    return np.random.default_rng(0).integers(0, setting.vocabulary, shape)


def ours(setting: Setting, experts: int, wait: Wait) -> None:
    names = tuple(f"expert{number}" for number in range(experts))
    model = GPT(setting.architecture, setting.vocabulary, names).initialise(0).to(DEVICE)
    score_ours(model, ids_of(setting), wait)


def score_ours(model: GPT, ids: np.ndarray, wait: Wait, dtype: torch.dtype = torch.float32) -> None:
    while True:
        wait()
        log_probabilities(model, *ids, np.ones(ids[0].shape, bool), dtype)


@torch.no_grad()
def theirs(setting: Setting, wait: Wait) -> None:
    model = hugging_face(setting.architecture, setting.vocabulary).to(DEVICE).eval()
    inputs, targets = (torch.from_numpy(ids).to(DEVICE) for ids in ids_of(setting))
    while True:
        wait()
        logp = torch.log_softmax(model(inputs).logits, -1)
        logp.gather(-1, targets[..., None]).double().cpu().numpy()


if __name__ == "__main__":
    given = arguments(__doc__, threads=1)
    show([row for setting, turns in SETTINGS for row in rows_of(setting, turns, given.threads)], given.json)
