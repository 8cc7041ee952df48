"""Training steps of ours (dense, DEMix, token-routed) beside nanoGPT, nanochat and Hugging Face's GPT-2 and Llama.

    python benchmarks/train.py [--quick] [--threads 2] [--json rows.json]

Tokens per second, the share of the matmul peak that the same run measures, peak memory above that of the imports. Ours
is `demix.train.loop.train` itself. Each variant is a process of its own; at a setting they take turns, a step each, and
medians over the turns count, so that on a shared machine ratios hold. `--threads 1` on a CPU counts CPU time, which
other work changes least. DEMix has 8 experts and sees as many tokens a step as dense, an eighth each. `muon` is either
of them with Muon. On a GPU the sizes are those that fill one. `--quick` compiles nothing and takes few steps. Needs
transformers, and a C++ compiler to compile.

The decoder of Llama (`llama`: RMSNorm, rotation, SwiGLU, no biases, as many weights as dense) and that of nanochat
(`nanochat`: QK-norm, ReLU squared, a head of its own) stand beside transformers' Llama and nanochat's model of the same
shape, and Llama's options beside the plain decoder.

Token-routed models (`switch`: top-1 of 8 in every layer; top-2 of 8 in every second layer) stand beside dense in
FLOP/s, because top-2 needs more FLOPs a token. A `layer` is forward and backward of one routed feedforward, without an
update, beside transformers' Mixtral block by two of its implementations; in bf16 once under autocast, as ours
trains, and once with weights that are bf16 themselves. Mixtral's experts have three matrices of D × 8D/3 (down to a
multiple of 16) where ours have two of D × 4D, so FLOP/s are compared. All choices are computed: Mixtral drops none, and
ours have a capacity of all tokens.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import Measured, Wait, arguments, in_turns, row, show
from peers import NanoChat, NanoGPT, hugging_face, llama, mixtral_block, mixtral_inner
from torch import nn

from demix.config.architecture import DECODERS, PRESETS, Architecture, Routed
from demix.config.training import OptimizerSettings
from demix.model.device import compute_type
from demix.model.gpt import GPT
from demix.model.moe import MoELayer, RouterLoss
from demix.plan.flops import scoring_flops
from demix.train.batches import Batch, Batches
from demix.train.loop import train
from demix.train.parallel import World
from demix.train.schedule import Optimization

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIDE, PRODUCTS = 8192 if DEVICE.type == "cuda" else 2048, 4
EXPERTS = tuple(f"domain{number}" for number in range(8))
# A capacity as large as the number of experts drops nothing.
ROUTED = {
    "switch": Routed(experts=8, top_k=1, every=1, capacity=8.0, balance=0.01),
    "top-2": Routed(experts=8, top_k=2, every=2, capacity=8.0, balance=0.01),
}
# Options of our decoder; `llama` has as many weights as the plain one, but for what rounds to whole vectors.
MODERN = {
    "llama": DECODERS["llama"] | {"head": "tied"},
    "nanochat": DECODERS["llama"] | {"gated": False, "activation": "relu2", "query_norm": "head"},
}
# The model of each peer.
MODELS = {"nanogpt": NanoGPT, "hf": hugging_face, "hf llama": llama, "nanochat's": NanoChat}
MIXTRAL = tuple(f"mixtral {how}{weights}" for weights in ("", ", weights in bf16") for how in ("eager", "grouped_mm"))
# What stands side by side where a setting has both, and in what.
PAIRS = {
    ("demix", "dense"): ("DEMix / dense", "tokens/s"),
    ("muon", "dense"): ("dense, Muon / AdamW", "tokens/s"),
    ("demix muon", "demix"): ("DEMix, Muon / AdamW", "tokens/s"),
    ("switch", "dense"): ("switch / dense", "GFLOP/s"),
    ("top-2", "dense"): ("top-2 / dense", "GFLOP/s"),
    ("dense", "nanogpt"): ("dense / nanoGPT's recipe", "tokens/s"),
    ("dense", "hf"): ("dense / Hugging Face", "tokens/s"),
    ("llama", "dense"): ("options of Llama / plain", "tokens/s"),
    ("llama", "hf llama"): ("llama / Hugging Face's Llama", "tokens/s"),
    ("nanochat", "nanochat's"): ("nanochat / nanochat's model", "tokens/s"),
    ("dense", "matmul"): ("dense / matmul peak", "GFLOP/s"),
    ("demix", "matmul"): ("demix / matmul peak", "GFLOP/s"),
} | {("layer", name): (f"ours / {name}", "GFLOP/s") for name in MIXTRAL}


def modern(name: str, plain: Architecture) -> Architecture:
    """The plain architecture with the options `name` of `MODERN`, or with those that its peer has."""
    options = MODERN.get({"hf llama": "llama", "nanochat's": "nanochat"}.get(name, name), {})
    inner = 8 * plain.width // 3 // 8 * 8 if options.get("gated") else None
    return plain.replace(**options, inner=inner)


@dataclass(frozen=True)
class Setting:
    """What all variants of a comparison have in common; `sequences` of a step, all experts together."""

    size: str
    architecture: Architecture
    vocabulary: int
    sequences: int
    precision: str = "fp32"
    compile: bool = False

    @property
    def name(self) -> str:
        return f"{self.size}, {self.precision}{' compiled' if self.compile else ''}"

    @property
    def tokens(self) -> int:
        return self.sequences * self.architecture.context

    def flops(self, name: str) -> float:
        """Of the matrix products of a variant's step, backward twice forward; attention's is the half that the causal
        mask leaves.
        """
        sizes = self.architecture
        if name == "matmul":
            return PRODUCTS * 2.0 * SIDE**3
        if routed := sizes.routed:
            expert = 6 * mixtral_inner(sizes.width) if "mixtral" in name else 16 * sizes.width
            return 3.0 * self.tokens * sizes.width * (routed.top_k * expert + 2 * routed.experts)
        sizes = modern(name, sizes).replace(routed=ROUTED.get(name))
        return 3.0 * self.tokens * scoring_flops(sizes, self.vocabulary, 1)


def comparisons(quick: bool) -> Iterator[tuple[Setting, tuple[str, ...], int]]:
    """Settings, their variants and how many turns each takes."""
    on_gpu, turns = DEVICE.type == "cuda", 3 if quick else 15
    small = Setting("4×256", Architecture(layers=4, width=256, heads=4, context=256), 8192, 8)
    gpt2 = Setting("GPT-2 small", PRESETS["gpt3-small"], 50257, 32 if on_gpu else 1)
    wide = Setting("4 layers of 1.3b", PRESETS["gpt3-xl"].replace(layers=4), 50257, 16)
    peers, muon = ("nanogpt", "hf"), ("muon", "demix muon")
    if not on_gpu:
        plain = Setting("plain 3x128", Architecture(layers=3, width=128, heads=4, context=256), 4096, 8)
        yield plain, ("matmul", "dense", "demix", *muon, *peers), turns
    for setting in (gpt2, wide) if on_gpu else (small,):
        for precision in ("bf16",) if on_gpu else ("fp32", "bf16"):
            for compiled in (False,) if quick else (False, True):
                each = replace(setting, precision=precision, compile=compiled)
                yield each, ("matmul", "dense", "demix", *(muon if on_gpu else ()), *ROUTED, *peers), turns
                yield each, ("dense", *MODERN, "hf llama", "nanochat's"), turns
    if not quick and not on_gpu:
        for precision, compiled in (("fp32", False), ("bf16", True)):
            yield replace(gpt2, precision=precision, compile=compiled), ("matmul", "dense", *peers), 4
        # Eight experts' update costs the same whatever the tokens: so many a step are still few.
        yield replace(gpt2, sequences=8, precision="bf16"), ("matmul", "dense", "demix", *muon), 3
    for routed in ROUTED.values():
        for width, context, sequences in ((768, 1024, 32),) if on_gpu else ((256, 256, 8), (768, 1024, 2)):
            sizes = Architecture(layers=routed.every, width=width, heads=4, context=context, routed=routed)
            for precision in ("bf16",) if on_gpu else ("fp32", "bf16"):
                layer = f"layer {width} wide, top-{routed.top_k} of {routed.experts}"
                if width == 256 or not quick:
                    mixtral = MIXTRAL if precision == "bf16" else MIXTRAL[:2]
                    yield Setting(layer, sizes, 0, sequences, precision), ("layer", *mixtral), turns


def rows_of(setting: Setting, found: dict[str, Measured]) -> Iterator[dict]:
    for (ours, peer), (label, unit) in PAIRS.items():
        if ours in found and peer in found:
            amounts = (setting.flops(name) / 1e9 if unit == "GFLOP/s" else setting.tokens for name in (ours, peer))
            speeds = (amount / found[name].seconds for amount, name in zip(amounts, (ours, peer), strict=True))
            yield row(f"{setting.name}: {label}", *speeds, unit)
            if unit == "tokens/s" or ours in ROUTED:
                yield row(f"{setting.name}: {label}", found[ours].memory, found[peer].memory, "MB")


def run_variant(name: str, setting: Setting, wait: Wait) -> None:
    """Take steps of a variant, each after `wait()`, until that raises."""
    torch.manual_seed(0)
    if name == "matmul":
        multiply(setting.precision, wait)
    elif name == "layer" or "mixtral" in name:
        _pass_layer(name, setting, wait)
    elif name in MODELS:
        _train_peer(name, setting, wait)
    else:
        architecture = modern(name, setting.architecture).replace(routed=ROUTED.get(name))
        experts = EXPERTS if name.startswith("demix") else ("dense",)
        model = GPT(architecture, setting.vocabulary, experts).initialise(0)
        how = {"precision": setting.precision, "compile": setting.compile}
        train_ours(model, setting.sequences, wait, muon="muon" in name, **how)


def train_ours(model: GPT, sequences: int, wait: Wait, *, muon: bool = False, **how: Any) -> None:
    """Steps of `demix.train.loop.train` on random tokens, until `wait` raises; an equal part for each expert."""
    group = (len(model.experts), sequences // len(model.experts), model.architecture.context)

    def draw(_: int) -> Batch:
        wait()
        ids = torch.randint(0, model.vocab_size, (2, *group))
        numbers = torch.arange(group[0])[:, None].expand(group[:2]).contiguous()
        return Batch(ids[0], ids[1], numbers, numbers)

    optimization = Optimization(
        steps=10**6, learning_rate=1e-4, warmup=0.08, clip=0.1, weight_decay=0.1, checkpoint_every=10**6,
        optimizer=OptimizerSettings(kind="muon") if muon else None, **how,
    )  # fmt: skip
    batches = Batches(draw, sequences * group[2])
    with TemporaryDirectory() as folder:
        train(model, batches, model.experts, optimization, Path(folder), world=World(device=DEVICE))


def _train_peer(name: str, setting: Setting, wait: Wait) -> None:
    """nanoGPT's loop: autocast, the model compiled as a whole, clipping, fused AdamW. For all peers."""
    model = MODELS[name](modern(name, setting.architecture), setting.vocabulary).to(DEVICE)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1, fused=True
    )
    forward = torch.compile(model, dynamic=False) if setting.compile else model
    dtype = compute_type(setting.precision)
    while True:
        wait()
        ids = torch.randint(0, setting.vocabulary, (2, setting.sequences, setting.architecture.context)).to(DEVICE)
        with torch.autocast(DEVICE.type, dtype=dtype, enabled=dtype != torch.float32):
            loss = forward(ids[0], labels=ids[0]).loss if name.startswith("hf") else forward(ids[0], ids[1])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()


