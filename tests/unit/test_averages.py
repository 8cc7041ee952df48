"""Averages of experts that are whole models: merged into one, and as the beginning of an added expert."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from demix.data.shards import TokenShard, blocks
from demix.evaluate.parent import choose_parent, own_dev_losses
from demix.evaluate.score import Scoring, score
from demix.files import read_json
from demix.launch.job import Places
from demix.model.checkpoint import load_experts, load_model
from demix.model.experts import add_expert
from demix.model.merge import averaged
from demix.model.scoring import log_probabilities
from demix.report.read import Parent, read_parents
from demix.train.adapt import adapt_expert
from demix.train.join import join_branches
from support.cli import demix
from support.contents import contents
from support.errors import refused
from support.tokens import TRAINING
from support.training import ADAPT, novel_shards, places, rows, shard_paths, train_into

SHORT = dataclasses.replace(ADAPT, tokens=32 * 4 * 10)


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
    assert demix("merge", run / "model", "--weights", listed(given), "--output", output).exit_code == 0
    found, wanted = load_file(output / "experts" / "dense.safetensors"), by_numpy(run / "model", given)
    assert found.keys() == wanted.keys() >= {"token_embedding", "blocks.0.attention.out.weight"}
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-7)
    assert demix("experts", "verify", output).exit_code == 0
    (model,) = load_experts(output)
    assert model.experts == ("dense",)


def test_neither_order_nor_names_change_a_bit_of_an_average(run: Path, tmp_path: Path, tokens: Path) -> None:
    weights = dict(zip(TRAINING, (0.45, 0.35, 0.2), strict=True))
    model = run / "model"
    forward, backward = (averaged(model, dict(order))[0] for order in (weights.items(), reversed(weights.items())))
    assert all(forward[key].numpy().tobytes() == backward[key].numpy().tobytes() for key in forward)
    renamed = {name: f"{'zyx'[number]}_{name}" for number, name in enumerate(TRAINING)}
    other = shutil.copytree(model, tmp_path / "renamed")
    for name, new in renamed.items():
        add_expert(other, model / "experts" / f"{name}.safetensors", new)
    again, _ = averaged(other, {renamed[name]: weight for name, weight in weights.items()})
    assert all(forward[key].numpy().tobytes() == again[key].numpy().tobytes() for key in forward)


def test_an_added_expert_begins_as_the_average_by_posterior(run: Path, tokens: Path, tmp_path: Path) -> None:
    model = run / "model"
    before = contents(model)
    chosen = choose_parent(run / "scores", "fantasy", TRAINING, blocks=5, decay=0.3)
    unchanged = own_dev_losses(run / "scores", TRAINING, SHORT.forgetting_blocks)
    at = Places(tmp_path / "added", tmp_path / "metrics.jsonl", tmp_path / "checkpoints")
    adapt_expert(model, novel_shards(tokens), chosen, unchanged, SHORT, at)
    assert contents(model) == before
    lineage = read_json(tmp_path / "added" / "experts" / "fantasy.json")
    assert {name: parent["weight"] for name, parent in lineage["parents"].items()} == chosen["priors"]
    assert (lineage["parent"], "parent_sha256" in lineage, "parent_prior" in lineage) == (None, False, False)
    likeliest = max(chosen["priors"], key=chosen["priors"].__getitem__)
    assert read_parents(tmp_path / "added" / "experts", ["fantasy"]) == {"fantasy": Parent(likeliest, averaged=True)}

    # Its first loss on dev is that of a merged model with the same weights, and training lowers it.
    assert demix("merge", model, "--weights", listed(chosen["priors"]), "--output", tmp_path / "merged").exit_code == 0
    cut = blocks(TokenShard.open(novel_shards(tokens)[1]), 32, SHORT.dev_blocks * 32)
    (start,) = log_probabilities(load_model(tmp_path / "merged"), *cut)
    losses = [row["dev_loss/fantasy"] for row in rows(tmp_path) if "dev_loss/fantasy" in row]
    assert losses[0] == pytest.approx(-float(start.mean()), rel=1e-6)
    assert min(losses) < losses[0]
    # Every tensor of a whole model is trained.
    added = load_file(tmp_path / "added" / "experts" / "fantasy.safetensors")
    for key, value in by_numpy(model, chosen["priors"]).items():
        assert not np.array_equal(added[key], value.astype(added[key].dtype)), key


def test_a_copy_of_the_parent_can_be_asked_for(run: Path, tokens: Path, tmp_path: Path) -> None:
    settings, at = json.dumps(dataclasses.asdict(SHORT)), places(tmp_path)
    words = [
        "adapt",
        run / "model",
        *novel_shards(tokens),
        "--training",
        ",".join(TRAINING),
        "--scores",
        run / "scores",
    ]
    words += ["--settings", settings, "--output", at.output, "--metrics", at.metrics, "--checkpoints", at.checkpoints]
    assert demix(*words, "--init", "parent").exit_code == 0
    lineage = read_json(at.output / "experts" / "fantasy.json")
    parent = read_json(run / "model" / "experts" / f"{lineage['parent']}.json")
    assert lineage["parent_sha256"] == parent["sha256"]
    assert "parents" not in lineage
    with refused("--init best"):
        raise demix(*words, "--init", "best").exception
