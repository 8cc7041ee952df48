"""FlexOlmo's experts: each learns beside a parent's feedforwards that stay as they are."""

import copy
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from demix.config.counts import training_flops_per_token
from demix.files import read_json, sha256_file, write_json
from demix.model.checkpoint import describe, load_model
from demix.model.experts import find_faults, remove_expert
from demix.model.gpt import seeing
from demix.model.merge_routed import merge_routed
from demix.report.families import all_training_flops
from demix.run.check import completed_run
from demix.train import stage
from demix.train.batches import balanced_batches
from demix.train.join import join_branches
from demix.train.stage import ModelTraining
from support.errors import refused
from support.plain_training import plain_steps, rates
from support.tokens import TRAINING
from support.training import SIZES, TRAIN, opened, places, shard_paths, train_into, updates

TINY = yaml.safe_load((Path(__file__).parents[1] / "workflow" / "tiny.yaml").read_text())
PAIR = {"experts": 2, "top_k": 2, "every": 1, "capacity": 2.0, "balance": 0.0}
RECIPE = dataclasses.replace(
    TRAIN, architecture=SIZES | {"routed": PAIR}, tokens=192 * 6, weight_decay=0.0, learning_rate=1e-2
)
OWN = TRAINING[1]


@pytest.fixture(scope="module")
def dense(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    return train_into(folder, "dense", shard_paths(tokens)) / "model"


def train_pair(dense: Path, tokens: Path, folder: Path, own: str = OWN) -> Path:
    training = ModelTraining("anchored", RECIPE, shard_paths(tokens), branch=dense).alone(own)
    stage.train_model(training, places(folder / own))
    return folder / own / "model"


class Pair(nn.Module):
    """A dense feedforward and a copy of it that learns, by the gates of a sigmoid."""

    def __init__(self, dense: nn.Module, row: Tensor):
        super().__init__()
        self.anchor, self.own, self.row = dense, copy.deepcopy(dense), nn.Parameter(row)

    def forward(self, x: Tensor, auxiliary: Any = None) -> Tensor:
        gate = torch.sigmoid(x @ self.row)[..., None]
        return (1 - gate) * self.anchor(x) + gate * self.own(x)


def mean_states(model: nn.Module, tokens: Path, domain: str) -> list[Tensor]:
    """The mean input of each feedforward over the first 40 blocks of a domain's text."""
    shard = opened(tokens)[TRAINING.index(domain)]
    assert len(shard) > 40 * 32
    text = torch.tensor([shard.end_of_text, *shard.read(0, 40 * 32 - 1).tolist()])
    found: dict[int, list[Tensor]] = {0: [], 1: []}
    with (
        torch.no_grad(),
        seeing(dict(enumerate(one.feedforward for one in model.blocks)), lambda n, x: found[n].append(x)),
    ):
        model(text.view(1, -1, 32))
    return [torch.cat(found[layer], 1).double().mean((0, 1, 2)) for layer in (0, 1)]


def test_a_pair_is_trained_as_a_plain_loop_trains_it(dense: Path, tokens: Path, tmp_path: Path) -> None:
    trained = load_model(train_pair(dense, tokens, tmp_path), (OWN,))
    model = load_model(dense)
    begun = {name: parameter.clone() for name, parameter in model.named_parameters()}
    means = {domain: mean_states(model, tokens, domain) for domain in TRAINING}
    model.requires_grad_(False)
    for layer, block in enumerate(model.blocks):
        common = torch.stack([means[domain][layer] for domain in TRAINING]).mean(0)
        block.feedforward = Pair(block.feedforward, (10 / 32**0.5 * (means[OWN][layer] - common)).float())
        block.feedforward.own.requires_grad_(True)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.0)
    shard = opened(tokens)[TRAINING.index(OWN)]
    drawn = balanced_batches([shard], [OWN], 2, 32, 1)
    # A third of the steps of all, with a third of their tokens each.
    of_steps = dict(enumerate(rates(6, RECIPE.learning_rate, RECIPE.warmup)))
    for row, step in zip(updates(tmp_path / OWN), plain_steps(model, optimizer, drawn, of_steps), strict=True):
        assert row["loss"] == pytest.approx(step.loss, rel=1e-5)
        assert row["gradient_norm"] == pytest.approx(step.norm, rel=1e-4)
    for name, parameter in trained.named_parameters():
        if ".feedforward." not in name:
            assert torch.equal(parameter, begun[name]), name
            continue
        pair = model.get_submodule(name.rpartition(".")[0])
        if name.endswith("router"):
            assert not parameter[0, 0].any()
            torch.testing.assert_close(parameter[0, 1], pair.row.detach(), rtol=0, atol=2e-5)
        else:
            own = pair.own.get_parameter(name.rpartition(".")[2])
            assert torch.equal(parameter[0, 0], begun[name][0]), name
            torch.testing.assert_close(parameter[0, 1], own.detach()[0], rtol=0, atol=2e-5)
            assert not torch.equal(parameter[0, 1], begun[name][0]), name
    assert describe(tmp_path / OWN / "model")["kind"] == "anchored"