def _pass_layer(name: str, setting: Setting, wait: Wait) -> None:
    """Forward and backward of our routed layer in training, or of transformers' block of about as many weights."""
    routed, width, dtype = setting.architecture.routed, setting.architecture.width, compute_type(setting.precision)
    if name == "layer":
        layer: nn.Module = MoELayer(setting.architecture)
    else:
        layer = mixtral_block(width, routed.experts, routed.top_k, name.removeprefix("mixtral ").split(",")[0])
        layer.to(dtype if "weights in bf16" in name else torch.float32)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    layer.to(DEVICE)
    autocast = name in MIXTRAL[:2] and dtype != torch.float32
    shape = (setting.sequences, setting.architecture.context, width)
    while True:
        wait()
        x = torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True)
        if name == "layer":
            auxiliary: list[RouterLoss] = []
            loss = layer(x[None], auxiliary).sum() + auxiliary[0].losses.sum()
        else:
            with torch.autocast(DEVICE.type, dtype=dtype, enabled=autocast):
                loss = layer(x).sum()
        loss.backward()
        layer.zero_grad(set_to_none=True)


def multiply(precision: str, wait: Wait) -> None:
    left, right = torch.randn(2, SIDE, SIDE, device=DEVICE).to(compute_type(precision))
    product = torch.empty_like(left)
    while True:
        wait()
        for _ in range(PRODUCTS):
            torch.mm(left, right, out=product)


if __name__ == "__main__":
    given, rows = arguments(__doc__, quick=False, threads=2), []
    for setting, variants, turns in comparisons(given.quick):
        print(f"{setting.name}: {setting.tokens} tokens a step, {', '.join(variants)}", file=sys.stderr)
        runs = {name: (run_variant, (name, setting)) for name in variants}
        rows += rows_of(setting, in_turns(runs, turns, given.threads, 1 + setting.compile))
    show(rows, given.json)
