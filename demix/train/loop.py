"""The training loop of all models and adaptations."""

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from demix.data.shards import TokenShard, blocks
from demix.errors import DemixError, StoppedError
from demix.model.device import within_memory
from demix.model.gpt import GPT
from demix.model.moe import RouterLoss, router_metrics
from demix.model.scoring import log_probabilities
from demix.model.transformer import Dropout
from demix.progress import progress
from demix.train.batches import Batches
from demix.train.parallel import World
from demix.train.schedule import Optimization
from demix.train.state import Row, State, training_lock
from demix.train.trainer import DivergedError, Trainer

log = logging.getLogger(__name__)

MEMORY_CURE = (
    "set micro_sequences: 1 and checkpoint_activations, with several ranks also shard_optimizer, or use more ranks; "
    "`demix plan` prints the memory that a rank needs"
)

# A function that returns the dev loss, equal on all ranks, and named losses for the metrics (nats per token).
Evaluation = Callable[[GPT], tuple[float, dict[str, float]]]


def dev_losses(
    measured: Mapping[str, tuple[TokenShard, int]],
    world: World,
    whole: Callable[[Sequence[float]], float],
    mine: Callable[[GPT, str], bool] | None = None,
    known: Mapping[str, float] = MappingProxyType({}),
) -> Evaluation:
    """The evaluation on the first blocks of each domain's dev split.

    `whole` computes the total loss from the domains' losses. A rank evaluates the domains in `mine`; by default the
    ranks alternate. `known` losses are added unchanged.
    """

    def evaluate(model: GPT) -> tuple[float, dict[str, float]]:
        own = [
            dev_loss(model, *which, name) if (mine(model, name) if mine else world.owns(number)) else 0.0
            for number, (name, which) in enumerate(measured.items())
        ]
        losses = world.sum(own)
        named = {f"dev_loss/{name}": loss for name, loss in zip(measured, losses, strict=True)}
        return whole(losses), named | {f"dev_loss/{name}": loss for name, loss in known.items()}

    return evaluate