def test_a_merge_has_the_anchor_and_the_experts_as_they_were(dense: Path, tokens: Path, tmp_path: Path) -> None:
    pairs = [train_pair(dense, tokens, tmp_path, name) for name in TRAINING]
    join_branches(pairs, tmp_path / "flexolmo")
    dev = {name: tokens / "tokens" / name / "dev.arrow" for name in TRAINING}
    merge_routed(tmp_path / "flexolmo", dict.fromkeys(dev, tmp_path / "no text"), tmp_path / "merged")
    choices = read_json(tmp_path / "merged" / "experts" / "dense.json")["choices"]
    assert [(one["expert"], one["data_sha256"]) for one in choices] == [(name, None) for name in ("dense", *TRAINING)]
    parts = [load_file(path / "experts" / f"{name}.safetensors") for path, name in zip(pairs, TRAINING, strict=True)]
    parents = load_file(dense / "shared.safetensors") | load_file(dense / "experts" / "dense.safetensors")
    merged = load_file(tmp_path / "merged" / "experts" / "dense.safetensors")
    whole = load_file(tmp_path / "merged" / "shared.safetensors") | merged
    assert whole.keys() == parts[0].keys()
    for name, tensor in whole.items():
        if name not in merged:
            assert torch.equal(tensor, parents[name]), name
            continue
        assert torch.equal(tensor, torch.cat([parts[0][name][:1], *(part[name][1:] for part in parts)])), name
        anchor = torch.zeros_like(tensor[0]) if name.endswith("router") else parents[name]
        assert torch.equal(tensor[0], anchor), name
    assert find_faults(tmp_path / "merged") == []
    # Without its experts but one, and without choosing, a merge is the pair of that expert.
    left = tmp_path / "left"
    shutil.copytree(tmp_path / "merged", left)
    for name in TRAINING:
        if name != OWN:
            remove_expert(left, name)
    pair, again = load_model(pairs[1], (OWN,)), load_model(left)
    text = torch.arange(32).view(1, 1, 32)
    torch.testing.assert_close(again(text), pair(text), rtol=0, atol=1e-6)
    tampered = tmp_path / "flexolmo" / "experts" / f"{OWN}.safetensors"
    tensors = load_file(tampered)
    tensors["blocks.0.feedforward.up"][0] += 1
    save_file(tensors, tampered)
    lineage = read_json(tampered.with_suffix(".json"))
    write_json(tampered.with_suffix(".json"), lineage | {"sha256": sha256_file(tampered)})
    with refused(tampered):
        merge_routed(tmp_path / "flexolmo", dev, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_the_flops_of_a_trained_merge_count_those_of_its_experts() -> None:
    flexolmo = {"kind": "anchored", "parent": "dense", "seed_tokens": 6000, "weight_decay": 0.0}
    routers = {"kind": "routed", "parent": "flexolmo", "tokens": 6000, "trained": "routers"}
    run = completed_run(copy.deepcopy(TINY) | {"models": {"flexolmo": flexolmo, "routers": routers}})
    models = {model.name: model for model in run.trained}
    pair, merge = models["flexolmo"], models["routers"]
    assert (merge.architecture.routed.experts, pair.architecture.routed.experts) == (len(pair.domains) + 1, 2)
    dense, of_pair, of_merge = (
        training_flops_per_token(one, run.types, one.context)
        for one in (pair.architecture.unrouted, pair.architecture, merge.architecture)
    )
    seed, own = pair.first_step * pair.step_tokens, (pair.updates - pair.first_step) * pair.step_tokens
    wanted = seed * dense + own * of_pair + merge.updates * merge.step_tokens * of_merge
    before = dict.fromkeys(models, 10**9)
    assert all_training_flops(merge, run, before) == pytest.approx(wanted, rel=1e-12)
    # By `match: flops` a pair has as many as a dense model of its tokens, up to an update.
    assert abs(own * of_pair - (TINY["training"]["tokens"] - seed) * dense) < pair.step_tokens * of_pair
