"""What share of a GPU's peak training and scoring reach, and the memory they take beside that of `demix plan`.

    python benchmarks/gpu.py [--quick] [--json rows.json]

Models have the paper's sizes of 125M and 1.3B parameters, GPT-2's vocabulary and blocks of 1,024, activations in bf16.
A step is that of `demix.train.loop.train`, a pass that of `demix.model.scoring.log_probabilities`. DEMix sees as many
tokens a step as dense, an equal part each expert. FLOPs are those of matrix products, backward twice forward, without
what is recomputed (`demix.plan.flops.scoring_flops`). The column "of peak" divides FLOP/s by the data sheet's peak of
bf16, the column "of matmul" by what a product of two 8,192 x 8,192 matrices reaches in the same run. The column "plan"
has the plan's state and activations of a training, and the weights alone of a scoring. `--quick` compiles nothing and
takes the smaller size alone. About a minute of an H200.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import nn
from train import ROUTED

from demix.config.architecture import PRESETS, Architecture
from demix.config.training import Updates
from demix.model.gpt import GPT
from demix.model.scoring import log_probabilities
from demix.plan.flops import activation_bytes, scoring_flops, training_state_bytes
from demix.train.batches import Batch, Batches
from demix.train.loop import train
from demix.train.parallel import World
from demix.train.schedule import Optimization

VOCABULARY, CONTEXT, SIDE = 50257, 1024, 8192
# TFLOP/s of dense bf16 by the data sheets.
PEAKS = {"A100": 312, "H100": 989, "H200": 989}
WARM, TIMED = 3, 6


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
    recompute: bool = False

    @property
    def name(self) -> str:
        kind = self.routed or ("dense" if self.experts == 1 else f"{self.experts} experts")
        more = [("Muon", self.muon), ("recomputed", self.recompute), ("compiled", self.compile)]
        return ", ".join([f"{self.what} {self.size}", kind, *(word for word, on in more if on)])

    @property
    def architecture(self) -> Architecture:
        preset = PRESETS[{"125M": "gpt3-small", "1.3B": "gpt3-xl"}[self.size]]
        return replace(preset, context=CONTEXT, routed=ROUTED[self.routed] if self.routed else None)

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
    yield Case("train", "125M", 1, 32, recompute=True)
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
    times: list[float] = []
    model = model_of(case)
    parameters = sum(p.numel() for p in model.parameters())
    blocks = [p.numel() for name, p in model.named_parameters() if p.ndim > 1 and "embedding" not in name]
    state = training_state_bytes(parameters, single=sum(blocks) if case.muon else 0)
    activations = activation_bytes(case.architecture, VOCABULARY, case.sequences, 2, checkpointing=case.recompute)

    def draw(_: int) -> Batch:
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        ids = torch.randint(0, VOCABULARY, (2, case.experts, case.sequences // case.experts, CONTEXT))
        numbers = torch.arange(case.experts)[:, None].expand(ids.shape[1:3]).contiguous()
        return Batch(ids[0], ids[1], numbers, seeds=numbers)

    optimization = Optimization(
        steps=WARM + TIMED + 1, learning_rate=1e-4, warmup=0.08, clip=0.1, weight_decay=0.1, precision="bf16",
        checkpoint_every=10**6, checkpoint_activations=case.recompute, compile=case.compile,
        optimizer=Updates(kind="muon") if case.muon else None,
    )  # fmt: skip
    world = World(device=torch.device("cuda"))
    with TemporaryDirectory() as folder:
        train(model, Batches(draw, case.sequences * CONTEXT), model.experts, optimization, Path(folder), world=world)
    return [after - before for before, after in zip(times[WARM:], times[WARM + 1 :], strict=False)], state + activations


def scoring(case: Case) -> tuple[list[float], int]:
    """Seconds of each timed pass, and the bytes of the weights."""
    model = model_of(case)
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, case.sequences, CONTEXT))
    mask = np.ones(ids[0].shape, bool)
    times = timed(lambda: log_probabilities(model, *ids, mask, torch.bfloat16), 1, 3)
    return times, 4 * sum(p.numel() for p in model.parameters())


def timed(run: Callable[[], object], warm: int, times: int) -> list[float]:
    found = []
    for _ in range(warm + times):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    return found[warm:]


def matmul() -> float:
    """TFLOP/s of products of two square matrices in bf16, random data."""
    left, right = torch.randn(2, SIDE, SIDE, device="cuda").bfloat16()
    return 2 * SIDE**3 / median(timed(lambda: torch.mm(left, right), 3, 10)) / 1e12


def main(quick: bool, path: Path | None) -> None:
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    card, rows, product = torch.cuda.get_device_name(), [], matmul()
    peak = next((tflops for name, tflops in PEAKS.items() if name in card), None)
    print(f"{card}, torch {torch.__version__}: matmul {product:.0f} TFLOP/s, data sheet {peak}")
    print(f"{'':44} {'tokens/s':>9} {'TFLOP/s':>8} {'of peak':>8} {'of matmul':>9} {'GB':>6} {'plan':>6}")
    for case in cases(quick):
        torch.cuda.reset_peak_memory_stats()
        seconds, planned = (training if case.what == "train" else scoring)(case)
        achieved = case.flops / median(seconds) / 1e12
        row = {
            "name": case.name,
            "card": card,
            "tokens_per_second": case.sequences * CONTEXT / median(seconds),
            "tflops": achieved,
            "of_peak": achieved / peak if peak else None,
            "of_matmul": achieved / product,
            "gigabytes": torch.cuda.max_memory_allocated() / 1e9,
            "planned_gigabytes": planned / 1e9,
        }
        rows.append(row)
        share = f"{row['of_peak']:8.1%}" if peak else f"{'':8}"
        print(
            f"{case.name:44} {row['tokens_per_second']:9.0f} {achieved:8.1f} {share} {row['of_matmul']:9.1%} "
            f"{row['gigabytes']:6.1f} {row['planned_gigabytes']:6.1f}",
            flush=True,
        )
        if path:
            path.write_text(json.dumps(rows, indent=1))
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    main(given.quick, given.json)
