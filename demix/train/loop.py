"""The training loop: one for every model and adaptation, from top to bottom."""

import json
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from demix.errors import DemixError, StoppedError
from demix.files import cannot_be_written, write_json_lines, write_text
from demix.model.device import compute_type
from demix.model.gpt import GPT
from demix.progress import progress
from demix.train.batches import Batches
from demix.train.parallel import GradientSync, World
from demix.train.state import State, held, newest_state, save_state

log = logging.getLogger(__name__)

# The scale of the loss in fp16: halved when gradients overflow, doubled after so many updates without.
FIRST_SCALE, LAST_SCALE, GROW_AFTER = 2.0**16, 2.0**-4, 1000


class DivergedError(DemixError):
    """A loss or gradient is not finite in update number `step` (from 1). `metrics` are the rows before it."""

    def __init__(self, step: int, cause: str, cure: str, metrics: list[dict]):
        self.step, self.metrics = step, metrics
        super().__init__(f"step {step}", cause, cure)


@dataclass(frozen=True)
class Optimization:
    """How parameters are updated (paper, Tables 9-12). `steps` are optimizer updates, `warmup` a share of them.

    `micro_sequences`: how many sequences of each expert a rank sees at a time (None: all of a step's), gradients
    accumulate over them. `keep_checkpoints`: the newest so many stay. `compile` the blocks; `checkpoint_activations`:
    compute them again in backward.
    """

    steps: int
    learning_rate: float
    warmup: float
    clip: float
    weight_decay: float
    precision: str
    checkpoint_every: int
    keep_checkpoints: int = 2
    micro_sequences: int | None = None
    compile: bool = False
    checkpoint_activations: bool = False


@dataclass(frozen=True)
class EarlyStopping:
    """Evaluate on dev every `every` steps; stop after `patience` evaluations without a new best."""

    every: int
    patience: int


def learning_rate_at(step: int, optimization: Optimization) -> float:
    """The rate of update number `step` (from 0): linear warm-up, then linear decay to zero at `steps`."""
    warmup = math.ceil(optimization.warmup * optimization.steps)
    if step < warmup:
        return optimization.learning_rate * (step + 1) / warmup
    return optimization.learning_rate * (optimization.steps - step) / max(1, optimization.steps - warmup)


