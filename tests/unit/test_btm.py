"""Experts that are trained by themselves: whole models (Branch-Train-Merge), and beside a frozen parent (FlexOlmo)."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from demix.config.counts import training_flops_per_token
from demix.errors import StoppedError
from demix.files import read_json, read_json_lines, sha256_file, write_json
from demix.model.directory import describe, load_experts, load_model
from demix.model.experts import add_expert, find_faults, load_without, remove_expert
from demix.model.merge import join_branches, join_metrics, merge_routed
from demix.report.systems import all_training_flops
from demix.train import stage
from demix.train.stage import ModelTraining
from support.cli import demix, said, succeeds
from support.entries import TINY, tiny
from support.errors import refused
from support.plain_training import adamw, plain_steps, rates
from support.tokens import TRAINING
from support.training import (
    SIZES,
    TRAIN,
    balanced_batches,
    dense_with_seeds,
    opened,
    places,
    rows,
    shard_paths,
    stop_at,
    tensors,
    train_into,
    updates,
)

STEPS, SEED = 24, 10
EXACT = TRAIN.replace(precision="fp64")
SHORT = TRAIN.replace(tokens=32 * 2 * 3 * 12)


def branch(run: Path, tokens: Path, name: str, step: int = SEED, into: str = "btm", **more: Any) -> Path:
    """The training of one expert from the dense state after `step` updates."""
    training = more.pop("training", EXACT)
    state, shards = run / "seeds" / "dense" / f"step-{step:08d}", shard_paths(tokens, [name])
    return train_into(run / into / name, "branched", shards, training, branch=state, share=3, **more)


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, its states after 10 and all steps, and three experts that go on from the first, joined."""
    folder = tmp_path_factory.mktemp("run")
    dense_with_seeds(folder, shard_paths(tokens), [SEED, STEPS], EXACT)
    branches = [branch(folder, tokens, name) for name in TRAINING]
    join_branches([path / "model" for path in branches], folder / "joined")
    join_metrics([path / "metrics.jsonl" for path in branches], folder / "joined.jsonl")
    return folder


@pytest.mark.parametrize("schedule", ["continue", "restart"])
def test_an_expert_is_that_of_a_plain_loop(run: Path, tokens: Path, schedule: str) -> None:
    restart, name = schedule == "restart", TRAINING[1]
    if restart:
        plain = EXACT.replace(warmup=0.0, learning_rate=2e-3)
        branch(run, tokens, name, into="restarted", training=plain, restart=True)
    model = load_model(run / "model").double().requires_grad_(True)
    optimizer = adamw(model)
    folder = run / "seeds" / "dense" / f"step-{SEED:08d}"
    state = load_file(folder / "shared.safetensors") | load_file(folder / "expert-dense.safetensors")
    for ours, parameter in model.named_parameters():
        kinds = ("parameter", "optimizer/exp_avg", "optimizer/exp_avg_sq")
        value, first, second = (state[f"{kind}/{ours}"].view_as(parameter).clone() for kind in kinds)
        parameter.data.copy_(value)
        if not restart:
            optimizer.state[parameter] = {"step": torch.tensor(float(SEED)), "exp_avg": first, "exp_avg_sq": second}
    batches = balanced_batches(opened(tokens)[1:2], [name], 2, 32, seed=1)
    own, of_parent = rates(STEPS - SEED, 2e-3, 0), rates(STEPS, EXACT.learning_rate, EXACT.warmup)[SEED:]
    list(plain_steps(model, optimizer, batches, dict(enumerate(own if restart else of_parent, start=SEED))))
    expert = load_model(run / ("restarted" if restart else "btm") / name / "model")
    for ours, parameter in model.named_parameters():
        torch.testing.assert_close(expert.get_parameter(ours), parameter, rtol=0, atol=1e-9, check_dtype=False)


