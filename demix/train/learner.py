"""A model in training, with all that its training knows: what a checkpoint holds."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from demix.model.device import compute_type
from demix.model.gpt import GPT
from demix.train.adam import AdamW
from demix.train.metrics import DivergedError, Metrics
from demix.train.muon import Muon
from demix.train.parallel import World
from demix.train.scale import LossScale
from demix.train.schedule import Optimization
from demix.train.state import State, newest_state, save_state
from demix.train.stopping import Best
from demix.train.updates import Optimizers

log = logging.getLogger(__name__)

# What AdamW and Muon keep of a parameter.
KEPT = ("step", *AdamW.means, *Muon.means)


class Learner:
    """A model on this rank's device, and what its training changes.

    These are the parameters that require a gradient, the moments of the optimizers, the scale of the loss, the best
    parameters so far (with early stopping), and the metrics. Checkpoints go below `directory`; `saved` is the step of
    the newest.
    """

    def __init__(self, model: GPT, optimization: Optimization, directory: Path, world: World):
        self.model, self.optimization, self.directory, self.world = model, optimization, directory, world
        dtype = compute_type(optimization.precision)
        model.to(device=world.device, dtype=torch.float64 if dtype == torch.float64 else None)
        model.checkpoint_activations = optimization.checkpoint_activations
        if optimization.compile:
            model.compile_blocks()
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizers = Optimizers(
            self.trained, optimization, model.architecture, lambda name: world.groups[model.owned(name)]
        )
        self.scale = LossScale(dtype)
        self.best = Best(self.trained, optimization.stopping) if optimization.stopping else None
        self.metrics = Metrics(directory / "metrics.jsonl" if world.rank == 0 else None)
        self.saved: int | None = None

    def resume(self, first: State | None) -> int:
        """Go on from the newest complete checkpoint, else from the state `first`, else from the model as it is.

        Returns the number of updates before.
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

    def update(self, step: int, norm: float, rate: float) -> None:
        """Do update `step` (from 0) by the gradients, of this norm, unless it is not finite.

        Raises DivergedError where a smaller scale of the loss would not help.
        """
        if math.isfinite(norm):
            self.optimizers.step(rate)
            self.scale.grow()
        elif diverged := self.scale.shrink():
            raise DivergedError(step + 1, *diverged, self.metrics.rows)

    def save(self, step: int, dev_loss: float | None = None) -> None:
        """Write a checkpoint of the state after `step` updates, unless it is on disk already.

        `dev_loss` is the model's loss on dev, if it was measured.
        """
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
        made = State(step, shared | updates, experts, self.metrics.rows, dev_loss)
        save_state(self.directory, made, self.world, self.optimization.keep_checkpoints, self.optimization.keep)
        self.saved = step

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy saved tensors into the parameters and the moments, where there are some."""
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(tensors[f"parameter/{name}"])
                named = {key: f"optimizer/{key}/{name}" for key in KEPT}
                kept = {key: tensors[place] for key, place in named.items() if place in tensors}
                if kept:
                    self.optimizers.resume(parameter, kept)
