"""Where training begins: a given state; states that stay; losses that targets' weights and routers change."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from demix.config.architecture import Architecture
from demix.model.gpt import GPT
from demix.model.layers import Auxiliary, DEMixLayer
from demix.train.batches import Batches, balanced_batches, mixed_batches
from demix.train.loop import train
from demix.train.parallel import World
from demix.train.schedule import Optimization
from demix.train.state import State, newest_state, remove_states, save_state
from support.plain_training import adamw, plain_steps
from support.tokens import TRAINING
from support.training import SIZES, TRAIN, opened, shard_paths, train_model

OPTIMIZATION = Optimization(
    steps=12, learning_rate=3e-3, warmup=0.1, clip=0.5, weight_decay=0.1, precision="fp32", checkpoint_every=1000
)


def new_model(tokens: Path, experts: tuple[str, ...], scope: str = "feedforward") -> GPT:
    return GPT(Architecture(**SIZES), opened(tokens)[0].vocab_size, experts, (), scope).initialise(1)


def batches_for(tokens: Path, experts: tuple[str, ...]) -> Batches:
    draw = balanced_batches if experts == TRAINING else mixed_batches
    return draw(opened(tokens), TRAINING, 2, 32, seed=1)


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows]


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


@pytest.mark.parametrize(
    ("experts", "scope"), [(TRAINING, "feedforward"), (("dense",), "feedforward"), (("dense",), "model")]
)
def test_a_run_that_begins_with_a_saved_state_goes_on_as_the_run_that_saved_it(
    tokens: Path, tmp_path: Path, experts: tuple[str, ...], scope: str
) -> None:
    keeping = dataclasses.replace(OPTIMIZATION, keep=(5,))
    whole = new_model(tokens, experts, scope)
    rows = train(whole, batches_for(tokens, experts), TRAINING, keeping, tmp_path / "whole")
    assert steps_in(tmp_path / "whole") == ["step-00000005"]
    state = newest_state(tmp_path / "whole", experts, World())
    # Adam's number of updates is all that whole models share.
    assert all(name.startswith("optimizer/step/") for name in state.shared) == (scope == "model")

    branch = new_model(tokens, experts, scope)
    torch.nn.init.constant_(branch.token_embedding, 7.0)
    continued = train(branch, batches_for(tokens, experts), TRAINING, OPTIMIZATION, tmp_path / "branch", first=state)
    assert timeless(continued) == timeless(rows)
    assert len(state.metrics) == 5
    for name, parameter in whole.named_parameters():
        assert torch.equal(branch.get_parameter(name), parameter), name

    # A checkpoint of the run's own wins over the state that it began with.
    other = dataclasses.replace(state, step=11, metrics=state.metrics[:1])
    again = new_model(tokens, experts, scope)
    resumed = train(again, batches_for(tokens, experts), TRAINING, keeping, tmp_path / "whole", first=other)
    assert timeless(resumed) == timeless(rows)
    assert torch.equal(again.token_embedding, whole.token_embedding)


def test_whole_models_train_as_the_dense_one(tokens: Path, tmp_path: Path) -> None:
    # Gradients lie in other buckets, whose norms are added in another order.
    exact = dataclasses.replace(OPTIMIZATION, precision="fp64")
    dense, whole = new_model(tokens, ("dense",)), new_model(tokens, ("dense",), "model")
    for model in (dense, whole):
        train(model, batches_for(tokens, ("dense",)), TRAINING, exact, tmp_path / model.expert_scope)
    for name, parameter in dense.named_parameters():
        torch.testing.assert_close(whole.get_parameter(name), parameter, rtol=0, atol=1e-12)


def test_states_that_are_to_be_kept_stay(tmp_path: Path) -> None:
    for step in (3, 4, 6, 9, 12):
        tensors = {"a": torch.full((2,), float(step))}
        save_state(tmp_path, State(step, tensors, {"x": tensors}, []), World(), 2, steps=(4, 12))
    assert steps_in(tmp_path) == ["step-00000004", "step-00000009", "step-00000012"]
    assert newest_state(tmp_path, ("x",), World()).step == 12
    remove_states(tmp_path, (4, 12))
    assert steps_in(tmp_path) == ["step-00000004", "step-00000012"]
    remove_states(tmp_path)
    assert not tmp_path.exists()


def test_states_are_kept_beside_the_checkpoints_and_change_no_result(tokens: Path, tmp_path: Path) -> None:
    paths = [*shard_paths(tokens), *shard_paths(tokens, split="dev")]
    # At this rate the finished model is not the best on dev, whose checkpoint stays.
    settings = dataclasses.replace(TRAIN, learning_rate=0.05, dev_blocks=3, checkpoint_every=3, keep_checkpoints=1)
    for keep in ((), (2, 5, 24)):
        folder = tmp_path / str(len(keep))
        train_model("demix", settings, paths, folder / "m", folder / "metrics", folder / "checkpoints", keep=keep)
    plain, kept = (
        {path.relative_to(tmp_path / name): path for path in (tmp_path / name).rglob("m/**/*.safetensors")}
        for name in "03"
    )
    assert plain.keys() == kept.keys()
    assert len(plain) == 1 + len(TRAINING)
    for name, path in plain.items():
        assert path.read_bytes() == kept[name].read_bytes(), name
    # One folder of checkpoints for both: what is kept is no part of the fingerprint.
    (one,), (other,) = ([*(tmp_path / name / "checkpoints").iterdir()] for name in "03")
    assert one.name == other.name
    assert {"step-00000002", "step-00000005", "step-00000024"} <= {*steps_in(other)}
    assert len(steps_in(other)) <= 4


def test_the_weights_of_targets_and_the_losses_of_routers_count(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss and gradient of one step against a plain loop, in two micro batches and one."""
    plain = balanced_batches(opened(tokens), TRAINING, 2, 32, seed=1)
    weights = (torch.rand(3, 2, 32, generator=torch.Generator().manual_seed(0)) < 0.4).double()
    weighted = dataclasses.replace(
        plain, draw=lambda step: dataclasses.replace(plain.draw(step), weights=weights), targets=80.0
    )
    forward = DEMixLayer.forward

    def routed(self: DEMixLayer, x: torch.Tensor, auxiliary: list[Auxiliary] | None = None) -> torch.Tensor:
        out = forward(self, x, auxiliary)
        auxiliary.append(Auxiliary(0.1 * out.square().mean((2, 3))))
        return out

    monkeypatch.setattr(DEMixLayer, "forward", routed)
    reference = new_model(tokens, TRAINING).double()
    (step,) = plain_steps(reference, adamw(reference), weighted, {0: 3e-3})
    assert [each.losses.shape for each in step.routers] == [(3, 2)] * SIZES["layers"]
    means = (step.losses * weights).sum((1, 2)) / weights.sum((1, 2))

    one_step = dataclasses.replace(OPTIMIZATION, steps=1, warmup=0.0, precision="fp64")
    for micro, checkpointing in itertools.product((None, 1), (False, True)):
        settings = dataclasses.replace(one_step, micro_sequences=micro, checkpoint_activations=checkpointing)
        model = new_model(tokens, TRAINING)
        (row,) = train(model, weighted, TRAINING, settings, tmp_path / f"{micro}{checkpointing}")
        assert row["gradient_norm"] == pytest.approx(step.norm, rel=1e-9)
        assert row["loss"] == pytest.approx(step.loss, rel=1e-9)
        assert [row[f"loss/{name}"] for name in TRAINING] == pytest.approx(means.tolist(), rel=1e-9)
        assert row["tokens"] == 3 * 2 * 32
