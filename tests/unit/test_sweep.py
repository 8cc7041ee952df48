"""The choice of a learning rate: the fastest of a sweep that does not diverge, and what counts as diverging."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from demix.errors import DemixError
from demix.files import read_json, read_json_lines, write_json, write_json_lines
from demix.train.sweep import MARGIN, Trial, choose_rate, chosen_rate, judge, read_trial
from demix.train.trainer import DivergedError
from support.cli import demix, succeeds
from support.errors import refused
from support.training import TRAIN, shard_paths

FALLING = np.linspace(9.0, 4.0, 40)


def write(path: Path, losses: object, **last: object) -> Path:
    rows = [{"step": step + 1, "tokens": 100 * step, "loss": float(loss)} for step, loss in enumerate(losses)]
    write_json_lines(path, [*rows, *([last] if last else [])])
    return path


def chosen(folder: Path, **runs: object) -> tuple[float, dict]:
    """The choice among runs by rate: losses of each, or (losses, the last row)."""
    paths = []
    for rate, run in runs.items():
        losses, last = run if isinstance(run, tuple) else (run, {})
        paths.append(write(folder / f"{rate}.jsonl", losses, **last))
    rate = choose_rate(paths, folder / "demix.json")
    assert chosen_rate(folder / "demix.json") == rate
    return rate, {trial["learning_rate"]: trial["diverged"] for trial in read_json(folder / "demix.json")["trials"]}


CLIMBING = np.concatenate([FALLING[:20], np.linspace(6.5, 7.5, 20)])
SPIKE = np.where(np.arange(40) == 20, 30.0, FALLING)
NOISE = np.concatenate([FALLING, 4.0 + 0.05 * (-1.0) ** np.arange(40)])
# Losses of a run beside two slower ones that fall to 4, or with its last row, and whether it diverged.
FASTEST = {
    "falling": (FALLING - 0.2, False),
    "noise": (NOISE, False),
    "a spike that is made up for": (SPIKE, False),
    "a step, too little to diverge in": ([3.0], False),
    "a loss that is not finite": ((FALLING[:7], {"step": 8, "tokens": 700, "diverged": "not finite"}), True),
    "at its first step": (([], {"step": 1, "tokens": 0, "diverged": "not finite"}), True),
    "climbing at the end": (CLIMBING, True),
    "a spike that is not made up for": (np.concatenate([FALLING[:30], np.full(5, 30.0), np.full(5, 6.0)]), True),
    "stuck above a slower run": (np.concatenate([[9.0] * 4, np.full(36, 7.0)]), True),
}


@pytest.mark.parametrize("how", FASTEST)
def test_the_fastest_that_does_not_diverge_is_chosen_whatever_the_order(how: str, tmp_path: Path) -> None:
    losses, diverges = FASTEST[how]
    rate, causes = chosen(tmp_path, **{"0.0005": losses, "5e-05": FALLING + 0.3, "0.0003": FALLING})
    assert rate == (3e-4 if diverges else 5e-4)
    assert {rate: cause is not None for rate, cause in causes.items()} == {5e-5: False, 3e-4: False, 5e-4: diverges}


@given(st.lists(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=10), min_size=1, max_size=6))
def test_faster_runs_say_nothing_about_slower_ones(runs: list[list[float]]) -> None:
    trials = [Trial(float(rate + 1), tuple(parts)) for rate, parts in enumerate(runs)]
    judged = judge(trials[::-1])
    for count in range(1, len(trials) + 1):
        assert judge(trials[:count]) == judged[:count]
    for trial in judged:
        seen = [part for other in judged[: int(trial.learning_rate)] for part in other.parts]
        assert (trial.diverged is None) == (trial.parts[-1] <= min(seen) + MARGIN)


def test_where_all_diverge_none_is_chosen(tmp_path: Path) -> None:
    with refused("demix"):
        chosen(tmp_path, **{"0.2": FASTEST["at its first step"][0], "0.1": CLIMBING})
    assert not (tmp_path / "demix.json").exists()


def test_what_is_no_sweep_is_refused(tmp_path: Path) -> None:
    with refused("0.1.jsonl"):
        read_trial(tmp_path / "0.1.jsonl")
    with refused("0.1.jsonl"):
        read_trial(write(tmp_path / "0.1.jsonl", []))
    with refused("demix.jsonl"):
        read_trial(write(tmp_path / "demix.jsonl", FALLING))
    write_json(tmp_path / "none.json", {})
    with refused("none.json"):
        chosen_rate(tmp_path / "none.json")


def test_the_commands_choose_a_rate_and_train_with_it(tokens: Path, tmp_path: Path) -> None:
    """Without an output only metrics are kept. Divergence is not an error there, but it is one of a training."""

    def command(rate: float, *more: object) -> DemixError | None:
        given = json.dumps(TRAIN.replace(learning_rate=rate).as_dict())
        places = ["--settings", given, "--checkpoints", tmp_path / "checkpoints"]
        return demix("train", "demix", *shard_paths(tokens), *places, *more).exception

    for rate in (2e-3, 1e38):
        assert command(rate, "--metrics", tmp_path / f"{rate}.jsonl") is None
    assert not list(tmp_path.rglob("*.safetensors"))
    assert len(read_trial(tmp_path / "0.002.jsonl").parts) == 10
    metrics = [tmp_path / f"{rate}.jsonl" for rate in (1e38, 2e-3)]
    succeeds("choose-rate", *metrics, "--output", tmp_path / "demix.json")
    output = ["--output", tmp_path / "model", "--metrics", tmp_path / "metrics.jsonl"]
    assert isinstance(command(1e38, *output), DivergedError)
    assert not (tmp_path / "metrics.jsonl").exists()
    assert command(9.0, *output, "--learning-rate-from", tmp_path / "demix.json") is None
    assert read_json(tmp_path / "model" / "model.json")["training"]["learning_rate"] == 2e-3
    swept, trained = (
        [row["loss"] for row in read_json_lines(path)]
        for path in (tmp_path / "0.002.jsonl", tmp_path / "metrics.jsonl")
    )
    assert swept == trained
