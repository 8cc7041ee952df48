"""Optimizers, schedules of the learning rate and the z-loss, against torch, transformers and plain formulas."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from demix.config.architecture import Architecture, Routed
from demix.config.training import RateSchedule, TrainingRecipe, Updates, fingerprinted, taken
from demix.errors import DemixError
from demix.files import read_json_lines
from demix.model.checkpoint import load_model
from demix.model.gpt import GPT
from demix.settings import settings_from
from demix.train.muon import Muon, orthogonalised
from demix.train.schedule import Optimization
from demix.train.updates import Optimizers, group_of
from support.tokens import TRAINING
from support.training import TRAIN, shard_paths, train_model

SIZES = {"layers": 2, "width": 16, "heads": 2, "context": 8}
OPTIMIZATION = Optimization(steps=100, learning_rate=1e-2, weight_decay=0.1)


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def pairs(*shapes: tuple[int, ...], dtype: torch.dtype) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    ours, theirs = ([nn.Parameter(numbers(*shape, dtype=dtype)) for shape in shapes] for _ in range(2))
    return ours, theirs


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (7, 7)])
def test_muon_is_that_of_torch(shape: tuple[int, int]) -> None:
    """Torch orthogonalises in bf16, ours on a CPU does not: their difference is that of the rounding."""
    (ours,), (theirs,) = pairs(shape, dtype=torch.float32)
    mine = Muon([ours], weight_decay=0.1, momentum=0.9, iterations=5)
    peer = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.9, ns_steps=5)
    for step in range(6):
        ours.grad = numbers(step + 1, *shape, dtype=torch.float32)[step]
        theirs.grad = ours.grad.clone()
        before = ours.detach().clone()
        mine.step(0.02)
        peer.step()
        moved = (ours - before).norm()
        assert (ours - theirs).norm() < 0.03 * (step + 1) ** 0.5 * moved
        torch.testing.assert_close(mine.state[ours]["momentum"], peer.state[theirs]["momentum_buffer"])


def test_singular_values_come_near_1_and_vectors_stay() -> None:
    x = numbers(9, 4)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    inside = u.mT @ orthogonalised(x, 5) @ v.mT
    assert ((inside.diagonal() > 0.65) & (inside.diagonal() < 1.25)).all()
    torch.testing.assert_close(inside, inside.diagonal().diag(), rtol=0, atol=1e-12)
    torch.testing.assert_close(orthogonalised(x.mT, 5), orthogonalised(x, 5).mT)


def test_each_experts_matrix_is_updated_by_itself() -> None:
    """As if each expert were a model of its own, whatever the lengths of the others' gradients."""
    stacked, alone = (
        nn.Parameter(numbers(3, 2, 6, 4)),
        [nn.Parameter(one.clone()) for one in numbers(3, 2, 6, 4).view(-1, 6, 4)],
    )
    gradient = numbers(3, 2, 6, 4) * torch.tensor([1.0, 100.0, 1e-3]).view(3, 1, 1, 1)
    stacked.grad = gradient
    for parameter, own in zip(alone, gradient.view(-1, 6, 4), strict=True):
        parameter.grad = own.clone()
    for parameters in ([stacked], alone):
        Muon(parameters, weight_decay=0.1, momentum=0.95, iterations=5).step(0.1)
    torch.testing.assert_close(stacked.view(-1, 6, 4), torch.stack([*alone]))


def test_maps_that_stand_in_one_parameter_are_updated_each_by_itself() -> None:
    """Those of queries, keys and values, and both of a gated feedforward: as if they were parameters of their own."""
    sizes = Architecture(**SIZES, key_heads=1, gated=True, biases="none")
    model = GPT(sizes, 20, ("a", "b")).initialise(1).double()
    named = {name: p for name, p in model.named_parameters() if name.endswith(("qkv.weight", "feedforward.up"))}
    rows = {name: (16, 8, 8) if "qkv" in name else (64, 64) for name in named}
    alone = {name: [nn.Parameter(one.detach().clone()) for one in p.split(rows[name], -2)] for name, p in named.items()}
    for name, parameter in named.items():
        parameter.grad = numbers(*parameter.shape)
        for one, gradient in zip(alone[name], parameter.grad.split(rows[name], -2), strict=True):
            one.grad = gradient.clone()
    optimization = dataclasses.replace(OPTIMIZATION, optimizer=Updates(kind="muon"))
    Optimizers(named, optimization, sizes).step(0.1)
    Muon([one for parts in alone.values() for one in parts], weight_decay=0.1, momentum=0.95, iterations=5).step(0.1)
    for name, parameter in named.items():
        torch.testing.assert_close(parameter, torch.cat(alone[name], -2), rtol=1e-9, atol=1e-12)


