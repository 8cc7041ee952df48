"""Early stopping: training ends when the loss on dev no longer falls, with the parameters of the lowest loss."""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from demix.train.metrics import Row

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EarlyStopping:
    """Evaluate on dev every `every` steps, and stop after `patience` evaluations without a new lowest loss."""

    every: int
    patience: int


class Best:
    """The lowest loss on dev so far, a copy of the parameters `trained` that had it, and the evaluations since."""

    def __init__(self, trained: Mapping[str, nn.Parameter], stopping: EarlyStopping):
        self.trained, self.stopping = trained, stopping
        self.parameters: dict[str, Tensor] = {}
        self.lowest, self.since = math.inf, 0
        self.evaluated: int | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint."""
        return {f"best/{name}": tensor for name, tensor in self.parameters.items()}

    def resume(self, tensors: Mapping[str, Tensor], rows: Iterable[Row]) -> None:
        """Go on from the tensors of a checkpoint and the rows of the updates before."""
        for row in rows:
            if "early_stopping_loss" in row:
                self._count(row["step"], row["early_stopping_loss"])
        kept = {name: tensors[f"best/{name}"] for name in self.trained if f"best/{name}" in tensors}
        self.parameters = {name: tensor.to(self.trained[name].device) for name, tensor in kept.items()}

    def due(self, step: int, last: bool) -> bool:
        """Whether the model is to be evaluated after `step` updates."""
        return (last or step % self.stopping.every == 0) and step != self.evaluated

    def note(self, step: int, loss: float) -> None:
        """Take note of the loss after `step` updates."""
        if self._count(step, loss):
            self.parameters = {name: p.detach().clone() for name, p in self.trained.items()}
        if self.ends:
            log.info("stopping at step %d: no better dev loss in %d evaluations", step, self.since)

    @property
    def ends(self) -> bool:
        """Whether training ends with the last evaluation."""
        return self.since >= self.stopping.patience

    def take(self) -> None:
        """Give the model the parameters of the lowest loss."""
        with torch.no_grad():
            for name, tensor in self.parameters.items():
                self.trained[name].copy_(tensor)

    def _count(self, step: int, loss: float) -> bool:
        """Count an evaluation. Returns whether its loss is the lowest."""
        self.evaluated, self.since = step, self.since + 1
        if loss < self.lowest:
            self.lowest, self.since = loss, 0
        return self.since == 0
