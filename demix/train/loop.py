"""The training loop of all models and adaptations."""

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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from demix.config.training import Execution, LearningRate, Optimizer
from demix.errors import DemixError, StoppedError
from demix.files import cannot_be_written, write_json_lines, write_text
from demix.model.device import compute_type
from demix.model.gpt import GPT
from demix.model.layers import Auxiliary, router_metrics
from demix.progress import progress
from demix.settings import Integer, Positive, settings
from demix.train.adam import AdamW
from demix.train.batches import Batches
from demix.train.parallel import GradientSync, World
from demix.train.state import State, newest_state, save_state, training_lock

log = logging.getLogger(__name__)

Row = dict[str, Any]
# Returns the loss on dev, equal on all ranks, and named losses for the metrics (nats per token).
Evaluation = Callable[[GPT], tuple[float, dict[str, float]]]

# The scale of the loss in fp16: halved when gradients overflow, doubled after GROW_AFTER updates without overflow.
FIRST_SCALE, LAST_SCALE, GROW_AFTER = 2.0**16, 2.0**-4, 1000


class DivergedError(DemixError):
    """A loss or gradient is not finite in update `step` (from 1). `metrics` holds the rows of the earlier updates."""

    def __init__(self, step: int, cause: str, cure: str, metrics: list[Row]):
        self.step, self.metrics = step, metrics
        super().__init__(f"step {step}", cause, cure)


@settings(kw_only=True)
class Optimization(Execution, Optimizer):
    """How parameters are updated in `steps` optimizer updates, and how the updates are computed.

    The states after the numbers of updates in `keep` are saved and never removed. The schedule of the learning rate
    begins at update `begin`.
    """

    steps: Positive
    learning_rate: LearningRate
    keep: tuple[Positive, ...] = ()
    begin: Integer = 0


@dataclass(frozen=True)
class EarlyStopping:
    """Evaluate on dev every `every` steps, and stop after `patience` evaluations without a new lowest loss."""

    every: int
    patience: int


def learning_rate_at(step: int, optimization: Optimization) -> float:
    """The learning rate of update `step` (from 0): linear warm-up from `begin`, then linear decay to 0 at `steps`."""
    step, steps = step - optimization.begin, optimization.steps - optimization.begin
    warmup = math.ceil(optimization.warmup * steps)
    if step < warmup:
        return optimization.learning_rate * (step + 1) / warmup
    return optimization.learning_rate * (steps - step) / max(1, steps - warmup)


