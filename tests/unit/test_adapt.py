"""Adaptation changes one file of a model of experts, or writes a dense model of its own."""

import dataclasses
import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from demix.config.adaptation import FactorSweep
from demix.config.training import stated
from demix.data.shards import TokenShard, blocks
from demix.errors import DemixError
from demix.evaluate.parent import choose_parent, own_dev_losses
from demix.evaluate.score import Scoring, score
from demix.files import read_json, read_json_lines, sha256_file, write_json
from demix.launch.job import Places
from demix.model.checkpoint import expert_names, load_model
from demix.model.experts import changing
from demix.model.scoring import log_probabilities
from demix.train.adapt import adapt_dense, adapt_expert
from support.cli import demix
from support.contents import contents
from support.tokens import NOVEL, TRAINING
from support.training import ADAPT, TRAIN, shard_paths, train_here, train_model, train_until_killed


@pytest.fixture(scope="module")
def trained(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DEMix and a dense model, and the DEMix model's score tables."""
    run = tmp_path_factory.mktemp("trained")
    scoring = Scoring(dev_blocks=10, test_tokens=500, precision="fp32", threads=1)
    longer = dataclasses.replace(TRAIN, tokens=10 * TRAIN.tokens)
    for kind in ("demix", "dense"):
        train_model(kind, longer, shard_paths(tokens), run / kind, run / f"{kind}.jsonl", run / "checkpoints" / kind)
    score(run / "demix", TRAINING, shard_paths(tokens, TRAINING + NOVEL, "dev"), scoring, run / "scores")
    return run


@pytest.mark.parametrize("kind", ["demix", "dense"])
def test_a_trained_model_is_used_alone(kind: str, tokens: Path, trained: Path, tmp_path: Path) -> None:
    """What training writes, copied anywhere, and what is made of the copy."""
    copy, text = shutil.copytree(trained / kind, tmp_path / "copy"), tokens / "corpus" / "fantasy" / "dev.parquet"
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
    error = demix("eval", tmp_path / "hf", text).exception
    assert f"demix import {tmp_path / 'hf'} --output" in str(error)
    tokenizer = read_json(copy / "tokenizer.json")
    write_json(copy / "tokenizer.json", tokenizer | {"version": "2.0"}, sort_keys=False)
    for words in (("experts", "verify", copy), ("eval", copy, text), ("generate", copy, "--prompt", "a")):
        done = demix(*words)
        assert "is of another tokenizer" in f"{done.output}{done.exception}", words


def test_experts_learn_their_domains(tokens: Path, trained: Path) -> None:
    model = load_model(trained / "demix", TRAINING)
    for number, path in enumerate(shard_paths(tokens, split="test")):
        shard = TokenShard.open(path)
        table = log_probabilities(model, *blocks(shard, 32)).sum(1)
        assert table.argmax() == number, path


def test_demix_dapt_adds_a_file_and_changes_no_other(
    tokens: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(trained / "demix")
    scores = trained / "scores"
    chosen = choose_parent(scores, "fantasy", TRAINING, blocks=ADAPT.parent_blocks, decay=ADAPT.parent_decay)
    given = (
        trained / "demix",
        tuple(tokens / "tokens" / "fantasy" / f"{split}.arrow" for split in ("train", "dev")),
        chosen,
        own_dev_losses(scores, TRAINING, ADAPT.forgetting_blocks),
        ADAPT,
        Places(trained / "demix", trained / "adapted.jsonl", trained / "checkpoints" / "adapted"),
    )
    monkeypatch.setattr("demix.model.experts.LOCK_SECONDS", 0.0)
    with changing(trained / "demix"), pytest.raises(DemixError, match="changes the experts of this model"):
        adapt_expert(*given)
    assert expert_names(trained / "demix") == tuple(sorted(TRAINING))
    adapt_expert(*given)
    after = contents(trained / "demix")
    new = {f"experts/fantasy.{kind}" for kind in ("safetensors", "json")}
    assert set(after) - set(before) == new
    assert {path: after[path] for path in before} == before
    assert expert_names(trained / "demix") == ("fantasy", *sorted(TRAINING))

    lineage = read_json(trained / "demix" / "experts" / "fantasy.json")
    assert lineage["parent"] == chosen["parent"] == max(chosen["priors"], key=chosen["priors"].__getitem__)
    assert sum(chosen["priors"].values()) == pytest.approx(1.0)
    assert lineage["lowest_dev_loss_expert"] == min(chosen["dev_losses"], key=chosen["dev_losses"].__getitem__)
    assert lineage["parent_sha256"] == before[f"experts/{chosen['parent']}.safetensors"]

    # The eight experts' scores are what they were, and the new expert knows its domain better than its parent.
    shard = TokenShard.open(tokens / "tokens" / "fantasy" / "dev.arrow")
    cut = blocks(shard, 32, 6 * 32)
    table = log_probabilities(load_model(trained / "demix", (*TRAINING, "fantasy")), *cut)
    old = log_probabilities(load_model(trained / "demix", TRAINING), *cut)
    np.testing.assert_array_equal(table[:3], old)
    parent = TRAINING.index(chosen["parent"])
    assert -table[3].mean() < -table[parent].mean()
    evaluations = read_json_lines(trained / "adapted.jsonl")
    evaluations = [row for row in evaluations if "dev_loss/fantasy" in row]
    assert evaluations[0]["dev_loss/fantasy"] == pytest.approx(-table[parent].mean(), rel=1e-5)
    assert min(row["dev_loss/fantasy"] for row in evaluations) == pytest.approx(-table[3].mean(), rel=1e-5)
    assert len({row["dev_loss/scripture"] for row in evaluations}) == 1


def test_dense_dapt_writes_its_own_model(tokens: Path, trained: Path) -> None:
    before = contents(trained / "dense")
    adapt_dense(
        trained / "dense",
        tuple(tokens / "tokens" / "fantasy" / f"{split}.arrow" for split in ("train", "dev")),
        shard_paths(tokens, split="dev"),
        ADAPT,
        Places(
            trained / "dense-dapt-fantasy", trained / "dense-adapted.jsonl", trained / "checkpoints" / "dense-adapted"
        ),
    )
    assert contents(trained / "dense") == before
    old, new = load_model(trained / "dense"), load_model(trained / "dense-dapt-fantasy")
    assert not torch.equal(old.token_embedding, new.token_embedding)
    assert (trained / "dense-dapt-fantasy" / "tokenizer.json").read_bytes() == (tokens / "tokenizer.json").read_bytes()
    rows = read_json_lines(trained / "dense-adapted.jsonl")
    rows = [row for row in rows if "dev_loss/fantasy" in row]
    assert min(row["dev_loss/fantasy"] for row in rows) < rows[0]["dev_loss/fantasy"]
    assert len({row["dev_loss/scripture"] for row in rows}) > 1


def test_passes_bound_the_tokens_by_the_text(tokens: Path, trained: Path, tmp_path: Path) -> None:
    (train,), (dev,) = (shard_paths(tokens, NOVEL, split) for split in ("train", "dev"))
    text = len(TokenShard.open(train))
    how = dataclasses.replace(ADAPT, tokens=10**9, passes=1, patience=10**6, evaluate_every=10**6)
    places = Places(tmp_path / "m", tmp_path / "metrics", tmp_path / "states")
    adapt_dense(trained / "dense", (train, dev), [], how, places)
    lineage = read_json(tmp_path / "m" / "model.json")
    assert (lineage["adaptation"]["tokens"], lineage["adaptation"]["passes"]) == (text, 1)
    assert lineage["steps_run"] == text // (ADAPT.sequences * TRAIN.architecture["context"])
    # Settings without the key are those that earlier runs were made with.
    assert "passes" not in stated(ADAPT)


def test_a_sweep_keeps_the_factor_of_the_lowest_dev_loss(tokens: Path, trained: Path, tmp_path: Path) -> None:
    """It is to the bit the adaptation with that factor alone, and tells the others; one that diverges is left out."""
    shards = tuple(tokens / "tokens" / "fantasy" / f"{split}.arrow" for split in ("train", "dev"))

    def adapted(name: str, **changes: Any) -> Path:
        how = dataclasses.replace(ADAPT, **changes)
        places = Places(tmp_path / name, tmp_path / f"{name}.jsonl", tmp_path / "checkpoints" / name)
        adapt_dense(trained / "dense", shards, shard_paths(tokens, split="dev"), how, places)
        return tmp_path / name

    swept = adapted("swept", sweep=FactorSweep(factors=(0.01, 0.5, 1e12)))
    alone = {factor: adapted(f"alone{factor}", learning_rate_factor=factor) for factor in (0.01, 0.5)}
    lineage = read_json(swept / "model.json")
    assert [trial["learning_rate_factor"] for trial in lineage["trials"]] == [0.01, 0.5, 1e12]
    assert "not finite" in lineage["trials"][2]["diverged"]
    losses = [trial["best"]["dev_loss/fantasy"] for trial in lineage["trials"][:2]]
    assert losses[1] < losses[0] < lineage["trials"][0]["start"]["dev_loss/fantasy"]
    assert lineage["adaptation"]["learning_rate_factor"] == 0.5
    kept, expected = (load_model(folder).state_dict() for folder in (swept, alone[0.5]))
    assert all(torch.equal(kept[name], tensor) for name, tensor in expected.items())
    told = [read_json_lines(tmp_path / f"{name}.jsonl") for name in ("swept", "alone0.5")]
    assert [row.get("dev_loss/fantasy") for row in told[0]] == [row.get("dev_loss/fantasy") for row in told[1]]
    with pytest.raises(DemixError, match="diverged at every learning-rate factor"):
        adapted("none", sweep=FactorSweep(factors=(1e12,)))


def test_scoring_refuses_another_tokenizer(tokens: Path, trained: Path, tmp_path: Path) -> None:
    description = read_json(trained / "dense" / "model.json")
    other = shutil.copytree(trained / "dense", tmp_path / "dense")
    write_json(other / "model.json", description | {"tokenizer_sha256": "0" * 64})
    with pytest.raises(DemixError, match="another tokenizer"):
        score(
            other,
            ("dense",),
            shard_paths(tokens, NOVEL, "dev"),
            Scoring(dev_blocks=2, test_tokens=None, precision="fp32", threads=1),
            tmp_path / "scores",
        )
    assert not (tmp_path / "scores").exists()


def test_adaptation_on_several_ranks_is_that_of_one(tokens: Path, trained: Path, tmp_path: Path) -> None:
    shards = [tokens / "tokens" / "fantasy" / f"{split}.arrow" for split in ("train", "dev")]
    command = [
        sys.executable, "-m", "demix", "adapt-dense", str(trained / "dense"), *map(str, shards),
        *map(str, shard_paths(tokens, split="dev")),
        "--settings", json.dumps(dataclasses.asdict(dataclasses.replace(ADAPT, precision="fp64"))),
    ]  # fmt: skip
    found = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        more = ["--output", folder / "model", "--metrics", folder / "m.jsonl", "--checkpoints", folder / "checkpoints"]
        train_here([*command, *map(str, more), "--ranks", str(number)])
        rows = read_json_lines(folder / "m.jsonl")
        found.append([value for row in rows for key, value in row.items() if "loss" in key or key == "step"])
    assert len(found[0]) > 40
    for several in found[1:]:
        assert several == pytest.approx(found[0], rel=1e-9)


def test_a_killed_adaptation_resumes_to_the_bit(
    tokens: Path, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    command = [
        sys.executable, "-m", "demix", "adapt-dense", str(trained / "dense"),
        *map(str, [tokens / "tokens" / "fantasy" / f"{split}.arrow" for split in ("train", "dev")]),
        *map(str, shard_paths(tokens, split="dev")), "--settings", json.dumps(dataclasses.asdict(ADAPT)),
    ]  # fmt: skip

    def into(folder: Path) -> list[str]:
        places = {"output": "model", "metrics": "metrics.jsonl", "checkpoints": "checkpoints"}
        return command + [word for key, name in places.items() for word in (f"--{key}", str(folder / name))]

    train_here(into(tmp_path / "whole"))
    train_until_killed(into(tmp_path / "killed"), tmp_path / "killed")
    assert "resuming at step" not in caplog.text
    train_here(into(tmp_path / "killed"))
    assert "resuming at step" in caplog.text

    def rows(folder: Path) -> list[dict]:
        found = read_json_lines(folder / "metrics.jsonl")
        return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in found]

    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    for file in ("shared.safetensors", "experts/dense.safetensors"):
        assert sha256_file(tmp_path / "killed" / "model" / file) == sha256_file(tmp_path / "whole" / "model" / file)
