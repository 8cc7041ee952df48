"""The training loop: one for every model and adaptation, from top to bottom."""

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from demix.errors import DemixError
from demix.files import write_text
from demix.model.gpt import GPT
from demix.train.batches import Batch, Batches
from demix.train.state import newest_state, save_state

log = logging.getLogger(__name__)

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Optimization:
    """How parameters are updated (paper, Tables 9-12). `steps` are optimizer updates, `warmup` a share of them."""

    steps: int
    learning_rate: float
    warmup: float
    clip: float
    weight_decay: float
    precision: str
    checkpoint_every: int


@dataclass(frozen=True)
class EarlyStopping:
    """Evaluate on dev every `every` steps; stop after `patience` evaluations without a new best."""

    every: int
    patience: int


def compute_type(precision: str) -> torch.dtype:
    """The type that a config's `precision` names."""
    if precision not in PRECISIONS:
        raise DemixError(f"precision {precision}", "is not known", f"use one of {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def set_threads(threads: int) -> None:
    """Let torch use so many CPU threads; results depend on it in their last bits."""
    if threads < 1:
        raise DemixError("threads", f"is {threads}", "give 1 or more")
    torch.set_num_threads(threads)


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
    only: Callable[[str], bool] = lambda name: True,
    evaluate: Callable[[GPT], tuple[float, dict[str, float]]] | None = None,
    stopping: EarlyStopping | None = None,
) -> list[dict]:
    """Train `model` in place on `batches` of the named `domains`; returns one metrics row per step.

    Resumes from the newest complete checkpoint below `checkpoints`. `only` chooses parameters by name; the
    others stay as they are to the bit. With `stopping`, `evaluate(model)` gives the dev loss to stop by and
    further dev losses by domain (nats per token); the model ends with the parameters of the lowest one.
    Raises DemixError, before the update, when a loss is not finite.
    """
    dtype = compute_type(optimization.precision)
    trained = {name: p.requires_grad_() for name, p in model.named_parameters() if only(name)}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    # Weight decay reaches norms and biases too, as in the paper's fairseq.
    optimizer = torch.optim.AdamW(
        trained.values(), betas=(0.9, 0.95), eps=1e-7, weight_decay=optimization.weight_decay, fused=True
    )
    first, metrics, best, best_loss, since_best = 0, [], {}, math.inf, 0
    if found := newest_state(checkpoints):
        first, tensors, metrics = found
        best = _restore(tensors, trained, optimizer)
        best_loss, since_best = _best_so_far(metrics)
        log.info("resuming at step %d of %d", first, optimization.steps)

    started = said = time.monotonic()
    for step in range(first, optimization.steps + 1):
        if stopping and (step % stopping.every == 0 or step == optimization.steps) and not _evaluated(metrics, step):
            loss, by_domain = evaluate(model)
            metrics.append({"step": step, "tokens": _tokens(metrics), "early_stopping_loss": loss} | by_domain)
            since_best += 1
            if loss < best_loss:
                best_loss, since_best = loss, 0
                best = {name: p.detach().clone() for name, p in trained.items()}
            if since_best >= stopping.patience:
                log.info("stopping at step %d: no better dev loss in %d evaluations", step, since_best)
                break
        if step == optimization.steps:
            break
        if step > first and step % optimization.checkpoint_every == 0:
            save_state(checkpoints, step, _state(trained, optimizer, best), metrics)

        begun = time.monotonic()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, optimization)
        batch = batches(step)
        losses = -model.log_probabilities(
            model(batch.inputs, batch.domains if model.domain_tokens else None, dtype), batch.targets
        )  # [E, B, T]
        loss = losses.mean()
        by_domain = _loss_by_domain(losses.detach(), batch, domains)
        if not math.isfinite(loss.item()):
            worst = [name for name, value in by_domain.items() if not math.isfinite(value)]
            raise DemixError(
                f"step {step + 1}", f"the loss of {', '.join(worst) or 'all'} is not finite", "lower the learning rate"
            )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), optimization.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

        now = time.monotonic()
        metrics.append(
            {
                "step": step + 1,
                "tokens": _tokens(metrics) + batch.targets.numel(),
                "loss": loss.item(),
                "learning_rate": learning_rate_at(step, optimization),
                "gradient_norm": norm.item(),
                "tokens_per_second": batch.targets.numel() / (now - begun),
            }
            | {f"loss/{name}": value for name, value in by_domain.items()}
        )
        if now - said > SECONDS_BETWEEN_LINES:
            said, left = now, (now - started) / (step + 1 - first) * (optimization.steps - step - 1)
            speed = metrics[-1]["tokens_per_second"]
            log.info(
                "step %d/%d  loss %.3f  norm %.2f  %.0f tokens/s  %d:%02d left",
                step + 1, optimization.steps, loss.item(), norm.item(), speed, *divmod(round(left), 60),
            )  # fmt: skip
    if best:
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(best[name])
    return metrics


def write_metrics(path: Path, metrics: list[dict]) -> None:
    """Write metrics rows as JSON lines."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in metrics))


def _loss_by_domain(losses: torch.Tensor, batch: Batch, domains: Sequence[str]) -> dict[str, float]:
    """Mean nats per token of each domain in the batch."""
    by_sequence, numbers = losses.mean(-1).flatten().tolist(), batch.domains.flatten().tolist()
    found: dict[str, list[float]] = {}
    for number, value in zip(numbers, by_sequence, strict=True):
        found.setdefault(domains[number], []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


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


def _restore(
    tensors: dict[str, torch.Tensor], trained: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Put a saved state into parameters and optimizer; returns the best parameters so far."""
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(tensors[f"parameter/{name}"])
            optimizer.state[parameter] = {
                key: tensors[f"optimizer/{key}/{name}"] for key in ("step", "exp_avg", "exp_avg_sq")
            }
    return {name: tensors[f"best/{name}"] for name in trained if f"best/{name}" in tensors}
