"""Adaptation changes one file of a model of experts, or writes a dense model of its own."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from demix.config.adaptation import FactorSweep
from demix.config.training import stated
from demix.data.shards import TokenShard, blocks
from demix.evaluate.choice import choose_parent, own_dev_losses
from demix.evaluate.score import Scoring
from demix.files import read_json
from demix.launch.job import Places
from demix.model.directory import expert_names, load_experts, load_model
from demix.model.experts import add_expert, changing
from demix.model.merge import averaged, join_branches
from demix.model.scoring import log_probabilities
from demix.report.read import Parent, read_parents
from demix.train.adapt import adapt
from support.cli import succeeds
from support.contents import contents
from support.errors import refused
from support.scored import score
from support.tokens import NOVEL, TRAINING
from support.training import ADAPT, TRAIN, novel_shards, places, rows, shard_paths, tensors, train_into


@pytest.fixture(scope="module")
def trained(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DEMix and a dense model, and the DEMix model's score tables."""
    run = tmp_path_factory.mktemp("trained")
    longer = TRAIN.replace(tokens=4 * TRAIN.tokens)
    for kind in ("demix", "dense"):
        train_into(run / kind, kind, shard_paths(tokens), longer)
    scoring = Scoring(dev_blocks=10, test_tokens=500, precision="fp32", threads=1)
    dev = shard_paths(tokens, TRAINING + NOVEL, "dev")
    score(run / "demix" / "model", TRAINING, dev, scoring, run / "scores")
    return run


