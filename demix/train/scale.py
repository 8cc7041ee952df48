"""The scale of the loss in fp16, whose small gradients would vanish."""

from collections.abc import Iterable

import torch

from demix.train.metrics import Row

# The scale is halved when gradients overflow, and doubled after GROW_AFTER updates without overflow.
FIRST_SCALE, LAST_SCALE, GROW_AFTER = 2.0**16, 2.0**-4, 1000


class LossScale:
    """The factor of the loss in training with numbers of type `dtype`: 1, except in fp16.

    `unscathed` counts the updates since the factor changed. Metrics hold the factor after each update, so that they are
    the state.
    """

    def __init__(self, dtype: torch.dtype):
        self.moves = dtype == torch.float16
        self.factor, self.unscathed = FIRST_SCALE if self.moves else 1.0, 0

    @property
    def metrics(self) -> Row:
        """What a row of metrics says of the scale."""
        return {"loss_scale": self.factor} if self.moves else {}

    def resume(self, rows: Iterable[Row]) -> None:
        """Go on from the `rows` of the updates before."""
        for factor in (row["loss_scale"] for row in rows if "loss_scale" in row):
            self.unscathed = self.unscathed + 1 if factor == self.factor else 0
            self.factor = factor

    def grow(self) -> None:
        """Take note of an update without overflow."""
        self.unscathed += 1
        if self.moves and self.unscathed == GROW_AFTER:
            self.factor, self.unscathed = self.factor * 2.0, 0

    def shrink(self) -> tuple[str, str] | None:
        """Take note of gradients that are not finite. Returns cause and cure where no smaller scale would help."""
        if not self.moves:
            return "the gradient is not finite", "lower the learning rate"
        self.factor, self.unscathed = self.factor * 0.5, 0
        if self.factor < LAST_SCALE:
            return "fp16 overflows at every scale of the loss", "use bf16 or fp32, or a lower learning rate"
        return None
