"""The training loop of all models and adaptations."""

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from demix.errors import StoppedError
from demix.model.device import compute_type, within_memory
from demix.model.gpt import GPT
from demix.model.moe import RouterLoss, router_metrics
from demix.model.transformer import Dropout
from demix.progress import progress
from demix.train.batches import Batches
from demix.train.learner import Learner
from demix.train.metrics import DivergedError, Row
from demix.train.parallel import GradientSync, World
from demix.train.schedule import Optimization
from demix.train.state import State, training_lock

log = logging.getLogger(__name__)

MEMORY_CURE = (
    "set micro_sequences to 1 and checkpoint_activations, with more ranks shard_optimizer, or use more ranks; "
    "`demix plan` says what a rank takes"
)

# Returns the loss on dev, equal on all ranks, and named losses for the metrics (nats per token).
Evaluation = Callable[[GPT], tuple[float, dict[str, float]]]


def train(
    model: GPT,
    batches: Batches,
    domains: Sequence[str],
    optimization: Optimization,
    checkpoints: Path,
    *,
    world: World | None = None,
    first: State | None = None,
    evaluate: Evaluation | None = None,
) -> list[Row]:
    """Train this rank's part of a model in place on `batches` of the named `domains`.

    Returns the rows of metrics, one per step and one per evaluation. Training resumes from the newest complete
    checkpoint below `checkpoints`. Without a checkpoint it begins with the state `first` at the step of that state, or
    with the model as it is. Parameters that require no gradient keep their exact bits. `evaluate` is called at every
    checkpoint, or as often as early stopping asks for; the model then ends with the parameters of the lowest loss.

    Raises DivergedError on every rank when a loss or gradient is not finite; the update is then not applied. Raises
    StoppedError after SIGTERM, SIGUSR2 or SIGINT, with the state saved.
    """
    world = world or World()
    with training_lock(checkpoints, world), _signals() as signalled, within_memory("training", MEMORY_CURE):
        learner = Learner(model, optimization, checkpoints, world)
        sync = GradientSync(learner.trained, model.owned, world)
        begin, end = learner.resume(first), optimization.end
        best, scale, metrics = learner.best, learner.scale, learner.metrics
        measured = "early_stopping_loss" if best else "dev_loss"
        with progress("step", end, begin) as advance:
            for step in range(begin, end + 1):
                last, due = step == end, step > begin and step % optimization.checkpoint_every == 0
                dev_loss = None
                if last:
                    # Until the results are written, a training that is killed goes on from here.
                    learner.save(step)
                if evaluate and (best.due(step, last) if best else last or due):
                    dev_loss, more = evaluate(model)
                    _refuse_infinite({"the dev split": dev_loss}, step, metrics.rows)
                    metrics.record({"step": step, "tokens": metrics.tokens, measured: dev_loss} | more)
                    if best:
                        best.note(step, dev_loss)
                ends = last or (best is not None and best.ends)
                if due or ends or step in optimization.keep:
                    learner.save(step, None if best else dev_loss)
                if ends:
                    break

                begun, rate = time.monotonic(), optimization.learning_rate_at(step)
                sync.zero()
                sums = _backward(model, batches, step, len(domains), optimization, scale.factor, sync)
                *sums, signals = world.sum([*sums, signalled()])
                sync.finish()
                losses = _Losses.of(sums, domains)
                _refuse_infinite(losses.by_domain, step + 1, metrics.rows)
                if signals:
                    # This step updated nothing, so the state is that of the step's start.
                    learner.save(step)
                    cause = "a signal stopped training; its state is saved"
                    raise StoppedError(f"step {step}", cause, "rerun to continue")
                norm = sync.clip(optimization.clip, scale.factor)
                learner.update(step, norm, rate)

                speed = batches.tokens / (time.monotonic() - begun)
                row = {
                    "step": step + 1,
                    "tokens": metrics.tokens + batches.tokens,
                    "loss": losses.total / (batches.targets or batches.tokens),
                    "learning_rate": rate,
                    "gradient_norm": norm if math.isfinite(norm) else None,
                    "tokens_per_second": speed,
                }
                sent = {"synced_bytes": sync.sent} if world.size > 1 else {}
                metrics.record(row | scale.metrics | sent | losses.metrics)
                advance(1, f"loss {row['loss']:.3f}  norm {norm:.2f}  {speed:.0f} tokens/s")
        sync.close()
        if best:
            best.take()
        return metrics.rows


@dataclass(frozen=True)
class _Losses:
    """The losses of a step over all ranks, in nats: their sum, and each domain's mean. `routed` has routers' counts."""

    total: float
    by_domain: dict[str, float]
    routed: list[float]

    @classmethod
    def of(cls, sums: Sequence[float], domains: Sequence[str]) -> "_Losses":
        """The losses from the sums of `_backward` over all ranks."""
        number = len(domains)
        totals, counts = sums[:number], sums[number : 2 * number]
        by_domain = {name: total / n for name, total, n in zip(domains, totals, counts, strict=True) if n}
        return cls(sum(totals), by_domain, [*sums[2 * number :]])

    @property
    def metrics(self) -> Row:
        """What a row of metrics says of them."""
        routers = router_metrics(self.routed) if self.routed else {}
        return {f"loss/{name}": value for name, value in self.by_domain.items()} | routers


def _refuse_infinite(losses: Mapping[str, float], step: int, rows: list[Row]) -> None:
    """Raise DivergedError if one of the `losses` of update `step` (from 1), after those of `rows`, is not finite."""
    if worst := ", ".join(name for name, value in losses.items() if not math.isfinite(value)):
        cure = "lower the learning rate; the last checkpoint is kept"
        raise DivergedError(step, f"the loss of {worst} is not finite", cure, rows)


def _backward(
    model: GPT,
    batches: Batches,
    step: int,
    domains: int,
    optimization: Optimization,
    scale: float,
    sync: GradientSync,
) -> list[float]:
    """Accumulate this rank's gradients of the step's mean loss, times `scale`, and begin to send them.

    Returns 2 * `domains` numbers for this rank: the sum of losses of each domain, then the number of targets of
    each domain. The counts of routers follow (`router_metrics`), where a layer has one.
    """
    batch, dtype = batches.draw(step), compute_type(optimization.precision)
    sequences = batch.inputs.shape[1]
    micro = optimization.micro_sequences or sequences
    sums = torch.zeros(2, domains, dtype=torch.float64, device=sync.world.device)
    counted: list[Tensor] = []
    for start in range(0, sequences, micro):
        part = batch.part(start, start + micro)
        dropout = Dropout(optimization.dropout, part.seeds.tolist()) if optimization.dropout else None
        part = part.to(sync.world.device)
        if start + micro >= sequences:
            sync.begin()
        auxiliary: list[RouterLoss] = []
        told = part.domains if model.domain_tokens else None
        hidden = model(part.inputs, told, dtype, auxiliary=auxiliary, dropout=dropout)
        if part.places is not None:
            hidden = hidden.take_along_dim(part.places[..., None], 2)
        losses = -model.log_probabilities(hidden, part.targets, optimization.z_loss or 0.0)  # [E, B, T or M]
        counts = torch.full_like(part.domains, losses.shape[-1], dtype=torch.float64)  # [E, B]
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
