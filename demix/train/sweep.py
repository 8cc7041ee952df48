"""The choice of a model's learning rate by short trainings: the largest rate that does not diverge."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from demix.errors import DemixError
from demix.files import read_json, read_json_lines, write_json

# The number of parts of a trial whose mean losses are compared, and the allowed nats per token of its end above the
# lowest part.
PARTS, MARGIN = 10, 0.1


@dataclass(frozen=True)
class Trial:
    """A trial of one learning rate: its mean loss in each tenth of its steps, in nats per token.

    `diverged` is the reason why it diverged, or None. If a loss or gradient was not finite, there are no `parts`.
    """

    learning_rate: float
    parts: tuple[float, ...]
    diverged: str | None = None


def read_trial(path: Path) -> Trial:
    """The trial whose metrics are in <learning rate>.jsonl, as written by `demix train` without `--output`."""
    rows = read_json_lines(path)
    try:
        rate = float(path.stem)
        stopped = [row["diverged"] for row in rows if "diverged" in row]
        losses = [row["loss"] for row in rows if "loss" in row]
    except (ValueError, TypeError) as error:
        raise DemixError(path, f"is not the metrics file of a trial ({error})", "run the sweep again") from None
    if stopped or not all(map(math.isfinite, losses)):
        return Trial(rate, (), stopped[0] if stopped else "a loss is not finite")
    if not losses:
        raise DemixError(path, "holds no step", "run the sweep again")
    return Trial(rate, tuple(float(part.mean()) for part in np.array_split(losses, min(PARTS, len(losses)))))


def judge(trials: Sequence[Trial]) -> list[Trial]:
    """The trials by increasing learning rate, each with the reason if it diverged.

    A trial diverged if a loss or gradient was not finite, or if the mean loss in the last tenth of its steps is more
    than `MARGIN` above the lowest tenth of this trial or of a trial at a lower rate. The comparison with lower rates
    detects a trial whose loss rose at once and then stayed there.
    """
    judged, lowest, where = [], math.inf, 0.0
    for trial in sorted(trials, key=lambda trial: trial.learning_rate):
        why = trial.diverged
        if trial.parts:
            if min(trial.parts) < lowest:
                lowest, where = min(trial.parts), trial.learning_rate
            if trial.parts[-1] > lowest + MARGIN:
                above = trial.parts[-1] - lowest
                why = f"ends at a loss of {trial.parts[-1]:.3f}, {above:.3f} above the lowest of {where}"
        judged.append(Trial(trial.learning_rate, trial.parts, why))
    return judged


def choose_rate(metrics: Sequence[Path], output: Path) -> float:
    """Write to `output`, and return, the largest learning rate of the sweep's `metrics` that did not diverge.

    The file records every trial. Raises DemixError that names all trials if all diverged.
    """
    trials = judge([read_trial(path) for path in metrics])
    good = [trial.learning_rate for trial in trials if trial.diverged is None]
    if not good:
        causes = "; ".join(f"{trial.learning_rate}: {trial.diverged}" for trial in trials)
        raise DemixError(output.stem, f"diverged at every learning rate of its sweep ({causes})", "use lower rates")
    write_json(output, {"learning_rate": max(good), "margin": MARGIN, "trials": [asdict(trial) for trial in trials]})
    print(f"{output.stem}: {max(good)}")
    return max(good)


def chosen_rate(path: Path) -> float:
    """The learning rate that `choose_rate` wrote to `path`."""
    match read_json(path):
        case {"learning_rate": float() as rate}:
            return rate
    raise DemixError(path, "names no learning rate", "run demix choose-rate again")
