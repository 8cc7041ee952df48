"""How parameters are updated, and with which learning rate."""

import math

from demix.config.training import Execution, LearningRate, Optimizer
from demix.settings import Integer, Positive, settings
from demix.train.stopping import EarlyStopping


@settings(kw_only=True)
class Optimization(Execution, Optimizer):
    """How parameters are updated in `steps` optimizer updates, and how the updates are computed.

    The states after the numbers of updates in `keep` are saved and never removed. The schedule of the learning rate
    begins at update `begin`. Training ends after `until` updates, by default after all, or when `stopping` ends it.
    """

    steps: Positive
    learning_rate: LearningRate
    keep: tuple[Positive, ...] = ()
    begin: Integer = 0
    until: Positive | None = None
    stopping: EarlyStopping | None = None

    @property
    def end(self) -> int:
        """The number of updates after which training ends."""
        return self.until or self.steps

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of update `step` (from 0): linear warm-up from `begin`, then linear decay to 0."""
        step, steps = step - self.begin, self.steps - self.begin
        warmup = math.ceil(self.warmup * steps)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        return self.learning_rate * (steps - step) / max(1, steps - warmup)
