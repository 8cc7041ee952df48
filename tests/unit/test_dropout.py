"""Dropout in training: OPT's places, F.dropout's scale, masks that follow from the sequence, none in scoring."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from demix.config.architecture import Architecture
from demix.config.training import fingerprinted
from demix.files import seed_for
from demix.model.checkpoint import load_model
from demix.model.import_hf import import_hf
from demix.model.layers import Dropout
from demix.plan.flops import activation_bytes
from demix.run.check import completed_run
from demix.run.placement import place
from demix.settings import settings_from
from demix.train.batches import batches_of
from demix.train.schedule import Optimization
from support.checkpoints import checkpoint, farthest
from support.configs import small
from support.errors import refused
from support.tokens import TRAINING
from support.training import ADAPT, SIZES, TRAIN, opened

RATE = 0.25
ARCHITECTURE = Architecture(**SIZES)


def test_a_mask_is_the_draw_of_its_sequence_and_layer() -> None:
    x = torch.empty(2, 3, 5, 7)
    kept, _ = Dropout(RATE, [[1, 2, 3], [4, 5, 6]]).masks(3, x)
    for (e, b), seed in np.ndenumerate([[1, 2, 3], [4, 5, 6]]):
        generator = torch.Generator().manual_seed(seed_for(int(seed), 3))
        for place_of in range(2):
            for t in range(5):
                drawn = torch.rand(7, generator=generator)
                assert torch.equal(kept[place_of, e, b, t], drawn >= RATE)
    # Another sequence beside it changes nothing, another layer all.
    assert torch.equal(Dropout(RATE, [[6, 1]]).masks(3, x[:1, :2])[0][:, 0, 1], kept[:, 0, 0])
    assert not torch.equal(Dropout(RATE, [[1, 2, 3], [4, 5, 6]]).masks(2, x)[0], kept)
    (some, scale), ones = Dropout(RATE, [[9]]).masks(0, torch.empty(1, 1, 400, 500)), torch.ones(400, 500)
    theirs = F.dropout(ones, RATE)
    assert (some[0] * scale).unique().tolist() == theirs.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert (some * scale).mean(dim=(1, 2, 3, 4)).tolist() == pytest.approx([theirs.mean().item()] * 2, abs=0.01)


def test_the_places_are_those_of_opt(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients are those of transformers' OPT, whose F.dropout takes the same masks one after the other."""
    theirs = checkpoint(tmp_path / "hf", tokens, "opt", dropout=RATE, attn_implementation="sdpa")
    import_hf(tmp_path / "hf", tmp_path / "in")
    model, ids = load_model(tmp_path / "in"), torch.randint(2, 400, (2, 40), generator=torch.Generator().manual_seed(1))
    dropout = Dropout(RATE, [[11, 12]])
    masks = iter([mask for layer in range(3) for mask in dropout.masks(layer, torch.empty(1, 2, 40, 32))[0][:, 0]])

    def drop(x: Tensor, p: float, training: bool) -> Tensor:
        assert (p, training) == (RATE, True)
        return x * next(masks).reshape(x.shape) / (1 - p)

    monkeypatch.setattr(torch.nn.functional, "dropout", drop)
    wanted = theirs.train()(ids, labels=ids)
    assert next(masks, None) is None, "two places in each block, and none besides"
    wanted.loss.backward()
    model.requires_grad_(True)
    hidden = model(ids[None], dropout=dropout)
    assert farthest(model.logits(hidden)[0].detach(), wanted.logits.detach()) < 1e-5
    model.log_probabilities(hidden[:, :, :-1], ids[None, :, 1:]).mean().neg().backward()
    decoder = "model.decoder.layers"
    pairs = {
        "token_embedding": "model.decoder.embed_tokens.weight",
        "blocks.1.attention.out.weight": f"{decoder}.1.self_attn.out_proj.weight",
        "blocks.2.feedforward.up": f"{decoder}.2.fc1.weight",
    }
    for ours, name in pairs.items():
        gradient = model.get_parameter(ours).grad
        assert farthest(gradient.view_as(theirs.get_parameter(name)), theirs.get_parameter(name).grad) < 1e-4, name


def test_a_seed_follows_from_the_step_the_domain_and_the_number_there(tokens: Path) -> None:
    shards = opened(tokens)

    def seeds(how: str, names: Any = TRAINING, seed: int = 1, placement: Any = None, step: int = 5) -> Tensor:
        return batches_of(how, shards[: len(names)], names, 4, 32, seed, placement).draw(step).seeds

    whole = seeds("by_domain")
    assert whole.shape == (3, 4)
    assert len({*whole.flatten().tolist(), *seeds("by_domain", step=6).flatten().tolist()}) == 24
    assert not {*seeds("by_domain", seed=2).flatten().tolist()} & {*whole.flatten().tolist()}
    assert torch.equal(seeds("mixed").view(3, 4), whole), "dense models drop as experts do"
    assert torch.equal(seeds("by_domain", TRAINING[:1]), whole[:1]), "whatever other domains there are"
    for ranks in (3, 6):
        parts = place("demix", TRAINING, 4, ranks)
        found = torch.cat([seeds("by_domain", placement=part).flatten() for part in parts])
        assert torch.equal(found.view(3, 4), whole)
    proportional = seeds("proportional")
    assert len({*proportional.flatten().tolist()}) == 12
    parts = place("dense_unbalanced", TRAINING, 4, 5)
    assert torch.equal(torch.cat([seeds("proportional", placement=part) for part in parts], 1), proportional)


def test_the_key_is_absent_where_nothing_is_dropped() -> None:
    for settings in (TRAIN, ADAPT):
        plain = fingerprinted(settings)
        assert "dropout" not in plain
        assert fingerprinted(dataclasses.replace(settings, dropout=0.1)) == plain | {"dropout": 0.1}
    run = completed_run(small(training={"dropout": 0.1}, models={"plain": {"kind": "demix", "dropout": None}}))
    assert (run.rows["demix"].settings.dropout, run.rows["plain"].settings.dropout) == (0.1, None)
    for wrong in (1.0, -0.1, "0.1"):
        with refused("--settings.dropout"):
            settings_from(Optimization, {"steps": 1, "learning_rate": 0.1, "dropout": wrong})
    seeded = {"kind": "demix", "parent": "dense", "seed_tokens": 500, "dropout": 0.1}
    with refused("models.mine.dropout"):
        completed_run(small(models={"mine": seeded}))


def test_a_plan_counts_the_masks() -> None:
    for checkpointing, layers in ((False, 2), (True, 1)):
        plain, with_masks = (
            activation_bytes(ARCHITECTURE, 400, 3, 2, checkpointing=checkpointing, dropout=on) for on in (False, True)
        )
        tokens = 3 * ARCHITECTURE.context
        assert with_masks - plain == 2 * tokens * ARCHITECTURE.width * layers, "a byte for each unit at two places"