def test_groups_have_their_rates_and_their_decay() -> None:
    sizes = Architecture(**SIZES, head="untied", gated=True)
    routed = dataclasses.replace(sizes, routed=Routed(experts=2, top_k=1, every=2, capacity=2.0, balance=0.0))
    names = {name for one in (sizes, routed) for name, _ in GPT(one, 20, ("a",)).named_parameters()}
    groups: dict[str, set[str]] = {}
    for name in names:
        groups.setdefault(group_of(name), set()).add(name.split(".", 2)[-1] if name.startswith("blocks") else name)
    assert groups["matrices"] == {"attention.qkv.weight", "attention.out.weight", "feedforward.up", "feedforward.down"}
    assert groups["embeddings"] == {"token_embedding", "position_embedding"}
    assert groups["head"] == {"output_embedding"}
    assert {"feedforward.router", "feedforward.up_bias", "final_norm.weight", "attention.qkv.bias"} <= groups["rest"]
    model, peer = (GPT(sizes, 20, ("a", "b")).initialise(1).double() for _ in range(2))
    updates = Updates(
        kind="adamw", beta1=0.8, beta2=0.9, epsilon=1e-8, decay="matrices", matrices=2.0, embeddings=3.0, head=0.5
    )
    optimization = dataclasses.replace(OPTIMIZATION, optimizer=updates)
    ours = Optimizers(dict(model.named_parameters()), optimization, model.architecture)
    rates = {"matrices": 2.0, "embeddings": 3.0, "head": 0.5, "rest": 1.0}
    theirs = torch.optim.AdamW([
        {"params": [p], "lr": 1e-2 * rates[group_of(name)], "weight_decay": 0.1 * (group_of(name) == "matrices")}
        for name, p in peer.named_parameters()
    ], betas=(0.8, 0.9), eps=1e-8)  # fmt: skip
    for step in range(3):
        for one, other in zip(model.parameters(), peer.parameters(), strict=True):
            one.grad = numbers(*one.shape) * (step + 1)
            other.grad = one.grad.clone()
        ours.step(1e-2)
        theirs.step()
    for one, other in zip(model.parameters(), peer.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("end", [0.0, 0.25])
@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_schedules_are_those_of_transformers(kind: str, end: float) -> None:
    """Theirs begin at a rate of 0, ours with the first part of the warm-up; after it both are the same."""
    schedules = pytest.importorskip("transformers.optimization")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    if kind == "linear":
        peer = schedules.get_wsd_schedule(
            optimizer, 10, 90, num_training_steps=100, min_lr_ratio=end, decay_type="linear"
        )
    elif kind == "cosine":
        peer = schedules.get_cosine_with_min_lr_schedule_with_warmup(optimizer, 10, 100, min_lr_rate=end)
    else:
        peer = schedules.get_wsd_schedule(
            optimizer, 10, 30, num_training_steps=100, min_lr_ratio=end, decay_type="linear"
        )
    schedule = RateSchedule(kind=kind, end=end, **({"share": 0.3} if kind == "wsd" else {}))
    ours = dataclasses.replace(OPTIMIZATION, learning_rate=1.0, warmup=0.1, learning_rate_schedule=schedule)
    theirs = []
    for _ in range(100):
        theirs.append(peer.get_last_lr()[0])
        optimizer.step()
        peer.step()
    assert [ours.learning_rate_at(step) for step in range(10)] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert [ours.learning_rate_at(step) for step in range(10, 100)] == pytest.approx(theirs[10:], abs=1e-12)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_stretched_schedule_is_the_beginning_of_a_longer_one(kind: str) -> None:
    schedules = pytest.importorskip("transformers.optimization")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    peer = getattr(schedules, f"get_{kind}_schedule_with_warmup")(optimizer, 10, 110)
    schedule = RateSchedule(kind=kind, stretch=1.1)
    ours = dataclasses.replace(OPTIMIZATION, learning_rate=1.0, warmup=0.1, learning_rate_schedule=schedule)
    theirs = []
    for _ in range(100):
        theirs.append(peer.get_last_lr()[0])
        optimizer.step()
        peer.step()
    assert [ours.learning_rate_at(step) for step in range(10, 100)] == pytest.approx(theirs[10:], abs=1e-12)


@pytest.mark.parametrize("options", [{}, {"head": "clap"}, {"head": "untied"}])
def test_the_z_loss_has_the_gradients_of_the_formula(options: dict[str, Any]) -> None:
    weights, z_loss = numbers(2, 3, 8).abs(), 0.05
    gradients = []
    for plain in (False, True):
        model = GPT(Architecture(**SIZES, **options), 23, ("a", "b")).initialise(3).double()
        with torch.no_grad():
            model.token_embedding.mul_(40)
        ids = torch.randint(23, (2, 3, 9), generator=torch.Generator().manual_seed(1))
        hidden = model(ids[..., :-1])
        if plain:
            logits = model.logits(hidden)
            log_z = logits.logsumexp(-1)
            of_target = logits.gather(-1, ids[..., 1:, None]).squeeze(-1)
            losses = log_z - of_target + z_loss * log_z**2
        else:
            losses = -model.log_probabilities(hidden, ids[..., 1:], z_loss)
        for weight in (None, weights):
            model.zero_grad()
            (losses.mean() if weight is None else (losses * weight).sum()).backward(retain_graph=True)
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for ours, theirs in zip(gradients[:2], gradients[2:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


MUON = {"optimizer": Updates(kind="muon", matrices=3.0), "z_loss": 1e-3}


def test_absent_keys_are_in_no_fingerprint_and_no_rules_settings() -> None:
    plain = settings_from(TrainingRecipe, {"tokens": 1, "sequences": 1, "learning_rate": 1.0})
    for told in (fingerprinted(plain), taken(TrainingRecipe, plain)):
        assert not {"optimizer", "learning_rate_schedule", "z_loss"} & {*told}
    given = {"optimizer": {"kind": "muon", "matrices": 5}, "learning_rate_schedule": {"kind": "wsd"}, "z_loss": 0.1}
    other = settings_from(TrainingRecipe, {"tokens": 1, "sequences": 1, "learning_rate": 1.0, **given})
    assert fingerprinted(other)["optimizer"]["matrices"] == 5
    assert "stretch" not in fingerprinted(other)["learning_rate_schedule"]
    again = settings_from(TrainingRecipe, json.loads(json.dumps(taken(TrainingRecipe, other))))
    assert again == other


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"optimizer": {"kind": "lion"}}, "optimizer.kind: is 'lion'; allowed is one of adamw, muon"),
        ({"optimizer": {"matrices": 2.0}}, "optimizer.kind: is missing"),
        ({"optimizer": {"kind": "muon", "beta1": 1.0}}, "optimizer.beta1: is 1.0"),
        ({"learning_rate_schedule": {"kind": "cosine", "share": 0.5}}, "share: is given to the kind cosine"),
        ({"learning_rate_schedule": {"kind": "wsd", "stretch": 1.1}}, "stretch: is given to the kind wsd"),
        ({"z_loss": -1.0}, "z_loss: is -1.0"),
    ],
)
def test_wrong_settings_are_one_line(given: dict[str, Any], told: str) -> None:
    with pytest.raises(DemixError) as error:
        settings_from(TrainingRecipe, {"tokens": 1, "sequences": 1, "learning_rate": 1.0, **given})
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_training_with_muon_learns_and_goes_on_to_the_bit(tokens: Path, tmp_path: Path) -> None:
    training = dataclasses.replace(TRAIN, checkpoint_every=7, **MUON)
    shards = shard_paths(tokens)

    def trained(name: str) -> list[dict]:
        train_model("demix", training, shards, tmp_path / name, tmp_path / f"{name}.jsonl", tmp_path / f"c-{name}")
        return [row for row in read_json_lines(tmp_path / f"{name}.jsonl") if "loss" in row]

    whole = trained("whole")
    assert whole[-1]["loss"] < whole[0]["loss"] - 0.3
    seen = []

    class StoppedError(Exception):
        pass

    import demix.train.learner as learner

    save = learner.save_state

    def stopping(*arguments: Any, **named: Any) -> None:
        save(*arguments, **named)
        if not seen:
            seen.append(True)
            raise StoppedError

    learner.save_state = stopping
    try:
        with pytest.raises(StoppedError):
            trained("parted")
    finally:
        learner.save_state = save
    parted = trained("parted")
    assert [row["loss"] for row in parted] == [row["loss"] for row in whole]
    ours, theirs = (load_model(tmp_path / name, TRAINING) for name in ("whole", "parted"))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
