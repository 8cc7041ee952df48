"""Training steps of ours (dense, DEMix, token-routed) beside nanoGPT, nanochat and Hugging Face's GPT-2 and Llama.

    python benchmarks/train.py [--quick] [--threads 2] [--profile] [--json rows.json]

Tokens per second, the share of the matmul peak that the same run measures, peak memory above that of the imports. Ours
is `demix.train.loop.train` itself. Each variant is a process of its own; at a setting they take turns, a step each, and
medians over the turns count, so that on a shared machine ratios hold. `--threads 1` on a CPU counts CPU time, which
other work changes least. DEMix has 8 experts and sees as many tokens a step as dense, an eighth each. `muon` is either
of them with Muon. On a GPU the sizes are those that fill one. `--quick` compiles nothing and takes few steps;
`--profile` prints where the time of ours goes instead. Needs transformers, and a C++ compiler to compile.

The decoder of Llama (`llama`: RMSNorm, rotation, SwiGLU, no biases, as many weights as dense) and that of nanochat
(`nanochat`: QK-norm, ReLU squared, a head of its own) stand beside transformers' Llama and nanochat's model of the same
shape, and Llama's options beside the plain decoder.

Token-routed models (`switch`: top-1 of 8 in every layer; top-2 of 8 in every second layer) stand beside dense in
FLOP/s, because top-2 needs more FLOPs a token. A `layer` is forward and backward of one routed feedforward, without an
update, beside transformers' Mixtral block by the fastest of its implementations; in bf16 once under autocast, as ours
trains, and once with weights that are bf16 themselves. Mixtral's experts have three matrices of D × 8D/3 (down to a
multiple of 16) where ours have two of D × 4D, so FLOP/s are compared. All choices are computed: Mixtral drops none, and
ours have a capacity of all tokens.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from peers import NanoChat, NanoGPT, hugging_face, llama, mixtral_block, mixtral_inner
from tables import show
from torch import Tensor, nn

from demix.config.architecture import DECODERS, PRESETS, Architecture, Routed
from demix.config.training import Updates
from demix.model.device import compute_type
from demix.model.gpt import GPT
from demix.model.moe import MoELayer, RouterLoss
from demix.plan.flops import scoring_flops
from demix.train.batches import Batch, Batches
from demix.train.loop import train
from demix.train.parallel import World
from demix.train.schedule import Optimization

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXPERTS = tuple(f"domain{number}" for number in range(8))
# A capacity as large as the number of experts drops nothing.
ROUTED = {
    "switch": Routed(experts=8, top_k=1, every=1, capacity=8.0, balance=0.01),
    "top-2": Routed(experts=8, top_k=2, every=2, capacity=8.0, balance=0.01),
}
# What of ours is compared with which variant.
OURS = {
    "demix": ("DEMix / dense", "dense"),
    "muon": ("dense, Muon / AdamW", "dense"),
    "demix muon": ("DEMix, Muon / AdamW", "demix"),
}
# Options of our decoder; `llama` has as many weights as the plain one, but for what rounds to whole vectors.
MODERN = {
    "llama": DECODERS["llama"] | {"head": "tied"},
    "nanochat": DECODERS["llama"] | {"gated": False, "activation": "relu2", "query_norm": "head"},
}
# The model of each peer, and whose sizes it has.
MODELS = {"nanogpt": NanoGPT, "hf": hugging_face, "hf llama": llama, "nanochat's": NanoChat}


def modern(name: str, plain: Architecture) -> Architecture:
    """The plain architecture with the options `name` of `MODERN`, or with those that its peer has."""
    options = MODERN.get({"hf llama": "llama", "nanochat's": "nanochat"}.get(name, name), {})
    inner = 8 * plain.width // 3 // 8 * 8 if options.get("gated") else None
    return replace(plain, **options, inner=inner)


@dataclass(frozen=True)
class Setting:
    """What all variants of a comparison have in common; `sequences` of a step, all experts together."""

    size: str
    architecture: Architecture
    vocabulary: int
    sequences: int
    precision: str
    compile: bool

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
            return 4 * 2.0 * _matmul_side() ** 3
        if routed := sizes.routed:
            expert = 6 * mixtral_inner(sizes.width) if "mixtral" in name else 16 * sizes.width
            return 3.0 * self.tokens * sizes.width * (routed.top_k * expert + 2 * routed.experts)
        sizes = replace(modern(name, sizes), routed=ROUTED.get(name))
        return 3.0 * self.tokens * scoring_flops(sizes, self.vocabulary, 1)


@dataclass(frozen=True)
class Measured:
    """Medians of a variant: seconds a step, and the most memory that it took, in MB."""

    seconds: float
    memory: float


# What stands side by side. "plain" is our dense model with whole logits and torch's cross-entropy.
PEERS = {"dense": "ours", "nanogpt": "nanoGPT's recipe", "hf": "Hugging Face", "plain": "ours, whole logits"}
DECODER_PEERS = {"hf llama": ("llama", "Hugging Face's Llama"), "nanochat's": ("nanochat", "nanochat's model")}


MIXTRAL = ("mixtral eager", "mixtral grouped_mm")
MIXTRAL_BF16 = tuple(f"{name}, weights in bf16" for name in MIXTRAL)


def layers(quick: bool) -> Iterator[tuple[Setting, tuple[str, ...], int]]:
    """As `comparisons`, for one routed layer."""
    on_gpu = DEVICE.type == "cuda"
    for routed in ROUTED.values():
        for width, context, sequences in ((768, 1024, 32),) if on_gpu else ((256, 256, 8), (768, 1024, 2)):
            sizes = Architecture(routed.every, width, 4, context, routed=routed)
            for precision in ("bf16",) if on_gpu else ("fp32", "bf16"):
                size = f"layer {width} wide, top-{routed.top_k} of {routed.experts}"
                variants = ("layer", *MIXTRAL, *(MIXTRAL_BF16 if precision == "bf16" else ()))
                if width == 256 or not quick:
                    yield Setting(size, sizes, 0, sequences, precision, False), variants, 5 if quick else 11


def comparisons(quick: bool) -> Iterator[tuple[Setting, tuple[str, ...], int]]:
    """Settings, their variants and how many turns each takes."""
    small = Setting("4×256", Architecture(4, 256, 4, 256), 8192, 8, "fp32", False)
    plain = Setting("plain 3x128", Architecture(3, 128, 4, 256), 4096, 8, "fp32", False)
    gpt2 = Setting("GPT-2 small", PRESETS["gpt3-small"], 50257, 1, "fp32", False)
    if DEVICE.type == "cuda":
        wide = replace(PRESETS["gpt3-xl"], layers=4)
        for setting in (replace(gpt2, sequences=32), Setting("4 layers of 1.3b", wide, 50257, 16, "bf16", False)):
            for compiled in (False,) if quick else (False, True):
                each = replace(setting, precision="bf16", compile=compiled)
                yield each, ("dense", *OURS, *ROUTED, "nanogpt", "hf", "plain"), 5 if quick else 20
                yield each, ("dense", *MODERN, *DECODER_PEERS), 5 if quick else 20
        return
    yield plain, ("dense", *OURS, "nanogpt", "hf", "plain"), 3 if quick else 20
    for precision in ("fp32", "bf16"):
        for compiled in (False,) if quick else (False, True):
            each = replace(small, precision=precision, compile=compiled)
            yield each, ("dense", "demix", *ROUTED, "nanogpt", "hf", "plain"), 3 if quick else 15
            yield each, ("dense", *MODERN, *DECODER_PEERS), 3 if quick else 15
    if quick:
        return
    for precision in ("fp32", "bf16"):
        more = replace(small, size="4×256, 8,192 tokens", sequences=32, precision=precision)
        yield more, ("dense", "demix", *ROUTED), 8
    for precision, compiled in (("fp32", False), ("bf16", True)):
        yield replace(gpt2, precision=precision, compile=compiled), ("dense", "nanogpt", "hf", "plain"), 4
    # Eight experts' update costs the same whatever the tokens: so many a step are still few.
    yield replace(gpt2, sequences=8, precision="bf16"), ("dense", *OURS), 3


def main(quick: bool, threads: int, path: Path | None) -> None:
    rows, found = [], {}
    for setting, variants, turns in (*comparisons(quick), *layers(quick)):
        print(f"{setting.name}: {setting.tokens} tokens a step", file=sys.stderr)
        times = measure(setting, variants, turns, threads)
        speed = {name: setting.tokens / m.seconds for name, m in times.items()}
        achieved = {name: setting.flops(name) / m.seconds / 1e9 for name, m in times.items()}
        told = (f"{name} {speed[name]:.0f} tokens/s" for name in variants)
        print("  ".join(told), file=sys.stderr)

        def row(name: str, ours: float, peer: float, unit: str) -> None:
            rows.append({"name": name, "ours": ours, "peer": peer, "unit": unit, "ratio": ours / peer})

        if "layer" in variants:
            for names in (MIXTRAL, MIXTRAL_BF16):
                if names[0] in variants:
                    fastest = max(names, key=lambda name: achieved[name])
                    row(f"{setting.name}: ours / {fastest}", achieved["layer"], achieved[fastest], "GFLOP/s")
            continue
        ours = times["dense"]
        if "llama" in variants:
            row(f"{setting.name}: options of Llama / plain", speed["llama"], speed["dense"], "tokens/s")
            for name, (own, peer) in DECODER_PEERS.items():
                row(f"{setting.name}: {own} / {peer}", speed[own], speed[name], "tokens/s")
                row(f"{setting.name}: {own} / {peer}", times[own].memory, times[name].memory, "MB")
            continue
        found[setting] = times
        for name in variants[1:]:
            if name in OURS:
                label, peer = OURS[name]
                row(f"{setting.name}: {label}", speed[name], speed[peer], "tokens/s")
                row(f"{setting.name}: {label}", times[name].memory, times[peer].memory, "MB")
            elif name in ROUTED:
                row(f"{setting.name}: {name} / dense", achieved[name], achieved["dense"], "GFLOP/s")
                row(f"{setting.name}: {name} / dense", times[name].memory, ours.memory, "MB")
            else:
                row(f"{setting.name}: dense / {PEERS[name]}", speed["dense"], speed[name], "tokens/s")
                row(f"{setting.name}: dense / {PEERS[name]}", ours.memory, times[name].memory, "MB")
        for name in ("dense", "demix"):
            if name in times:
                row(f"{setting.name}: {name} / matmul peak", achieved[name], achieved["matmul"], "GFLOP/s")
    for size in dict.fromkeys(setting.size for setting, times in found.items() if "hf" in times):
        of_size = {s: times for s, times in found.items() if s.size == size}
        best = {
            name: max(s.tokens / times[name].seconds for s, times in of_size.items() if name in times)
            for name in ("dense", "nanogpt", "hf")
        }
        for name in ("nanogpt", "hf"):
            label = f"{size}, each at its best: dense / {PEERS[name]}"
            ratio = best["dense"] / best[name]
            rows.append({"name": label, "ours": best["dense"], "peer": best[name], "unit": "tokens/s", "ratio": ratio})
    show(rows, path)


def measure(setting: Setting, variants: tuple[str, ...], turns: int, threads: int) -> dict[str, Measured]:
    """Each variant over `turns`, in which every one makes a step after the other; where dense is one, `matmul` too."""
    processes = {}
    for name in (*(("matmul",) if "dense" in variants else ()), *variants):
        command = [sys.executable, __file__, "--threads", str(threads), "--variant", name]
        settings = json.dumps(asdict(setting))
        processes[name] = subprocess.Popen(
            [*command, "--setting", settings], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        # Warm before the next one starts, else they would compile at once.
        for _ in range(1 + setting.compile):
            _turn(processes[name], name)
    times = {name: [] for name in processes}
    for _ in range(turns):
        for name, process in processes.items():
            times[name].append(_turn(process, name))
    memory = {}
    for name, process in processes.items():
        output, _ = process.communicate()
        memory[name] = float(output)
    return {name: Measured(median(seconds), memory[name]) for name, seconds in times.items()}


def _turn(process: subprocess.Popen, name: str) -> float:
    process.stdin.write("go\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        sys.exit(f"{name} ended early, see above")
    return float(answer)


class _DoneError(Exception):
    """The other end wants no more steps."""


def _turns() -> Callable[[], None]:
    """A function to call before each step: says how long the last one took and waits for leave to take the next."""
    begun = None
    # Of several threads CPU time would hide that one waits for another.
    alone = DEVICE.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter

    def wait() -> None:
        nonlocal begun
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        if begun is not None:
            print(clock() - begun, flush=True)
        if not sys.stdin.readline():
            raise _DoneError
        begun = clock()

    return wait


def run_variant(name: str, setting: Setting, wait: Callable[[], None]) -> None:
    """Make steps of a variant, each after `wait()`, until that raises."""
    torch.manual_seed(0)
    if name == "matmul":
        _multiply(setting, wait)
    elif name in ("dense", "plain", *OURS, *ROUTED, *MODERN):
        _train_ours(name, setting, wait)
    elif name == "layer" or "mixtral" in name:
        _pass_layer(name, setting, wait)
    else:
        _train_peer(name, setting, wait)


def _train_ours(name: str, setting: Setting, wait: Callable[[], None]) -> None:
    experts = EXPERTS if name.startswith("demix") else ("dense",)
    group = (len(experts), setting.sequences // len(experts), setting.architecture.context)

    def draw(_: int) -> Batch:
        wait()
        ids = torch.randint(0, setting.vocabulary, (2, *group))
        numbers = torch.arange(len(experts))[:, None].expand(group[:2]).contiguous()
        return Batch(ids[0], ids[1], numbers, numbers)

    optimization = Optimization(
        steps=10**6, learning_rate=1e-4, warmup=0.08, clip=0.1, weight_decay=0.1, precision=setting.precision,
        checkpoint_every=10**6, compile=setting.compile, optimizer=Updates(kind="muon") if "muon" in name else None,
    )  # fmt: skip
    architecture = replace(modern(name, setting.architecture), routed=ROUTED.get(name))
    model = (PlainGPT if name == "plain" else GPT)(architecture, setting.vocabulary, experts).initialise(0)
    with TemporaryDirectory() as folder:
        train(model, Batches(draw, setting.tokens), experts, optimization, Path(folder), world=World(device=DEVICE))


class PlainGPT(GPT):
    """Ours, with all logits at once."""

    def log_probabilities(self, hidden: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
        logits = (hidden @ self.token_embedding.to(hidden.dtype).T).float()
        return -F.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none").view_as(targets)


def _train_peer(name: str, setting: Setting, wait: Callable[[], None]) -> None:
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


def _pass_layer(name: str, setting: Setting, wait: Callable[[], None]) -> None:
    """Forward and backward of our routed layer in training, or of transformers' block of about as many weights."""
    routed, width, dtype = setting.architecture.routed, setting.architecture.width, compute_type(setting.precision)
    if name == "layer":
        layer: nn.Module = MoELayer(setting.architecture)
    else:
        implementation = name.removeprefix("mixtral ").split(",")[0]
        layer = mixtral_block(width, routed.experts, routed.top_k, implementation)
        layer.to(dtype if "weights in bf16" in name else torch.float32)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    layer.to(DEVICE)
    autocast = name in MIXTRAL and dtype != torch.float32
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