def test_demix_dapt_adds_a_file_and_changes_no_other(
    tokens: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, scores = tmp_path / "model", trained / "scores"
    shutil.copytree(trained / "demix" / "model", model)
    before = contents(model)
    chosen = choose_parent(scores, "fantasy", TRAINING, blocks=5, decay=0.3)
    unchanged = own_dev_losses(scores, TRAINING, ADAPT.forgetting_blocks)
    given = (model, novel_shards(tokens), ADAPT, places(tmp_path))
    monkeypatch.setattr("demix.model.experts.LOCK_SECONDS", 0.0)
    with changing(model), refused(model):
        adapt(*given, chosen=chosen, unchanged=unchanged)
    assert expert_names(model) == tuple(sorted(TRAINING))
    adapt(*given, chosen=chosen, unchanged=unchanged)
    after = contents(model)
    assert set(after) - set(before) == {"experts/fantasy.safetensors", "experts/fantasy.json"}
    assert {path: after[path] for path in before} == before
    assert expert_names(model) == ("fantasy", *sorted(TRAINING))

    lineage = read_json(model / "experts" / "fantasy.json")
    assert lineage["parent"] == chosen["parent"] == max(chosen["priors"], key=chosen["priors"].__getitem__)
    assert sum(chosen["priors"].values()) == pytest.approx(1.0)
    assert lineage["lowest_dev_loss_expert"] == min(chosen["dev_losses"], key=chosen["dev_losses"].__getitem__)
    assert lineage["parent_sha256"] == before[f"experts/{chosen['parent']}.safetensors"]

    # The other experts' scores are what they were, and the new expert knows its domain better than its parent.
    cut = blocks(TokenShard.open(novel_shards(tokens)[1]), 32, 6 * 32)
    table = log_probabilities(load_model(model, (*TRAINING, "fantasy")), *cut)
    np.testing.assert_array_equal(table[:3], log_probabilities(load_model(model, TRAINING), *cut))
    parent = TRAINING.index(chosen["parent"])
    assert -table[3].mean() < -table[parent].mean()
    evaluations = [row for row in rows(tmp_path) if "dev_loss/fantasy" in row]
    assert evaluations[0]["dev_loss/fantasy"] == pytest.approx(-table[parent].mean(), rel=1e-5)
    assert min(row["dev_loss/fantasy"] for row in evaluations) == pytest.approx(-table[3].mean(), rel=1e-5)
    assert len({row["dev_loss/scripture"] for row in evaluations}) == 1


def adapted(run: Path, text: Path, folder: Path, **changes: Any) -> Path:
    """Dense-DAPT with other settings, into `folder`."""
    dev, how = shard_paths(text, split="dev"), ADAPT.replace(**changes)
    adapt(run / "dense" / "model", novel_shards(text), how, places(folder), training=dev)
    return folder


def test_dense_dapt_writes_its_own_model(tokens: Path, trained: Path, tmp_path: Path) -> None:
    before = contents(trained / "dense" / "model")
    adapted(trained, tokens, tmp_path)
    assert contents(trained / "dense" / "model") == before
    old, new = load_model(trained / "dense" / "model"), load_model(tmp_path / "model")
    assert not torch.equal(old.token_embedding, new.token_embedding)
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == (tokens / "tokenizer.json").read_bytes()
    evaluations = [row for row in rows(tmp_path) if "dev_loss/fantasy" in row]
    assert min(row["dev_loss/fantasy"] for row in evaluations) < evaluations[0]["dev_loss/fantasy"]
    assert len({row["dev_loss/scripture"] for row in evaluations}) > 1


def test_dense_dapt_of_feedforwards_is_demix_dapt_of_one_expert(tokens: Path, trained: Path, tmp_path: Path) -> None:
    """To the bit, and shared parameters stay."""
    begun = trained / "dense" / "model"
    adapted(trained, tokens, tmp_path / "dense", trained="feedforwards")
    model = shutil.copytree(begun, tmp_path / "model")
    chosen = {"parent": "dense", "parent_prior": 1.0, "priors": {"dense": 1.0}}
    adapt(model, novel_shards(tokens), ADAPT, places(tmp_path), chosen=chosen)
    own = load_file(tmp_path / "dense" / "model" / "experts" / "dense.safetensors")
    added = load_file(model / "experts" / "fantasy.safetensors")
    assert own.keys() == added.keys()
    assert all(np.array_equal(own[name], added[name]) for name in own)
    assert not all(
        np.array_equal(own[name], one) for name, one in load_file(begun / "experts" / "dense.safetensors").items()
    )
    before, after = (contents(one)["shared.safetensors"] for one in (begun, tmp_path / "dense" / "model"))
    assert before == after


def test_passes_bound_the_tokens_by_the_text(tokens: Path, trained: Path, tmp_path: Path) -> None:
    text = len(TokenShard.open(novel_shards(tokens)[0]))
    adapted(trained, tokens, tmp_path, tokens=10**9, passes=1, patience=10**6, evaluate_every=10**6)
    lineage = read_json(tmp_path / "model" / "model.json")
    assert (lineage["adaptation"]["tokens"], lineage["adaptation"]["passes"]) == (text, 1)
    assert lineage["steps_run"] == text // (ADAPT.sequences * TRAIN.architecture["context"])
    # Settings without the key are those that earlier runs were made with.
    assert "passes" not in stated(ADAPT)


def test_a_sweep_keeps_the_factor_of_the_lowest_dev_loss(tokens: Path, trained: Path, tmp_path: Path) -> None:
    """It is to the bit the adaptation with that factor alone, and tells the others; one that diverges is left out."""
    swept = adapted(trained, tokens, tmp_path / "swept", sweep=FactorSweep(factors=(0.01, 0.5, 1e12)))
    alone = adapted(trained, tokens, tmp_path / "alone", learning_rate_factor=0.5)
    lineage = read_json(swept / "model" / "model.json")
    assert [trial["learning_rate_factor"] for trial in lineage["trials"]] == [0.01, 0.5, 1e12]
    assert lineage["trials"][2]["diverged"]
    losses = [trial["best"]["dev_loss/fantasy"] for trial in lineage["trials"][:2]]
    assert losses[1] < losses[0] < lineage["trials"][0]["start"]["dev_loss/fantasy"]
    assert lineage["adaptation"]["learning_rate_factor"] == 0.5
    assert tensors(swept) == tensors(alone)
    assert rows(swept) == rows(alone)
    with refused(trained / "dense" / "model"):
        adapted(trained, tokens, tmp_path / "none", sweep=FactorSweep(factors=(1e12,)))


SHORT = ADAPT.replace(tokens=32 * 4 * 10)


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three experts that are whole models, joined, and their score tables."""
    folder = tmp_path_factory.mktemp("run")
    for name in TRAINING:
        train_into(folder / name, "branched", shard_paths(tokens, [name]), share=3)
    join_branches([folder / name / "model" for name in TRAINING], folder / "model")
    dev = shard_paths(tokens, (*TRAINING, "fantasy"), "dev")
    score(folder / "model", TRAINING, dev, Scoring(dev_blocks=10, threads=1), folder / "scores")
    return folder


def by_numpy(model: Path, weights: dict[str, float]) -> dict[str, np.ndarray]:
    tensors = {name: load_file(model / "experts" / f"{name}.safetensors") for name in weights}
    first = next(iter(tensors.values()))
    return {
        key: sum(weight * tensors[name][key].astype(np.float64) for name, weight in weights.items()) for key in first
    }


def listed(weights: dict[str, float]) -> str:
    return ",".join(f"{name}={weight!r}" for name, weight in weights.items())


@pytest.mark.parametrize("weights", [(1 / 3, 1 / 3, 1 / 3), (0.7, 0.25, 0.05), (0.0, 1.0, 0.0)])
def test_a_merged_model_is_numpys_average_of_every_tensor(
    run: Path, tmp_path: Path, weights: tuple[float, ...]
) -> None:
    given = dict(zip(TRAINING, weights, strict=True))
    output = tmp_path / "merged"
    succeeds("merge", run / "model", "--weights", listed(given), "--output", output)
    found, wanted = load_file(output / "experts" / "dense.safetensors"), by_numpy(run / "model", given)
    assert found.keys() == wanted.keys() >= {"token_embedding", "blocks.0.attention.out.weight"}
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-7)
    succeeds("experts", "list", output)
    (model,) = load_experts(output)
    assert model.experts == ("dense",)


def test_neither_order_nor_names_change_a_bit_of_an_average(run: Path, tmp_path: Path, tokens: Path) -> None:
    weights = dict(zip(TRAINING, (0.45, 0.35, 0.2), strict=True))
    model = run / "model"
    forward, backward = (averaged(model, dict(order)) for order in (weights.items(), reversed(weights.items())))
    assert all(map(torch.equal, forward.parameters(), backward.parameters()))
    renamed = {name: f"{'zyx'[number]}_{name}" for number, name in enumerate(TRAINING)}
    other = shutil.copytree(model, tmp_path / "renamed")
    for name, new in renamed.items():
        add_expert(other, model / "experts" / f"{name}.safetensors", new)
    again = averaged(other, {renamed[name]: weight for name, weight in weights.items()})
    assert all(map(torch.equal, forward.parameters(), again.parameters()))


def test_an_added_expert_begins_as_the_average_by_posterior(run: Path, tokens: Path, tmp_path: Path) -> None:
    model = run / "model"
    before = contents(model)
    chosen = choose_parent(run / "scores", "fantasy", TRAINING, blocks=5, decay=0.3)
    unchanged = own_dev_losses(run / "scores", TRAINING, SHORT.forgetting_blocks)
    at = Places(tmp_path / "added", tmp_path / "metrics.jsonl", tmp_path / "checkpoints")
    adapt(model, novel_shards(tokens), SHORT, at, chosen=chosen, unchanged=unchanged)
    assert contents(model) == before
    lineage = read_json(tmp_path / "added" / "experts" / "fantasy.json")
    assert {name: parent["weight"] for name, parent in lineage["parents"].items()} == chosen["priors"]
    assert (lineage["parent"], "parent_sha256" in lineage, "parent_prior" in lineage) == (None, False, False)
    likeliest = max(chosen["priors"], key=chosen["priors"].__getitem__)
    assert read_parents(tmp_path / "added" / "experts", ["fantasy"]) == {"fantasy": Parent(likeliest, averaged=True)}

    # Its first loss on dev is that of a merged model with the same weights, and training lowers it.
    succeeds("merge", model, "--weights", listed(chosen["priors"]), "--output", tmp_path / "merged")
    cut = blocks(TokenShard.open(novel_shards(tokens)[1]), 32, SHORT.dev_blocks * 32)
    (start,) = log_probabilities(load_model(tmp_path / "merged"), *cut)
    losses = [row["dev_loss/fantasy"] for row in rows(tmp_path) if "dev_loss/fantasy" in row]
    assert losses[0] == pytest.approx(-float(start.mean()), rel=1e-6)
    assert min(losses) < losses[0]
    # Every tensor of a whole model is trained.
    added = load_file(tmp_path / "added" / "experts" / "fantasy.safetensors")
    for key, value in by_numpy(model, chosen["priors"]).items():
        assert not np.array_equal(added[key], value.astype(added[key].dtype)), key