def dev_loss(model: GPT, shard: TokenShard, count: int, domain: str) -> float:
    """Mean nats per token over the first `count` blocks of a dev split, under the expert or domain token of `domain`.

    A model with one expert is evaluated with that expert.
    """
    if not len(shard):
        raise DemixError(shard.path, "holds no token to measure a loss on", "give the domain more dev text")
    length = model.architecture.context
    if len(model.experts) > 1:
        model = model.only(domain)
    (scored,) = log_probabilities(model, *blocks(shard, length, count * length), domain_tokens=(domain,))
    return float(-scored.mean())


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
    checkpoint below `checkpoints`. Without a checkpoint it starts from the state `first` at the step of that state, or
    from the model as it is. Parameters that require no gradient keep their exact bits. `evaluate` is called at every
    checkpoint, or, with early stopping, at its interval; the model then ends with the parameters of the lowest loss.

    Raises DivergedError on every rank when a loss or gradient is not finite; the update is then not applied. Raises
    StoppedError after SIGTERM, SIGUSR2 or SIGINT, with the state saved.
    """
    world = world or World()
    with training_lock(checkpoints, world), _signals() as signalled, within_memory("training", MEMORY_CURE):
        trainer = Trainer(model, optimization, checkpoints, world)
        begin, end = trainer.resume(first), optimization.end
        with progress("step", end, begin) as advance:
            for number in range(begin, end + 1):
                if _evaluate_and_save(trainer, number, number > begin, evaluate):
                    break
                row = step(trainer, batches, domains, number, signalled)
                norm = math.inf if row["gradient_norm"] is None else row["gradient_norm"]
                speed = f"{row['tokens_per_second']:.0f} tokens/s"
                advance(1, f"loss {row['loss']:.3f}  norm {norm:.2f}  {speed}")
        if trainer.best:
            trainer.best.restore()
        return trainer.metrics.rows


def _evaluate_and_save(trainer: Trainer, step: int, trained: bool, evaluate: Evaluation | None) -> bool:
    """Evaluate the model and save the state after `step` updates, if either is due. Returns whether training ends.

    `trained` is whether this process has done an update.
    """
    best, optimization, metrics = trainer.best, trainer.optimization, trainer.metrics
    last, due = step == optimization.end, trained and step % optimization.checkpoint_every == 0
    if last:
        # If a training is killed before the results are written, it resumes from here.
        trainer.save(step)
    if evaluate and (best.due(step, last) if best else last or due):
        dev_loss, more = evaluate(trainer.model)
        _check_finite({"the dev split": dev_loss}, step, metrics.rows)
        measured = "early_stopping_loss" if best else "dev_loss"
        metrics.record({"step": step, "tokens": metrics.tokens, measured: dev_loss} | more)
        if best:
            best.note(step, dev_loss)
    ends = last or (best is not None and best.ends)
    if due or ends or step in optimization.keep:
        trainer.save(step)
    return ends


def step(trainer: Trainer, batches: Batches, domains: Sequence[str], number: int, signalled: Callable[[], int]) -> Row:
    """Do update `number` (from 0): draw the batch, sum gradients over micro-batches and ranks, update.

    Returns its row of metrics. All ranks call this function. If `signalled` is not 0 on one of them, saves the state at
    the beginning of the step and raises StoppedError.
    """
    begun, sync, metrics = time.monotonic(), trainer.sync, trainer.metrics
    sync.zero()
    *sums, signals = trainer.world.sum([*_backward(trainer, batches, number, len(domains)), signalled()])
    sync.finish()
    losses, targets, routers = sums[: len(domains)], sums[len(domains) : 2 * len(domains)], sums[2 * len(domains) :]
    of_domains = {name: loss / n for name, loss, n in zip(domains, losses, targets, strict=True) if n}
    _check_finite(of_domains, number + 1, metrics.rows)
    if signals:
        trainer.save(number)
        raise StoppedError(f"step {number}", "a signal stopped training; its state is saved", "rerun to continue")
    norm = trainer.update(number)
    row = {
        "step": number + 1,
        "tokens": metrics.tokens + batches.tokens,
        "loss": sum(losses) / (batches.targets or batches.tokens),
        "learning_rate": trainer.optimization.learning_rate_at(number),
        "gradient_norm": norm if math.isfinite(norm) else None,
        "tokens_per_second": batches.tokens / (time.monotonic() - begun),
    }
    row |= trainer.scale.metrics | ({"synced_bytes": sync.sent} if trainer.world.size > 1 else {})
    row |= {f"loss/{name}": value for name, value in of_domains.items()}
    row |= router_metrics(routers) if routers else {}
    metrics.record(row)
    return row


def _backward(trainer: Trainer, batches: Batches, step: int, domains: int) -> list[float]:
    """Accumulate this rank's gradients of the step's mean loss, times the scale, and begin to send them.

    Returns 2 * `domains` numbers for this rank: the sum of losses of each domain, then the number of targets of
    each domain. If a layer has a router, its counts follow (`router_metrics`).
    """
    model, optimization, sync = trainer.model, trainer.optimization, trainer.sync
    batch, scale = batches.draw(step), trainer.scale.factor
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
        prefix = part.domains if model.domain_tokens else None
        hidden = model(part.inputs, prefix, trainer.dtype, auxiliary=auxiliary, dropout=dropout)
        if part.places is not None:
            hidden = hidden.take_along_dim(part.places[..., None], 2)
        losses = -model.log_probabilities(hidden, part.targets)  # [E, B, T or M]
        counts = torch.full_like(part.domains, losses.shape[-1], dtype=torch.float64)  # [E, B]
        loss = losses.sum() * (scale / (batches.targets or batches.tokens))
        for each in auxiliary:
            # The auxiliary loss is averaged over the sequences of the step.
            loss = loss + each.losses.sum() * (scale * part.inputs.shape[-1] / batches.tokens)
        counted += [each.counts for each in auxiliary]
        torch.autograd.backward(loss)
        numbers = part.domains.flatten()
        sums[0].index_add_(0, numbers, losses.detach().sum(-1, dtype=torch.float64).flatten())
        sums[1].index_add_(0, numbers, counts.flatten())
    routers = torch.stack(counted).sum(0).tolist() if counted else []
    return [*sums.flatten().tolist(), *routers]


def _check_finite(losses: Mapping[str, float], step: int, rows: list[Row]) -> None:
    """Raise DivergedError if one of the `losses` of update `step` (from 1) is not finite; `rows`: earlier metrics."""
    if worst := ", ".join(name for name, value in losses.items() if not math.isfinite(value)):
        cure = "lower the learning rate; the last checkpoint is kept"
        raise DivergedError(step, f"the loss of {worst} is not finite", cure, rows)


@contextmanager
def _signals() -> Iterator[Callable[[], int]]:
    """Count SIGTERM, SIGUSR2 and SIGINT instead of ending immediately; a second SIGINT ends the process.

    Yields a function that returns the count.
    """
    received: list[int] = []

    def note(number: int, _: object) -> None:
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)
        log.info("%s: saving the state after this step", signal.Signals(number).name)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)}
    try:
        yield lambda: len(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