def test_the_joined_model_has_the_experts_and_counts_the_seed_once(run: Path) -> None:
    joined = run / "joined"
    for name, whole in zip(TRAINING, load_experts(joined, TRAINING), strict=True):
        alone = load_model(run / "btm" / name / "model").state_dict()
        assert all(torch.equal(tensor, alone[key]) for key, tensor in whole.state_dict().items())
    step_tokens = 3 * 2 * 32
    counts = {"steps": STEPS, "tokens": STEPS * step_tokens, "shared_parameters": 0}
    counts |= {"tokens_seed": SEED * step_tokens}
    about = describe(joined).content
    assert {key: about[key] for key in counts} == counts
    assert about["data_sha256"].keys() == {*TRAINING}
    assert read_json(joined / "experts" / f"{TRAINING[0]}.json")["tokens"] == (SEED * 3 + STEPS - SEED) * 2 * 32
    rows = read_json_lines(run / "joined.jsonl")
    parts = [read_json_lines(run / "btm" / name / "metrics.jsonl") for name in TRAINING]
    assert [row["step"] for row in rows] == list(range(SEED, STEPS + 1))
    for row, *several in zip(rows[1:], *(part[1:] for part in parts), strict=True):
        assert row["tokens"] == row["step"] * step_tokens
        assert row["loss"] == pytest.approx(sum(one["loss"] for one in several) / 3)
        assert {key for key in row if key.startswith("loss/")} == {f"loss/{name}" for name in TRAINING}
    assert said(["experts", "list", str(joined)]) is None


def test_a_merged_model_counts_each_seed_once(run: Path, tokens: Path, tmp_path: Path) -> None:
    """In the model's description, too, since whole models share nothing. Experts without a weight count nothing."""
    model, seed, own = tmp_path / "btm", SEED * 3 * 64, (STEPS - SEED) * 64
    shutil.copytree(run / "joined", model)
    first, second, third = TRAINING
    late = branch(run, tokens, first, STEPS, into="late")
    add_expert(model, late / "model" / "experts" / f"{first}.safetensors", "late")

    def tokens_of(*names: str) -> int:
        weights = ",".join([*(f"{name}={1 / len(names)!r}" for name in names), *(f"{first}=0",) * (first not in names)])
        output = tmp_path / "-".join(names)
        assert said(["merge", str(model), "--weights", weights, "--output", str(output)]) is None
        about, lineage = describe(output).content, read_json(output / "experts" / "dense.json")
        assert about["tokens"] == lineage["tokens"]
        assert about["tokens_seed"] == sum(lineage["seeds"].values())
        assert about["data_sha256"] == lineage["data_sha256"]
        return int(about["tokens"])

    assert tokens_of(first, second, third) == seed + 3 * own == describe(run / "joined").tokens
    assert tokens_of(second, third) == seed + 2 * own
    of_late = STEPS * 3 * 64
    assert tokens_of(first, "late") == seed + own + of_late, "of another seed"
    add_expert(model, tmp_path / f"{first}-late" / "experts" / "dense.safetensors", "both")
    assert tokens_of("both", third) == seed + of_late + 2 * own, "an average of averages"


