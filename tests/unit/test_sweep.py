"""The choice of a learning rate: the fastest of a sweep that does not diverge, and what counts as diverging."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from demix.errors import DemixError
from demix.files import read_json, read_json_lines, write_json, write_json_lines
from demix.train.metrics import DivergedError
from demix.train.stage import Training
from demix.train.sweep import MARGIN, Trial, choose_rate, chosen_rate, judge, read_trial
from support.cli import said
from support.tokens import TRAINING
from support.training import train_model

SIZES = {"layers": 2, "width": 32, "heads": 2, "context": 32}
TRAIN = Training(
    seed=1, architecture=SIZES, tokens=32 * 2 * 3 * 20, sequences=2, learning_rate=3e-3, warmup=0.1, clip=1.0,
    weight_decay=0.1, precision="fp32", threads=1, checkpoint_every=1000,
)  # fmt: skip
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


def test_the_fastest_is_chosen_whatever_the_order(tmp_path: Path) -> None:
    rate, causes = chosen(tmp_path, **{"0.0005": FALLING - 0.2, "5e-05": FALLING + 0.3, "0.0003": FALLING})
    assert rate == 5e-4
    assert causes == {5e-5: None, 3e-4: None, 5e-4: None}


CLIMBING = np.concatenate([FALLING[:20], np.linspace(6.5, 7.5, 20)])
DIVERGING = {
    "a loss that is not finite": ((FALLING[:7], {"step": 8, "tokens": 700, "diverged": "the loss of a is not finite"})),
    "at its first step": (([], {"step": 1, "tokens": 0, "diverged": "the gradient is not finite"})),
    "climbing at the end": CLIMBING,
    "a spike that is not made up for": np.concatenate([FALLING[:30], np.full(5, 30.0), np.full(5, 6.0)]),
    "stuck above a slower run": np.concatenate([[9.0] * 4, np.full(36, 7.0)]),
}


@pytest.mark.parametrize("how", DIVERGING)
def test_a_run_that_diverges_is_not_chosen(how: str, tmp_path: Path) -> None:
    rate, causes = chosen(tmp_path, **{"0.0001": FALLING, "0.0003": FALLING - 0.1, "0.0005": DIVERGING[how]})
    assert rate == 3e-4
    assert causes[5e-4]
    assert causes[1e-4] is causes[3e-4] is None


def test_noise_and_a_spike_that_is_made_up_for_are_no_divergence(tmp_path: Path) -> None:
    spike = np.where(np.arange(40) == 20, 30.0, FALLING)
    noise = np.concatenate([FALLING, 4.0 + 0.05 * (-1.0) ** np.arange(40)])
    assert chosen(tmp_path, **{"0.1": noise, "0.2": np.concatenate([spike, noise[40:]])})[0] == 0.2
    assert chosen(tmp_path, **{"0.1": [5.0]})[0] == 0.1, "a step is too little to diverge in"


@given(st.lists(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=10), min_size=1, max_size=6))
def test_faster_runs_say_nothing_about_slower_ones(runs: list[list[float]]) -> None:
    trials = [Trial(float(rate + 1), tuple(parts)) for rate, parts in enumerate(runs)]
    judged = judge(trials[::-1])
    for count in range(1, len(trials) + 1):
        assert judge(trials[:count]) == judged[:count]
    for trial in judged:
        seen = [part for other in judged[: int(trial.learning_rate)] for part in other.parts]
        assert (trial.diverged is None) == (trial.parts[-1] <= min(seen) + MARGIN)


def test_where_all_diverge_all_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        DemixError, match=r"^demix: diverged at every .*0\.1: ends at .*0\.2: the loss of a is not fini"
    ):
        chosen(tmp_path, **{"0.2": DIVERGING["a loss that is not finite"], "0.1": CLIMBING})
    assert not (tmp_path / "demix.json").exists()


def test_what_is_no_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DemixError, match="is missing"):
        read_trial(tmp_path / "0.1.jsonl")
    with pytest.raises(DemixError, match="holds no step"):
        read_trial(write(tmp_path / "0.1.jsonl", []))
    with pytest.raises(DemixError, match="is no metrics file of a sweep"):
        read_trial(write(tmp_path / "demix.jsonl", FALLING))
    write_json(tmp_path / "none.json", {})
    with pytest.raises(DemixError, match="names no learning rate"):
        chosen_rate(tmp_path / "none.json")


def shards(tokens: Path) -> list[Path]:
    return [tokens / "tokens" / domain / "train.arrow" for domain in TRAINING]


def test_a_sweeps_run_keeps_metrics_alone_and_divergence_is_no_error_there(tokens: Path, tmp_path: Path) -> None:
    losses = {}
    for rate in (3e-3, 1e38):
        training, metrics = dataclasses.replace(TRAIN, learning_rate=rate), tmp_path / f"{rate}.jsonl"
        train_model("demix", training, shards(tokens), None, metrics, tmp_path / "checkpoints")
        losses[rate] = read_trial(metrics)
    assert losses[3e-3].diverged is None
    assert len(losses[3e-3].parts) == 10
    assert "not finite" in losses[1e38].diverged
    assert not list(tmp_path.rglob("*.safetensors"))
    # The same as what a training with that rate sees.
    train_model("demix", TRAIN, shards(tokens), tmp_path / "model", tmp_path / "0.003.whole", tmp_path / "checkpoints")
    rows = [[row["loss"] for row in read_json_lines(tmp_path / name)] for name in ("0.003.jsonl", "0.003.whole")]
    assert rows[0] == rows[1]
    with pytest.raises(DivergedError, match=r"step \d+: the .* is not finite; lower the learning rate"):
        train_model(
            "demix", dataclasses.replace(TRAIN, learning_rate=1e38), shards(tokens), tmp_path / "other",
            tmp_path / "other.jsonl", tmp_path / "checkpoints",
        )  # fmt: skip
    assert not (tmp_path / "other.jsonl").exists()


def test_the_commands_agree_on_several_ranks(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of a diverging rate by three processes, the choice, and a training with it."""
    monkeypatch.chdir(tmp_path)

    def demix(*arguments: object) -> None:
        assert said([*map(str, arguments)]) is None

    common = [*shards(tokens), "--checkpoints", "checkpoints", "--settings"]
    for rate in (2e-3, 1e38):
        settings = json.dumps(dataclasses.asdict(dataclasses.replace(TRAIN, learning_rate=rate)))
        ranks = 3 if rate > 1 else 1
        demix("sweep", "demix", *common, settings, "--metrics", f"{rate}.jsonl", "--ranks", ranks)
    demix("choose-rate", f"{1e38}.jsonl", "0.002.jsonl", "--output", "demix.json")
    settings = json.dumps(dataclasses.asdict(TRAIN))
    place = ["--output", "model", "--metrics", "demix.jsonl", "--learning-rate-from", "demix.json"]
    demix("train", "demix", *common, settings, *place)
    assert read_json(tmp_path / "model" / "model.json")["training"]["learning_rate"] == 2e-3
    assert len(read_json_lines(tmp_path / "demix.jsonl")) == 20