def train(
    model: GPT,
    batches: Batches,
    domains: Sequence[str],
    optimization: Optimization,
    checkpoints: Path,
    *,
    world: World | None = None,
    first: State | None = None,
    until: int | None = None,
    only: Callable[[str], bool] = lambda name: True,
    evaluate: Evaluation | None = None,
    stopping: EarlyStopping | None = None,
) -> list[Row]:
    """Train this rank's part of a model in place on `batches` of the named `domains`.

    Returns the rows of metrics, one per step and one per evaluation. Training resumes from the newest complete
    checkpoint below `checkpoints`. Without a checkpoint it begins with the state `first` at the step of that state, or
    with the model as it is. It ends after `until` updates, by default after all. `only` chooses the trained parameters
    by name; all other parameters keep their exact bits. `evaluate` is called at every checkpoint, or, with `stopping`,
    every `stopping.every` steps. With `stopping`, the model ends with the parameters of the lowest loss.

    Raises DivergedError on every rank when a loss or gradient is not finite; the update is then not applied. Raises
    StoppedError after SIGTERM, SIGUSR2 or SIGINT, with the state saved.
    """
    world = world or World()
    with training_lock(checkpoints, world), _signals() as signalled, ExitStack() as running:
        dtype = compute_type(optimization.precision)
        model.to(device=world.device, dtype=torch.float64 if dtype == torch.float64 else None)
        trained = {name: p for name, p in model.named_parameters() if only(name)}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        model.checkpoint_activations = optimization.checkpoint_activations
        if optimization.compile:
            model.compile_blocks()
        sync = GradientSync(trained, model.owned, world)
        optimizer = AdamW(trained.values(), optimization.weight_decay)
        metrics: list[Row] = []
        best: dict[str, Tensor] = {}
        begin, best_loss, since_best = 0, math.inf, 0
        scale, unscathed = FIRST_SCALE if dtype == torch.float16 else 1.0, 0
        resumed = newest_state(checkpoints, model.experts, world)
        if state := resumed or first:
            begin, metrics = state.step, [*state.metrics]
            best = _restore(model.stacked(state.shared, state.experts), trained, optimizer)
            best_loss, since_best = _best_so_far(metrics)
            scales = [scale, *(row["loss_scale"] for row in metrics if "loss_scale" in row)]
            scale, unscathed = scales[-1], next(iter(np.flatnonzero(np.diff(scales[::-1])).tolist()), len(scales) - 1)
            log.info("resuming at step %d of %d", begin, until or optimization.steps)

        record = _recorder(metrics, checkpoints / "metrics.jsonl" if world.rank == 0 else None)

        def save(step: int, dev_loss: float | None = None) -> None:
            tensors = _state(trained, optimizer, best)
            # Adam counts its updates once for all experts.
            updates = {name: tensors.pop(name) for name in [*tensors] if name.startswith("optimizer/step/")}
            shared, experts = model.parted(tensors)
            whole = State(step, shared | updates, experts, metrics, dev_loss)
            save_state(checkpoints, whole, world, optimization.keep_checkpoints, optimization.keep)

        sent, saved, end = 0, resumed.step if resumed else None, until or optimization.steps
        advance = running.enter_context(progress("step", end, begin))
        for step in range(begin, end + 1):
            if evaluate and stopping and (step % stopping.every == 0 or step == end) and not _evaluated(metrics, step):
                loss, more = evaluate(model)
                record({"step": step, "tokens": _tokens(metrics), "early_stopping_loss": loss} | more)
                since_best += 1
                if loss < best_loss:
                    best_loss, since_best = loss, 0
                    best = {name: p.detach().clone() for name, p in trained.items()}
                if since_best >= stopping.patience:
                    log.info("stopping at step %d: no better dev loss in %d evaluations", step, since_best)
                    break
            last, due = step == end, step > begin and step % optimization.checkpoint_every == 0
            dev_loss = None
            if evaluate and not stopping and (last or due):
                dev_loss, more = evaluate(model)
                record({"step": step, "tokens": _tokens(metrics), "dev_loss": dev_loss} | more)
            if (due and not last) or (step in optimization.keep and step != saved):
                save(step, dev_loss)
                saved = step
            if last:
                break

            begun = time.monotonic()
            sync.zero()
            losses = _backward(model, batches, step, domains, dtype, scale, optimization.micro_sequences, sync)
            *losses, signals = world.sum([*losses, signalled()])
            sync.finish()
            number = len(domains)
            totals, counts, routed = losses[:number], losses[number : 2 * number], losses[2 * number :]
            by_domain = {name: total / n for name, total, n in zip(domains, totals, counts, strict=True) if n}
            if not math.isfinite(sum(totals)):
                worst = ", ".join(name for name, value in by_domain.items() if not math.isfinite(value))
                cure = "lower the learning rate; the last checkpoint is kept"
                raise DivergedError(step + 1, f"the loss of {worst} is not finite", cure, metrics)
            if signals:
                # This step updated nothing, so the state is that of the step's start, which may be on disk already.
                if step != saved:
                    save(step)
                raise StoppedError(f"step {step}", "a signal stopped training; its state is saved", "rerun to continue")
            norm = sync.clip(optimization.clip, scale)
            skipped = not math.isfinite(norm)
            if skipped and dtype != torch.float16:
                raise DivergedError(step + 1, "the gradient is not finite", "lower the learning rate", metrics)
            if not skipped:
                optimizer.step(learning_rate_at(step, optimization))
            unscathed = 0 if skipped else unscathed + 1
            if skipped or unscathed == GROW_AFTER:
                scale, unscathed = scale * (0.5 if skipped else 2.0), 0
            if scale < LAST_SCALE and dtype == torch.float16:
                cause = "fp16 overflows at every scale of the loss"
                raise DivergedError(step + 1, cause, "use bf16 or fp32, or a lower learning rate", metrics)

            now = time.monotonic()
            record(
                {
                    "step": step + 1,
                    "tokens": _tokens(metrics) + batches.tokens,
                    "loss": sum(totals) / (batches.targets or batches.tokens),
                    "learning_rate": learning_rate_at(step, optimization),
                    "gradient_norm": norm if not skipped else None,
                    "tokens_per_second": batches.tokens / (now - begun),
                }
                | ({"loss_scale": scale} if dtype == torch.float16 else {})
                | ({"synced_bytes": sync.sent - sent} if world.size > 1 else {})
                | {f"loss/{name}": value for name, value in by_domain.items()}
                | (router_metrics(routed) if routed else {})
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
    """Accumulate this rank's gradients of the step's mean loss, times `scale`, and begin to send them.

    Returns 2 * len(domains) numbers for this rank: the sum of losses of each domain, then the sum of the targets'
    weights of each domain. The counts of routers follow (`router_metrics`), where a layer has one.
    """
    batch = batches.draw(step)
    sequences = batch.inputs.shape[1]
    sums = torch.zeros(2, len(domains), dtype=torch.float64, device=sync.world.device)
    counted: list[Tensor] = []
    for start in range(0, sequences, micro or sequences):
        part = batch.part(start, start + (micro or sequences)).to(sync.world.device)
        if start + (micro or sequences) >= sequences:
            sync.begin()
        auxiliary: list[Auxiliary] = []
        hidden = model(part.inputs, part.domains if model.domain_tokens else None, dtype, auxiliary=auxiliary)
        if part.places is not None:
            hidden = hidden.take_along_dim(part.places[..., None], 2)
        losses = -model.log_probabilities(hidden, part.targets)  # [E, B, T or M]
        counts = torch.full_like(part.domains, losses.shape[-1], dtype=torch.float64)  # [E, B]
        if part.weights is not None:
            losses, counts = losses * part.weights, part.weights.sum(-1, dtype=torch.float64)
        loss = losses.sum() * (scale / (batches.targets or batches.tokens))
        for each in auxiliary:
            # The auxiliary loss counts as its mean over the sequences of the step.
            loss = loss + each.losses.sum() * (scale * part.inputs.shape[-1] / batches.tokens)
        counted += [each.counts for each in auxiliary if each.counts is not None]
        torch.autograd.backward(loss)
        numbers = part.domains.flatten()
        sums[0].index_add_(0, numbers, losses.detach().sum(-1, dtype=torch.float64).flatten())
        sums[1].index_add_(0, numbers, counts.flatten())
    routers = torch.stack(counted).sum(0).tolist() if counted else []
    return [*sums.flatten().tolist(), *routers]


@contextmanager
def _signals() -> Iterator[Callable[[], int]]:
    """Count SIGTERM, SIGUSR2 and SIGINT instead of ending at once; a second SIGINT ends the process.

    Yields a function that returns the count.
    """
    received: list[int] = []

    def note(number: int, _: object) -> None:
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)
        log.info("%s: saving the state after this step", signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)}
    try:
        yield lambda: len(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _recorder(metrics: list[Row], path: Path | None) -> Callable[[Row], None]:
    """A function that appends a row to `metrics` and to the file `path`, which starts with the rows so far."""
    if path is None:
        return metrics.append
    write_text(path, _lines(metrics))

    def record(row: Row) -> None:
        metrics.append(row)
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise cannot_be_written(path, error) from error

    return record


def write_metrics(path: Path, metrics: list[Row]) -> None:
    """Write rows of metrics as JSON lines with a seal."""
    write_json_lines(path, metrics)


def _lines(metrics: list[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in metrics)


def _tokens(metrics: list[Row]) -> int:
    return metrics[-1]["tokens"] if metrics else 0


def _evaluated(metrics: list[Row], step: int) -> bool:
    return any(row["step"] == step and "early_stopping_loss" in row for row in metrics[-2:])


def _best_so_far(metrics: list[Row]) -> tuple[float, int]:
    losses = [row["early_stopping_loss"] for row in metrics if "early_stopping_loss" in row]
    if not losses:
        return math.inf, 0
    return min(losses), len(losses) - 1 - losses.index(min(losses))


def _state(trained: dict[str, torch.nn.Parameter], optimizer: AdamW, best: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors = {f"parameter/{name}": p.detach() for name, p in trained.items()}
    for name, parameter in trained.items():
        tensors |= {f"optimizer/{key}/{name}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return tensors | {f"best/{name}": value for name, value in best.items()}


def _restore(tensors: dict[str, Tensor], trained: dict[str, torch.nn.Parameter], optimizer: AdamW) -> dict[str, Tensor]:
    """Copy a saved state into the parameters and the optimizer; returns the best parameters so far."""
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(tensors[f"parameter/{name}"])
            if f"optimizer/step/{name}" in tensors:
                optimizer.state[parameter] = {
                    key: tensors[f"optimizer/{key}/{name}"].to(parameter.device)
                    for key in ("step", "exp_avg", "exp_avg_sq")
                }
    return {name: tensors[f"best/{name}"].to(p.device) for name, p in trained.items() if f"best/{name}" in tensors}
