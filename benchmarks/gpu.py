"""What share of a GPU's peak training and scoring reach, and the memory they take beside that of `demix plan`.

    python benchmarks/gpu.py [--quick] [--json rows.json]

Models have the paper's sizes of 125M and 1.3B parameters, GPT-2's vocabulary and blocks of 1,024, activations in bf16.
A step is that of `demix.train.loop.train`, a pass that of `demix.model.scoring.log_probabilities`. DEMix sees as many
tokens a step as dense, an equal part each expert. FLOPs are those of matrix products, backward twice forward
(`demix.plan.flops.scoring_flops`). Beside FLOP/s stand the data sheet's peak of bf16 ("peak") and what a product of two
8,192 x 8,192 matrices reaches in the same run ("matmul"); beside memory the plan's state (AdamW) and activations of a
training, and the weights alone of a scoring ("plan"). `--quick` compiles nothing and takes the smaller
size alone. About a minute of an H200.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from common import DoneError, Wait, arguments, row, show
from score import score_ours
from torch import nn
from train import PRODUCTS, ROUTED, SIDE, multiply, train_ours

from demix.config.architecture import PRESETS, Architecture
from demix.model.gpt import GPT
from demix.plan.flops import activation_bytes, scoring_flops, training_state_bytes

VOCABULARY, CONTEXT = 50257, 1024
# TFLOP/s of dense bf16 by the data sheets.
PEAKS = {"A100": 312, "H100": 989, "H200": 989}


@dataclass(frozen=True)
class Case:
    """A training of `experts` experts, or one pass that scores with them; `sequences` of all experts together."""

    what: str
    size: str
    experts: int
    sequences: int
    compile: bool = False
    routed: str | None = None
    muon: bool = False

    @property
    def name(self) -> str:
        kind = self.routed or ("dense" if self.experts == 1 else f"{self.experts} experts")
        more = [("Muon", self.muon), ("compiled", self.compile)]
        return ", ".join([f"{self.what} {self.size}", kind, *(word for word, on in more if on)])

    @property
    def architecture(self) -> Architecture:
        preset = PRESETS[{"125M": "gpt3-small", "1.3B": "gpt3-xl"}[self.size]]
        return preset.replace(context=CONTEXT, routed=ROUTED[self.routed] if self.routed else None)

    @property
    def flops(self) -> float:
        """Of a step, whose backward counts twice, or of a pass, in which every expert reads every token."""
        tokens = self.sequences * CONTEXT
        if self.what == "score":
            return tokens * scoring_flops(self.architecture, VOCABULARY, self.experts)
        return 3.0 * tokens * scoring_flops(self.architecture, VOCABULARY, 1)


def cases(quick: bool) -> Iterator[Case]:
    """All cases. Those that compile, which takes longest, come last."""
    for experts in (1, 8):
        yield Case("train", "125M", experts, 32)
    yield Case("train", "125M", 1, 32, routed="top-2")
    yield Case("train", "125M", 1, 32, muon=True)
    for experts in (1, 8):
        yield Case("score", "125M", experts, 64)
    if quick:
        return
    for experts in (1, 2):
        yield Case("train", "1.3B", experts, 16)
    for experts in (1, 8):
        yield Case("score", "1.3B", experts, 32)
    for size, experts, sequences in (("125M", 1, 32), ("125M", 8, 32), ("1.3B", 1, 16)):
        yield Case("train", size, experts, sequences, compile=True)


def model_of(case: Case) -> GPT:
    """The model, with weights that the GPU draws: those of a training come from the CPU, which takes longer."""
    names = tuple(f"expert{number}" for number in range(case.experts))
    with torch.device("cuda"):
        model = GPT(case.architecture, VOCABULARY, names)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
    return model


def training(case: Case) -> tuple[list[float], int]:
    """Seconds of each timed step, and the bytes that the plan gives such a training."""
    model = model_of(case)
    state = training_state_bytes(sum(p.numel() for p in model.parameters()))
    activations = activation_bytes(case.architecture, VOCABULARY, case.sequences, 2, checkpointing=False)
    how = {"precision": "bf16", "compile": case.compile}
    times = timed(lambda wait: train_ours(model, case.sequences, wait, muon=case.muon, **how), 3, 6)
    return times, state + activations


def scoring(case: Case) -> tuple[list[float], int]:
    """Seconds of each timed pass, and the bytes of the weights."""
    model = model_of(case)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, case.sequences, CONTEXT))
    times = timed(lambda wait: score_ours(model, ids, wait, torch.bfloat16), 1, 3)
    return times, 4 * sum(p.numel() for p in model.parameters())


def timed(run: Callable[[Wait], None], warm: int, count: int) -> list[float]:
    """Seconds of each of `count` steps after the first `warm`."""
    begun: list[float] = []

    def wait() -> None:
        torch.cuda.synchronize()
        begun.append(time.perf_counter())
        if len(begun) > warm + count:
            raise DoneError

    with suppress(DoneError):
        run(wait)
    return [float(seconds) for seconds in np.diff(begun)[warm:]]


def matmul() -> float:
    """TFLOP/s of products of two square matrices in bf16, random data."""
    return PRODUCTS * 2 * SIDE**3 / median(timed(lambda wait: multiply("bf16", wait), 1, 3)) / 1e12


def rows_of(case: Case, product: float, peak: float | None) -> list[dict]:
    torch.cuda.reset_peak_memory_stats()
    seconds, planned = (training if case.what == "train" else scoring)(case)
    achieved = case.flops / median(seconds) / 1e12
    gc.collect()
    taken = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    return [
        row(case.name, case.sequences * CONTEXT / median(seconds), None, "tokens/s"),
        row(f"{case.name} / peak", achieved, peak, "TFLOP/s"),
        row(f"{case.name} / matmul", achieved, product, "TFLOP/s"),
        row(f"{case.name} / plan", taken / 1e9, planned / 1e9, "GB"),
    ]


if __name__ == "__main__":
    given = arguments(__doc__, quick=False)
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    card, product, rows = torch.cuda.get_device_name(), matmul(), []
    peak = next((tflops for name, tflops in PEAKS.items() if name in card), None)
    print(f"{card}, torch {torch.__version__}: matmul {product:.0f} TFLOP/s, data sheet {peak}")
    for case in cases(given.quick):
        rows += rows_of(case, product, peak)
        print(rows[-4:], file=sys.stderr)
    show(rows, given.json)