def test_branches_that_do_not_belong_together_are_refused(run: Path, tmp_path: Path) -> None:
    one, two = (run / "btm" / name / "model" for name in TRAINING[:2])
    with refused(one):
        join_branches([one, one], tmp_path / "model")
    other = tmp_path / "other" / "model.json"
    other.parent.mkdir()
    write_json(other, {**describe(two).content, "steps": 9})
    with refused(other):
        join_branches([one, other.parent], tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_job_trains_one_expert_with_its_share_of_the_tokens(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its own training of a third of the tokens, after the job was stopped, too."""
    train_into(tmp_path / "alone", "branched", shard_paths(tokens, TRAINING[1:2]), SHORT, share=3)
    options = [word for key, path in places(tmp_path / "job").results.items() for word in (key, str(path))]
    options += ["--checkpoints", str(tmp_path / "job" / "checkpoints")]
    settings = json.dumps(SHORT.as_dict())
    command = ["train", "branched", *map(str, shard_paths(tokens)), "--settings", settings, *options, "--expert"]
    for wrong in (["dense"], ["fantasy"]):
        assert str(said([*command, *wrong])).startswith(f"demix: error: --expert {wrong[0]}: ")
    drawn = stop_at(monkeypatch, {7}, TRAINING[1:2])
    assert isinstance(demix(*command, TRAINING[1]).exception, StoppedError)
    assert said([*command, TRAINING[1]]) is None
    assert [step for _, step in drawn] == [*range(8), *range(7, 12)]
    assert tensors(tmp_path / "job") == tensors(tmp_path / "alone") != {}
    assert rows(tmp_path / "job") == rows(tmp_path / "alone") != []


PAIR = {"experts": 2, "top_k": 2, "every": 1, "capacity": 2.0, "balance": 0.0}
RECIPE = TRAIN.replace(architecture=SIZES | {"routed": PAIR}, tokens=192 * 6, weight_decay=0.0, learning_rate=1e-2)
OWN = TRAINING[1]


@pytest.fixture(scope="module")
def dense(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    return train_into(folder, "dense", shard_paths(tokens)) / "model"


def train_pair(dense: Path, tokens: Path, folder: Path, own: str = OWN) -> Path:
    training = ModelTraining("anchored", RECIPE, shard_paths(tokens), branch=dense).of_expert(own)
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
    hooks = [
        block.feedforward.register_forward_pre_hook(lambda _, given, layer=layer: found[layer].append(given[0]))
        for layer, block in enumerate(model.blocks)
    ]
    with torch.no_grad():
        model(text.view(1, -1, 32))
    for hook in hooks:
        hook.remove()
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
    assert describe(tmp_path / OWN / "model").kind == "anchored"


def test_a_merge_has_the_anchor_and_the_experts_as_they_were(dense: Path, tokens: Path, tmp_path: Path) -> None:
    names = sorted(TRAINING)
    pairs = [train_pair(dense, tokens, tmp_path, name) for name in names]
    join_branches(pairs[:2], tmp_path / "flexolmo")
    add_expert(tmp_path / "flexolmo", pairs[2] / "experts" / f"{names[2]}.safetensors")
    succeeds("merge", tmp_path / "flexolmo", "--routed", "--output", tmp_path / "merged")
    choices = read_json(tmp_path / "merged" / "experts" / "dense.json")["choices"]
    assert [one["expert"] for one in choices] == ["dense", *names]
    parts = [load_file(path / "experts" / f"{name}.safetensors") for path, name in zip(pairs, names, strict=True)]
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
    # An expert that leaves leaves nothing of its text: the merge of the others is the merge without it.
    fewer = shutil.copytree(tmp_path / "flexolmo", tmp_path / "fewer")
    remove_expert(fewer, OWN)
    merge_routed(fewer, tmp_path / "again")
    again, left = load_model(tmp_path / "again"), load_without(tmp_path / "merged", OWN)
    assert all(torch.equal(left.get_parameter(name), tensor) for name, tensor in again.named_parameters())
    tampered = tmp_path / "flexolmo" / "experts" / f"{names[2]}.safetensors"
    tensors = load_file(tampered)
    tensors["blocks.0.feedforward.up"][0] += 1
    save_file(tensors, tampered)
    lineage = read_json(tampered.with_suffix(".json"))
    write_json(tampered.with_suffix(".json"), lineage | {"sha256": sha256_file(tampered)})
    with refused(tampered):
        merge_routed(tmp_path / "flexolmo", tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_the_flops_of_a_trained_merge_count_those_of_its_experts() -> None:
    flexolmo = {"kind": "anchored", "parent": "dense", "seed_tokens": 6000, "weight_decay": 0.0}
    routers = {"kind": "routed", "parent": "flexolmo", "tokens": 6000, "trained": "routers"}
    run = tiny({"flexolmo": flexolmo, "routers": routers})
    models = {model.name: model for model in run.trained}
    pair, merge = models["flexolmo"], models["routers"]
    assert (merge.architecture.routed.experts, pair.architecture.routed.experts) == (len(pair.domains) + 1, 2)
    dense, of_pair, of_merge = (
        training_flops_per_token(one, run.types, one.context)
        for one in (pair.architecture.unrouted, pair.architecture, merge.architecture)
    )
    seed, own = pair.first_step * pair.step_tokens, (pair.updates - pair.first_step) * pair.step_tokens
    wanted = seed * dense + own * of_pair + merge.updates * merge.step_tokens * of_merge
    assert all_training_flops(merge, run) == pytest.approx(wanted, rel=1e-12)
    # By `match: flops` a pair has as many as a dense model of its tokens, up to an update.
    assert abs(own * of_pair - (TINY["training"]["tokens"] - seed) * dense) < pair.step_tokens * of_pair
