"""Averages of experts that are whole models: merged into one, and as the beginning of an added expert."""

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from demix.data.shards import TokenShard, blocks
from demix.evaluate.parent import choose_parent, own_dev_losses
from demix.evaluate.score import Scoring, score
from demix.files import read_json, read_json_lines, write_json
from demix.launch.job import Places
from demix.model.checkpoint import load_experts, load_model
from demix.model.merge import averaged
from demix.model.scoring import log_probabilities
from demix.report.read import Parent, read_parents
from demix.train.adapt import adapt_expert
from demix.train.in_turn import train_in_turn
from demix.train.join import join_branches
from demix.train.stage import ModelTraining
from support.cli import demix, said
from support.contents import contents
from support.tokens import TRAINING
from support.training import ADAPT, TRAIN, shard_paths

SHORT = dataclasses.replace(ADAPT, tokens=32 * 4 * 10)


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three experts that are whole models, joined, and their score tables."""
    folder = tmp_path_factory.mktemp("run")
    places = Places(folder / "branches", folder / "metrics", folder / "checkpoints")
    train_in_turn(ModelTraining("branched", TRAIN, shard_paths(tokens)), TRAINING, places, lambda *about: nullcontext())
    join_branches([folder / "branches" / name for name in TRAINING], folder / "models" / "btm")
    dev = shard_paths(tokens, (*TRAINING, "fantasy"), "dev")
    score(folder / "models" / "btm", TRAINING, dev, Scoring(dev_blocks=10, threads=1), folder / "scores")
    return folder


def by_numpy(model: Path, weights: dict[str, float]) -> dict[str, np.ndarray]:
    tensors = {name: load_file(model / "experts" / f"{name}.safetensors") for name in weights}
    first = next(iter(tensors.values()))
    return {
        key: sum(weight * tensors[name][key].astype(np.float64) for name, weight in weights.items()) for key in first
    }


@pytest.mark.parametrize("weights", [(1 / 3, 1 / 3, 1 / 3), (0.7, 0.25, 0.05), (0.0, 1.0, 0.0)])
def test_a_merged_model_is_numpys_average_of_every_tensor(
    run: Path, tmp_path: Path, weights: tuple[float, ...]
) -> None:
    given = dict(zip(TRAINING, weights, strict=True))
    text = ",".join(f"{name}={weight!r}" for name, weight in given.items())
    words = ("merge", run / "models" / "btm", "--weights", text, "--output", tmp_path / "merged")
    assert demix(*words).exit_code == 0
    found, wanted = (
        load_file(tmp_path / "merged" / "experts" / "dense.safetensors"),
        by_numpy(run / "models" / "btm", given),
    )
    assert found.keys() == wanted.keys() >= {"token_embedding", "blocks.0.attention.out.weight"}
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-7)
    assert said(["experts", "verify", str(tmp_path / "merged")]) is None
    (model,) = load_experts(tmp_path / "merged")
    assert model.experts == ("dense",)


def test_neither_order_nor_names_change_a_bit_of_an_average(run: Path, tmp_path: Path, tokens: Path) -> None:
    weights = dict(zip(TRAINING, (0.45, 0.35, 0.2), strict=True))
    model = run / "models" / "btm"
    forward, backward = (averaged(model, dict(order))[0] for order in (weights.items(), reversed(weights.items())))
    assert all(forward[key].numpy().tobytes() == backward[key].numpy().tobytes() for key in forward)
    renamed = {name: f"{'zyx'[number]}_{name}" for number, name in enumerate(TRAINING)}
    other = tmp_path / "renamed"
    for path in model.rglob("*"):
        if path.is_file():
            target = other / path.relative_to(model)
            target = target.with_name(f"{renamed.get(path.stem, path.stem)}{path.suffix}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    for name, new in renamed.items():
        about = read_json(model / "experts" / f"{name}.json")
        write_json(other / "experts" / f"{new}.json", {**about, "name": new})
    again, _ = averaged(other, {renamed[name]: weight for name, weight in weights.items()})
    assert all(forward[key].numpy().tobytes() == again[key].numpy().tobytes() for key in forward)


def test_an_added_expert_begins_as_the_average_by_posterior(run: Path, tokens: Path, tmp_path: Path) -> None:
    model = run / "models" / "btm"
    before = contents(model)
    chosen = choose_parent(run / "scores", "fantasy", TRAINING, blocks=5, decay=0.3)
    shards = tuple(tokens / "tokens" / "fantasy" / f"{split}.arrow" for split in ("train", "dev"))
    unchanged = own_dev_losses(run / "scores", TRAINING, SHORT.forgetting_blocks)
    places = Places(tmp_path / "added", tmp_path / "metrics.jsonl", tmp_path / "checkpoints")
    adapt_expert(model, shards, chosen, unchanged, SHORT, places)
    assert contents(model) == before
    lineage = read_json(tmp_path / "added" / "experts" / "fantasy.json")
    assert {name: parent["weight"] for name, parent in lineage["parents"].items()} == chosen["priors"]
    assert (lineage["parent"], "parent_sha256" in lineage, "parent_prior" in lineage) == (None, False, False)
    likeliest = max(chosen["priors"], key=chosen["priors"].__getitem__)
    assert read_parents(tmp_path / "added" / "experts", ["fantasy"]) == {"fantasy": Parent(likeliest, averaged=True)}

    # Its first loss on dev is that of a merged model with the same weights, and training lowers it.
    assert said(
        ["merge", str(model), "--weights", ",".join(f"{n}={w!r}" for n, w in chosen["priors"].items()),
         "--output", str(tmp_path / "merged")]
    ) is None  # fmt: skip
    cut = blocks(TokenShard.open(shards[1]), 32, SHORT.dev_blocks * 32)
    (start,) = log_probabilities(load_model(tmp_path / "merged"), *cut)
    rows = [row for row in read_json_lines(tmp_path / "metrics.jsonl") if "dev_loss/fantasy" in row]
    assert rows[0]["dev_loss/fantasy"] == pytest.approx(-float(start.mean()), rel=1e-6)
    assert min(row["dev_loss/fantasy"] for row in rows) < rows[0]["dev_loss/fantasy"]
    # Every tensor of a whole model is trained.
    added = load_file(tmp_path / "added" / "experts" / "fantasy.safetensors")
    for key, value in by_numpy(model, chosen["priors"]).items():
        assert not np.array_equal(added[key], value.astype(added[key].dtype)), key


def test_a_copy_of_the_parent_can_be_asked_for(run: Path, tokens: Path, tmp_path: Path) -> None:
    shards = [str(tokens / "tokens" / "fantasy" / f"{split}.arrow") for split in ("train", "dev")]
    words = [
        "adapt", str(run / "models" / "btm"), *shards, "--training", ",".join(TRAINING), "--scores",
        str(run / "scores"), "--settings", json.dumps(dataclasses.asdict(SHORT)), "--output", str(tmp_path / "added"),
        "--metrics", str(tmp_path / "metrics.jsonl"), "--checkpoints", str(tmp_path / "checkpoints"), "--init",
    ]  # fmt: skip
    assert said([*words, "parent"]) is None
    lineage = read_json(tmp_path / "added" / "experts" / "fantasy.json")
    assert (
        lineage["parent_sha256"]
        == read_json(run / "models" / "btm" / "experts" / f"{lineage['parent']}.json")["sha256"]
    )
    assert "parents" not in lineage
    assert "--init best: is not known; use parent or average" in str(said([*words, "best"]))
