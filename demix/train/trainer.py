"""A model in training, with its whole training state, which a checkpoint stores."""

import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from demix.config.training import KEPT_CHECKPOINTS
from demix.errors import DemixError
from demix.files import cannot_be_written, write_text
from demix.model.device import compute_type
from demix.model.gpt import GPT
from demix.train.optimizers import AdamW, LossScale, Muon, Optimizers
from demix.train.parallel import GradientSync, World
from demix.train.schedule import Optimization
from demix.train.state import Row, State, lines_of, newest_state, save_state

log = logging.getLogger(__name__)

# The names of an optimizer's values for a parameter; a checkpoint restores only these.
KEPT = ("step", *AdamW.means, *Muon.means)


class DivergedError(DemixError):
    """A loss or gradient is not finite in update `step` (from 1). `metrics` holds the rows of the earlier updates."""

    def __init__(self, step: int, cause: str, cure: str, metrics: list[Row]):
        self.step, self.metrics = step, metrics
        super().__init__(f"step {step}", cause, cure)

    @property
    def rows(self) -> list[Row]:
        """The rows of metrics, with one at the end that has the cause under `diverged`."""
        tokens = self.metrics[-1]["tokens"] if self.metrics else 0
        return [*self.metrics, {"step": self.step, "tokens": tokens, "diverged": self.cause}]


class Trainer:
    """A model on this rank's device, and everything that its training changes.

    These are the parameters that require a gradient, the sums of their gradients over ranks, the moments of the
    optimizers, the scale of the loss, the best parameters so far (with early stopping), and the metrics. Checkpoints
    are written below `directory`; `saved` is the step of the newest.
    """

    def __init__(self, model: GPT, optimization: Optimization, directory: Path, world: World):
        self.model, self.optimization, self.directory, self.world = model, optimization, directory, world
        self.dtype = compute_type(optimization.precision)
        model.to(device=world.device, dtype=torch.float64 if self.dtype == torch.float64 else None)
        model.checkpoint_activations = optimization.checkpoint_activations
        if optimization.compile:
            model.compile_blocks()
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizers = Optimizers(
            self.trained, optimization, model.architecture, lambda name: world.groups[model.owned(name)]
        )
        self.sync = GradientSync(self.trained, model.owned, world)
        self.scale = LossScale(self.dtype)
        self.best = Best(self.trained, optimization) if optimization.patience else None
        self.metrics = Metrics(directory / "metrics.jsonl" if world.rank == 0 else None)
        self.saved: int | None = None

    def resume(self, first: State | None) -> int:
        """Resume from the newest complete checkpoint, else from the state `first`, else from the model as it is.

        Returns the number of updates done before.
        """
        resumed = newest_state(self.directory, self.model.experts, self.world)
        state = resumed or first
        if state is not None:
            tensors = self.model.stacked(state.shared, state.experts)
            self._load(tensors)
            self.scale.resume(state.metrics)
            if self.best:
                self.best.resume(tensors, state.metrics)
            log.info("resuming at step %d of %d", state.step, self.optimization.end)
        self.saved = resumed.step if resumed else None
        self.metrics.begin(state.metrics if state else ())
        return state.step if state else 0

    def update(self, step: int) -> float:
        """Do update `step` (from 0) with the clipped gradients, unless their norm is not finite; returns the norm.

        Raises DivergedError if a smaller scale of the loss would not help.
        """
        norm = self.sync.clip(self.optimization.clip, self.scale.factor)
        if math.isfinite(norm):
            self.optimizers.step(self.optimization.learning_rate_at(step))
            self.scale.grow()
        elif diverged := self.scale.shrink():
            raise DivergedError(step + 1, *diverged, self.metrics.rows)
        return norm

    def save(self, step: int) -> None:
        """Write a checkpoint of the state after `step` updates, unless it is already on disk."""
        if step == self.saved:
            return
        tensors = {f"parameter/{name}": p.detach() for name, p in self.trained.items()}
        state = self.optimizers.gathered()
        for name, parameter in self.trained.items():
            tensors |= {f"optimizer/{key}/{name}": value for key, value in state.get(parameter, {}).items()}
        tensors |= self.best.tensors if self.best else {}
        # Adam counts its updates once for all experts.
        updates = {name: tensors.pop(name) for name in [*tensors] if name.startswith("optimizer/step/")}
        shared, experts = self.model.parted(tensors)
        made = State(step, shared | updates, experts, self.metrics.rows)
        save_state(self.directory, made, self.world, KEPT_CHECKPOINTS, self.optimization.keep)
        self.saved = step

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy saved tensors, if there are any, into the parameters and the moments."""
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(tensors[f"parameter/{name}"])
                named = {key: tensors.get(f"optimizer/{key}/{name}") for key in KEPT}
                if kept := {key: tensor for key, tensor in named.items() if tensor is not None}:
                    self.optimizers.resume(parameter, kept)


class Best:
    """The dev losses so far, by number of updates, and a copy of the parameters `trained` at the lowest loss."""

    def __init__(self, trained: Mapping[str, nn.Parameter], optimization: Optimization):
        self.trained, self.optimization = trained, optimization
        self.parameters: dict[str, Tensor] = {}
        self.losses: dict[int, float] = {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint."""
        return {f"best/{name}": tensor for name, tensor in self.parameters.items()}

    @property
    def since(self) -> int:
        """The number of evaluations since the first one with the lowest loss."""
        losses = [*self.losses.values()]
        return len(losses) - 1 - losses.index(min(losses)) if losses else 0

    @property
    def ends(self) -> bool:
        """Whether training ends with the last evaluation."""
        return self.since >= self.optimization.patience

    def resume(self, tensors: Mapping[str, Tensor], rows: Iterable[Row]) -> None:
        """Restore from the tensors of a checkpoint and the rows of earlier updates."""
        self.losses = {row["step"]: row["early_stopping_loss"] for row in rows if "early_stopping_loss" in row}
        kept = {name: tensors[f"best/{name}"] for name in self.trained if f"best/{name}" in tensors}
        self.parameters = {name: tensor.to(self.trained[name].device) for name, tensor in kept.items()}

    def due(self, step: int, last: bool) -> bool:
        """Whether the model must be evaluated after `step` updates."""
        return (last or step % self.optimization.evaluate_every == 0) and step not in self.losses

    def note(self, step: int, loss: float) -> None:
        """Record the loss after `step` updates."""
        self.losses[step] = loss
        if not self.since:
            self.parameters = {name: p.detach().clone() for name, p in self.trained.items()}
        if self.ends:
            log.info("stopping at step %d: no lower dev loss in %d evaluations", step, self.since)

    def restore(self) -> None:
        """Set the model's parameters to the parameters of the lowest loss."""
        with torch.no_grad():
            for name, tensor in self.parameters.items():
                self.trained[name].copy_(tensor)


class Metrics:
    """The rows of a training so far, for each update and each evaluation.

    The file `path` has the same rows, so that others can watch the training; None writes no file.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.rows: list[Row] = []

    @property
    def tokens(self) -> int:
        """The tokens of all updates so far."""
        return int(self.rows[-1]["tokens"]) if self.rows else 0

    def begin(self, rows: Iterable[Row]) -> None:
        """Begin with the `rows` of earlier updates, and rewrite the file."""
        self.rows = [*rows]
        if self.path is not None:
            write_text(self.path, lines_of(self.rows))

    def record(self, row: Row) -> None:
        """Append a row. Raises DemixError if the file cannot be written."""
        self.rows.append(row)
        if self.path is None:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(lines_of([row]))
        except OSError as error:
            raise cannot_be_written(self.path, error) from error