def _matmul_side() -> int:
    return 8192 if DEVICE.type == "cuda" else 2048


def _multiply(setting: Setting, wait: Callable[[], None]) -> None:
    left, right = torch.randn(2, _matmul_side(), _matmul_side(), device=DEVICE).to(compute_type(setting.precision))
    product = torch.empty_like(left)
    while True:
        wait()
        for _ in range(4):
            torch.mm(left, right, out=product)


def _serve(name: str, setting: Setting) -> None:
    """Be a variant's process: a step for each line read, its seconds as the answer; at the end the peak memory, MB."""
    if name.startswith("hf") or "mixtral" in name:
        import transformers  # noqa: F401

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        run_variant(name, setting, _turns())
    except _DoneError:
        most = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(torch.cuda.max_memory_allocated() / 2**20 if DEVICE.type == "cuda" else most)


@contextmanager
def _profiler() -> Iterator[torch.profiler.profile]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if DEVICE.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        yield profiler


def show_profile(name: str, setting: Setting) -> None:
    """Print the largest costs of two steps after two of warm-up."""
    step, stack = 0, []

    def wait() -> None:
        nonlocal step
        step += 1
        if step == 3:
            stack.append(_profiler())
            stack.append(stack[0].__enter__())
        if step == 5:
            stack[0].__exit__(None, None, None)
            raise _DoneError

    try:
        run_variant(name, setting, wait)
    except _DoneError:
        key = f"self_{'cuda' if DEVICE.type == 'cuda' else 'cpu'}_time_total"
        print(f"{name}, {setting.name}, two steps")
        print(stack[1].key_averages().table(sort_by=key, row_limit=20, max_name_column_width=60))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.variant:
        sizes = json.loads(given.setting)
        _serve(given.variant, Setting(**sizes | {"architecture": Architecture(**sizes["architecture"])}))
    elif given.profile:
        for setting, variants, _ in (*comparisons(given.quick), *layers(given.quick)):
            for name in ("dense", "demix", *ROUTED, "layer"):
                if name in variants:
                    show_profile(name, setting)
    else:
        main(given.quick, given.threads, given.json)