def train(
    model: GPT,
    batches: Batches,
    domains: Sequence[str],
    optimization: Optimization,
    checkpoints: Path,
    *,
    world: World | None = None,
    only: Callable[[str], bool] = lambda name: True,
    evaluate: Callable[[GPT], tuple[float, dict[str, float]]] | None = None,
    stopping: EarlyStopping | None = None,
) -> list[dict]:
    """Train this rank's part of a model in place on `batches` of the named `domains`; returns one metrics row a step.

    Resumes from the newest complete checkpoint below `checkpoints`. `only` chooses parameters by name; the others stay
    as they are to the bit. `evaluate(model)` gives a loss on dev, the same on all ranks, and more by key (nats per
    token): at every checkpoint, or with `stopping` as that says, and then the model ends with the parameters of the
    lowest one. Raises DivergedError on all ranks alike, before the update, when a loss or gradient is not finite, and
    StoppedError, with the state saved, after SIGTERM, SIGUSR2 or SIGINT.
    """
    world = world or World()
    with held(checkpoints, world), _signals() as signalled, ExitStack() as running:
        dtype = compute_type(optimization.precision)
        model.to(device=world.device, dtype=torch.float64 if dtype == torch.float64 else None)
        trained = {name: p.requires_grad_() for name, p in model.named_parameters() if only(name)}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        model.checkpoint_activations = optimization.checkpoint_activations
        if optimization.compile:
            model.compile_blocks()
        sync = GradientSync(trained, _is_expert, world)
        # Weight decay reaches norms and biases too, as in the paper's fairseq.
        optimizer = torch.optim.AdamW(
            trained.values(), betas=(0.9, 0.95), eps=1e-7, weight_decay=optimization.weight_decay, fused=True
        )
        first, metrics, best, best_loss, since_best = 0, [], {}, math.inf, 0
        scale, unscathed = FIRST_SCALE if dtype == torch.float16 else 1.0, 0
        if found := newest_state(checkpoints, model.experts, world):
            first, metrics = found.step, found.metrics
            best = _restore(_stacked(found, model.experts), trained, optimizer)
            best_loss, since_best = _best_so_far(metrics)
            scales = [scale, *(row["loss_scale"] for row in metrics if "loss_scale" in row)]
            scale, unscathed = scales[-1], next(iter(np.flatnonzero(np.diff(scales[::-1]))), len(scales) - 1)
            log.info("resuming at step %d of %d", first, optimization.steps)

        record = _recorder(metrics, checkpoints / "metrics.jsonl" if world.rank == 0 else None)

        def save(step: int, dev_loss: float | None = None) -> None:
            shared, experts = _parted(_state(trained, optimizer, best), model.experts)
            save_state(
                checkpoints, State(step, shared, experts, metrics, dev_loss), world, optimization.keep_checkpoints
            )

        sent, saved = 0, first if found else None
        advance = running.enter_context(progress("step", optimization.steps, first))
        for step in range(first, optimization.steps + 1):
            if (
                stopping
                and (step % stopping.every == 0 or step == optimization.steps)
                and not _evaluated(metrics, step)
            ):
                loss, more = evaluate(model)
                record({"step": step, "tokens": _tokens(metrics), "early_stopping_loss": loss} | more)
                since_best += 1
                if loss < best_loss:
                    best_loss, since_best = loss, 0
                    best = {name: p.detach().clone() for name, p in trained.items()}
                if since_best >= stopping.patience:
                    log.info("stopping at step %d: no better dev loss in %d evaluations", step, since_best)
                    break
            last, due = step == optimization.steps, step > first and step % optimization.checkpoint_every == 0
            dev_loss = None
            if evaluate and not stopping and (last or due):
                dev_loss, more = evaluate(model)
                record({"step": step, "tokens": _tokens(metrics), "dev_loss": dev_loss} | more)
            if last:
                break
            if due:
                save(step, dev_loss)
                saved = step

            begun = time.monotonic()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step, optimization)
            sync.zero()
            losses = _backward(model, batches, step, domains, dtype, scale, optimization.micro_sequences, sync)
            *losses, signals = world.sum([*losses, signalled()])
            sync.finish()
            totals, counts = losses[: len(domains)], losses[len(domains) :]
            by_domain = {name: total / n for name, total, n in zip(domains, totals, counts, strict=True) if n}
            if not math.isfinite(sum(totals)):
                worst = ", ".join(name for name, value in by_domain.items() if not math.isfinite(value))
                cure = "lower the learning rate; the last checkpoint is kept"
                raise DivergedError(step + 1, f"the loss of {worst} is not finite", cure, metrics)
            if signals:
                # Nothing was updated: the state is that of the step's beginning, which may be on disk already.
                if step != saved:
                    save(step)
                raise StoppedError(f"step {step}", "a signal stopped training; its state is saved", "rerun to go on")
            norm = sync.clip(optimization.clip, scale)
            skipped = not math.isfinite(norm)
            if skipped and dtype != torch.float16:
                raise DivergedError(step + 1, "the gradient is not finite", "lower the learning rate", metrics)
            if not skipped:
                optimizer.step()
            unscathed = 0 if skipped else unscathed + 1
            if skipped or unscathed == GROW_AFTER:
                scale, unscathed = scale * (0.5 if skipped else 2.0), 0
            if scale < LAST_SCALE and dtype == torch.float16:
                cause = "fp16 overflows at any scale of the loss"
                raise DivergedError(step + 1, cause, "use bf16 or fp32, or a lower learning rate", metrics)

            now = time.monotonic()
            record(
                {
                    "step": step + 1,
                    "tokens": _tokens(metrics) + batches.tokens,
                    "loss": sum(totals) / batches.tokens,
                    "learning_rate": learning_rate_at(step, optimization),
                    "gradient_norm": norm if not skipped else None,
                    "tokens_per_second": batches.tokens / (now - begun),
                }
                | ({"loss_scale": scale} if dtype == torch.float16 else {})
                | ({"synced_bytes": sync.sent - sent} if world.size > 1 else {})
                | {f"loss/{name}": value for name, value in by_domain.items()}
            )
            sent = sync.sent
            row = metrics[-1]
            advance(1, f"loss {row['loss']:.3f}  norm {norm:.2f}  {row['tokens_per_second']:.0f} tokens/s")
        sync.close()
        if best:
            with torch.no_grad():
                for name, parameter in trained.items():
                    parameter.copy_(best[name])
        return metrics


