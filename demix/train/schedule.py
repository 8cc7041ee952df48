"""Updates of parameters, the learning-rate schedule, and the end of training."""

import math

from demix.config.training import Execution, LearningRate, OptimizerRecipe
from demix.settings import Integer, Positive


class Optimization(Execution, OptimizerRecipe):
    """How parameters are updated in `steps` optimizer updates, and how the updates are computed.

    The states after the numbers of updates in `keep` are saved and never removed. The learning-rate schedule begins at
    update `begin`. Training ends after `until` updates, by default after all. With a `patience` (early stopping) the
    model is evaluated on dev every `evaluate_every` updates, and training ends after `patience` evaluations without a
    new lowest loss.
    """

    steps: Positive
    learning_rate: LearningRate
    keep: tuple[Positive, ...] = ()
    begin: Integer = 0
    until: Positive | None = None
    evaluate_every: Integer = 0
    patience: Integer = 0

    @property
    def end(self) -> int:
        """The number of updates after which training ends."""
        return self.until or self.steps

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of update `step` (from 0): linear warm-up from `begin`, then a decay, linear by default."""
        step, steps = step - self.begin, self.steps - self.begin
        warmup = math.ceil(self.warmup * steps)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        schedule = self.learning_rate_schedule
        if schedule is None:
            return self.learning_rate * (steps - step) / max(1, steps - warmup)
        end = steps * (schedule.stretch or 1)
        falling = math.ceil(schedule.share * steps) if schedule.kind == "wsd" else end - warmup
        left = min(1.0, (end - step) / max(1, falling))
        height = (1 - math.cos(math.pi * left)) / 2 if schedule.kind == "cosine" else left
        return self.learning_rate * (schedule.end + (1 - schedule.end) * height)
