"""Adaptation changes one file of a model of experts, or writes a dense model of its own."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from demix.config.adaptation import FactorSweep
from demix.config.training import stated
from demix.data.shards import TokenShard, blocks
from demix.evaluate.parent import choose_parent, own_dev_losses
from demix.evaluate.score import Scoring, score
from demix.files import read_json, write_json
from demix.model.checkpoint import expert_names, load_model
from demix.model.experts import changing
from demix.model.scoring import log_probabilities
from demix.train.adapt import adapt_dense, adapt_expert
from support.cli import demix
from support.contents import contents
from support.errors import refused
from support.tokens import NOVEL, TRAINING
from support.training import ADAPT, TRAIN, novel_shards, places, rows, shard_paths, tensors, train_into


@pytest.fixture(scope="module")
def trained(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DEMix and a dense model, and the DEMix model's score tables."""
    run = tmp_path_factory.mktemp("trained")
    longer = dataclasses.replace(TRAIN, tokens=4 * TRAIN.tokens)
    for kind in ("demix", "dense"):
        train_into(run / kind, kind, shard_paths(tokens), longer)
    scoring = Scoring(dev_blocks=10, test_tokens=500, precision="fp32", threads=1)
    dev = shard_paths(tokens, TRAINING + NOVEL, "dev")
    score(run / "demix" / "model", TRAINING, dev, scoring, run / "scores")
    return run


@pytest.mark.parametrize("kind", ["demix", "dense"])
def test_a_trained_model_is_used_alone(kind: str, tokens: Path, trained: Path, tmp_path: Path) -> None:
    """What training writes, copied anywhere, and what is made of the copy."""
    copy, text = tmp_path / "copy", tokens / "corpus" / "fantasy" / "dev.parquet"
    shutil.copytree(trained / kind / "model", copy)
    assert (copy / "tokenizer.json").read_bytes() == (tokens / "tokenizer.json").read_bytes()
    expert = expert_names(copy)[0]
    for words in (
        ("experts", "verify", copy),
        ("merge", copy, "--weights", f"{expert}=1", "--output", tmp_path / "merged"),
        ("export", copy, "--expert", expert, "--output", tmp_path / "hf"),
        ("import", tmp_path / "hf", "--output", tmp_path / "imported"),
        *(("eval", tmp_path / made, text) for made in ("copy", "merged", "imported")),
        *(("generate", tmp_path / made, "--prompt", "a", "--tokens", 2) for made in ("copy", "merged", "imported")),
    ):
        done = demix(*words)
        assert done.exit_code == 0, (words, done.output, done.exception)
    assert demix("eval", tmp_path / "hf", text).exit_code != 0
    tokenizer = read_json(copy / "tokenizer.json")
    write_json(copy / "tokenizer.json", tokenizer | {"version": "2.0"}, sort_keys=False)
    for words in (("experts", "verify", copy), ("eval", copy, text), ("generate", copy, "--prompt", "a")):
        assert demix(*words).exit_code != 0, words


def test_experts_learn_their_domains(tokens: Path, trained: Path) -> None:
    model = load_model(trained / "demix" / "model", TRAINING)
    for number, path in enumerate(shard_paths(tokens, split="test")):
        table = log_probabilities(model, *blocks(TokenShard.open(path), 32)).sum(1)
        assert table.argmax() == number, path


def test_demix_dapt_adds_a_file_and_changes_no_other(
    tokens: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, scores = tmp_path / "model", trained / "scores"
    shutil.copytree(trained / "demix" / "model", model)
    before = contents(model)
    chosen = choose_parent(scores, "fantasy", TRAINING, blocks=ADAPT.parent_blocks, decay=ADAPT.parent_decay)
    unchanged = own_dev_losses(scores, TRAINING, ADAPT.forgetting_blocks)
    given = (model, novel_shards(tokens), chosen, unchanged, ADAPT, places(tmp_path))
    monkeypatch.setattr("demix.model.experts.LOCK_SECONDS", 0.0)
    with changing(model), refused(model):
        adapt_expert(*given)
    assert expert_names(model) == tuple(sorted(TRAINING))
    adapt_expert(*given)
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


def adapted(trained: Path, text: Path, folder: Path, **changes: Any) -> Path:
    """Dense-DAPT with other settings, into `folder`."""
    dev, how = shard_paths(text, split="dev"), dataclasses.replace(ADAPT, **changes)
    adapt_dense(trained / "dense" / "model", novel_shards(text), dev, how, places(folder))
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


def test_scoring_refuses_another_tokenizer(tokens: Path, trained: Path, tmp_path: Path) -> None:
    other = shutil.copytree(trained / "dense" / "model", tmp_path / "dense")
    write_json(other / "model.json", read_json(other / "model.json") | {"tokenizer_sha256": "0" * 64})
    scoring = Scoring(dev_blocks=2, test_tokens=None, precision="fp32", threads=1)
    with refused("dense/experts/dense.json"):
        score(other, ("dense",), shard_paths(tokens, NOVEL, "dev"), scoring, tmp_path / "scores")
    assert not (tmp_path / "scores").exists()