def _backward(
    model: GPT,
    batches: Batches,
    step: int,
    domains: Sequence[str],
    dtype: torch.dtype,
    scale: float,
    micro: int | None,
    sync: GradientSync,
) -> list[float]:
    """Add up this rank's gradients of the mean loss over the whole step, times `scale`, and begin to send them.

    Returns the sum of losses and the number of tokens of each domain on this rank: 2 * len(domains) numbers.
    """
    batch = batches.draw(step)
    sequences = batch.inputs.shape[1]
    sums = torch.zeros(2, len(domains), dtype=torch.float64, device=sync.world.device)
    for start in range(0, sequences, micro or sequences):
        part = batch.part(start, start + (micro or sequences)).to(sync.world.device)
        if start + (micro or sequences) >= sequences:
            sync.begin()
        hidden = model(part.inputs, part.domains if model.domain_tokens else None, dtype)
        losses = -model.log_probabilities(hidden, part.targets)  # [E, B, T]
        (losses.sum() * (scale / batches.tokens)).backward()
        numbers = part.domains.flatten()
        sums[0].index_add_(0, numbers, losses.detach().sum(-1, dtype=torch.float64).flatten())
        sums[1].index_add_(0, numbers, torch.full_like(numbers, losses.shape[-1], dtype=torch.float64))
    return sums.flatten().tolist()


@contextmanager
def _signals() -> Iterator[Callable[[], int]]:
    """Note SIGTERM, SIGUSR2 and SIGINT instead of dying of them; yields how many have come. A second SIGINT kills."""
    came: list[int] = []

    def note(number: int, _: object) -> None:
        if number == signal.SIGINT and came:
            raise KeyboardInterrupt
        came.append(number)
        log.info("%s: saving the state after this step", signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)}
    try:
        yield lambda: len(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _recorder(metrics: list[dict], path: Path | None) -> Callable[[dict], None]:
    """What appends a row to `metrics`, and to the file `path` for who watches; the file begins with the rows so far."""
    if path is None:
        return metrics.append
    write_text(path, _lines(metrics))

    def record(row: dict) -> None:
        metrics.append(row)
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise cannot_be_written(path, error) from error

    return record


def write_metrics(path: Path, metrics: list[dict]) -> None:
    """Write metrics rows as JSON lines with their seal."""
    write_json_lines(path, metrics)


def _lines(metrics: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in metrics)


def _is_expert(name: str) -> bool:
    return ".feedforward." in name


def _tokens(metrics: list[dict]) -> int:
    return metrics[-1]["tokens"] if metrics else 0


def _evaluated(metrics: list[dict], step: int) -> bool:
    return any(row["step"] == step and "early_stopping_loss" in row for row in metrics[-2:])


def _best_so_far(metrics: list[dict]) -> tuple[float, int]:
    losses = [row["early_stopping_loss"] for row in metrics if "early_stopping_loss" in row]
    if not losses:
        return math.inf, 0
    return min(losses), len(losses) - 1 - losses.index(min(losses))


def _state(
    trained: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, best: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    tensors = {f"parameter/{name}": p.detach() for name, p in trained.items()}
    for name, parameter in trained.items():
        tensors |= {f"optimizer/{key}/{name}": value for key, value in optimizer.state[parameter].items()}
    return tensors | {f"best/{name}": value for name, value in best.items()}


def _parted(
    tensors: dict[str, torch.Tensor], experts: Sequence[str]
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """A state's tensors that all ranks hold alike, and each expert's slices of the stacked ones."""
    shared = {name: tensor for name, tensor in tensors.items() if not _is_stacked(name)}
    return shared, {
        expert: {name: tensor[number] for name, tensor in tensors.items() if _is_stacked(name)}
        for number, expert in enumerate(experts)
    }


def _stacked(state: State, experts: Sequence[str]) -> dict[str, torch.Tensor]:
    """What `_parted` parted."""
    names = state.experts[experts[0]]
    return state.shared | {name: torch.stack([state.experts[expert][name] for expert in experts]) for name in names}


def _is_stacked(name: str) -> bool:
    # Adam's number of updates is one for all experts.
    return _is_expert(name) and not name.startswith("optimizer/step/")


def _restore(
    tensors: dict[str, torch.Tensor], trained: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Put a saved state into parameters and optimizer; returns the best parameters so far."""
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(tensors[f"parameter/{name}"])
            if f"optimizer/step/{name}" in tensors:
                optimizer.state[parameter] = {
                    key: tensors[f"optimizer/{key}/{name}"].to(parameter.device)
                    for key in ("step", "exp_avg", "exp_avg_sq")
                }
    return {name: tensors[f"best/{name}"].to(p.device) for name, p in trained.items() if f"best/{name}" in tensors}
