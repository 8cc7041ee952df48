"""Losses in training by the number of tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from demix.report.read import read_metrics
from demix.run.run import Run

# The loss of a step is noisy: means over spans of steps show the trend and keep the figure of a long run small.
CURVE_POINTS = 40
# Points show where a curve was measured, and give the pointer something to hit: a tooltip shows the numbers.
POINTS = {"size": 20, "filled": True}


def token_axis(ticks: int) -> alt.Axis:
    """The axis of tokens, with about so many ticks."""
    return alt.Axis(tickCount=ticks, labelExpr="datum.value ? format(datum.value, '~s') : '0'")


def training_curves(metrics_dir: str | Path, run: Run, key: str = "loss", domains: Sequence[str] = ()) -> pd.DataFrame:
    """Loss (nats per token) by tokens, of the models that `config` trains: columns model, tokens, loss.

    `key` is `loss`, of the batches trained on, or `dev_loss`, of the runs that measure it: the mean over `domains`
    where a row has these, else over the model's domains. Long runs are thinned to means over equal spans of steps.
    """

    def value(line: dict[str, Any]) -> Any:
        losses = [line[one] for name in domains if line.get(one := f"{key}/{name}") is not None]
        return np.mean(losses) if losses and len(losses) == len(domains) else line.get(key)

    frames = []
    for name in sorted(model.name for model in run.trained):
        path = Path(metrics_dir) / f"{name}.jsonl"
        rows = [(line["tokens"], found) for line in read_metrics(path) if (found := value(line)) is not None]
        frame = pd.DataFrame(rows, columns=["tokens", "loss"]).astype("float64")
        span = -(-len(frame) // CURVE_POINTS) or 1
        frame = frame.groupby(np.arange(len(frame)) // span).mean()
        frames.append(frame.assign(model=path.stem))
    columns = ["model", "tokens", "loss"]
    return pd.concat(frames)[columns] if frames else pd.DataFrame(columns=columns)
