"""Experts listed, verified, added, removed, averaged: the model directory from the command line."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from demix.data.shards import TokenShard
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.evaluate.score_tables import read_scores
from demix.files import read_json, sha256_file, write_json, write_parquet
from demix.model.checkpoint import expert_names, load_model, save_expert
from demix.model.experts import add_expert, find_faults, remove_expert
from demix.model.gpt import GPT
from demix.model.merge import merge_experts, parse_weights, prior_weights
from support.cli import demix
from support.contents import contents
from support.models import REAL_TEXT, SMALL, THREE, randomise, write_model, write_trunks
from support.tokens import TRAINING


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of three experts."""
    write_model(tmp_path / "model")
    return tmp_path / "model"


def test_the_umask_says_who_may_read_weights(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_model(tmp_path / "model")
    finally:
        os.umask(before)
    modes = {str(path): oct(path.stat().st_mode & 0o777) for path in tmp_path.rglob("*.safetensors")}
    assert len(modes) == 1 + len(THREE)
    assert {*modes.values()} == {"0o640"}, modes


def test_the_list_shows_lineage_and_what_is_wrong(model: Path) -> None:
    save_expert(
        load_model(model, ("law",)), "law", model, {"parent": "law", "tokenizer_sha256": "t" * 64}, name="deeds"
    )
    weights = model / "experts" / "news.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    shown = demix("experts", "list", model)
    assert shown.exit_code == 0
    rows = {
        line.split("│")[1].strip(): [c.strip() for c in line.split("│")[2:-1]]
        for line in shown.output.splitlines()
        if "│" in line
    }
    parameters = sum(tensor[0].numel() for tensor in load_model(model, ("law",)).expert_tensors().values())
    size = sum((model / "experts" / f"code.{kind}").stat().st_size for kind in ("json", "safetensors"))
    assert rows["code"] == ["–", "9", "32", f"{parameters:,}", "2" * 12, f"{size:,}", "yes"]
    assert rows["deeds"][:2] == ["law", "?"]
    assert rows["deeds"][-1] == "yes"
    assert rows["news"][-1] == "differs from its recorded sha256"
    assert isinstance(demix("experts", "list", model / "nothing").exception, DemixError)


def change_json(path: Path, **more: object) -> None:
    write_json(path, read_json(path) | more)


def reshape(model: Path) -> None:
    path = model / "experts" / "law.safetensors"
    save_file({name: tensor[..., :-1].clone() for name, tensor in load_file(path).items()}, path)
    change_json(path.with_suffix(".json"), sha256=sha256_file(path))


FAULTS: list[tuple[Callable[[Path], object], str, str]] = [
    (lambda m: (m / "model.json").unlink(), "model.json", "is missing"),
    (lambda m: change_json(m / "model.json", architecture={"layers": 2}), "model.json", "does not describe a model"),
    (lambda m: (m / "shared.safetensors").unlink(), "shared.safetensors", "is missing"),
    (lambda m: (m / "shared.safetensors").write_bytes(b"x"), "shared.safetensors", "differs from its recorded"),
    (lambda m: (m / "experts" / "law.safetensors").write_bytes(b"x"), "law.safetensors", "differs from its recorded"),
    (lambda m: (m / "experts" / "law.safetensors").unlink(), "law.safetensors", "is missing"),
    (lambda m: (m / "experts" / "law.json").unlink(), "law.safetensors", "has no description"),
    (lambda m: (m / "experts" / "law.json").write_text("{"), "law.json", "is damaged (Expecting property name"),
    (lambda m: change_json(m / "experts" / "law.json", shared_sha256="0"), "law.json", "other shared weights"),
    (lambda m: change_json(m / "experts" / "law.json", tokenizer_sha256="0"), "law.json", "of another tokenizer"),
    (lambda m: change_json(m / "experts" / "law.json", name="deeds"), "law.json", "describes the expert deeds"),
    (reshape, "law.safetensors", "of which the architecture makes"),
    (lambda m: (m / "experts" / ".code.json.7.partial").write_text("{"), ".code.json.7.partial", "never finished"),
    (lambda m: (m / "experts" / "notes.txt").write_text("x"), "notes.txt", "is no part of a model"),
    (lambda m: (m / "optimizer.bin").write_text("x"), "optimizer.bin", "is no part of a model"),
]


@pytest.mark.parametrize(("damage", "file", "cause"), FAULTS, ids=[f"{file}-{cause}" for _, file, cause in FAULTS])
def test_every_fault_is_found_and_named_alone(model: Path, damage: Callable, file: str, cause: str) -> None:
    assert demix("experts", "verify", model).exit_code == 0
    damage(model)
    done = demix("experts", "verify", model)
    assert done.exit_code == 1
    (line,) = done.output.splitlines()
    assert f"{file}: " in line
    assert cause in line


def test_all_faults_are_told_at_once(model: Path) -> None:
    for expert in THREE:
        (model / "experts" / f"{expert}.json").unlink()
    faults = [f"{fault.subject} {fault.cause}" for fault in find_faults(model)]
    assert len(faults) == 4
    assert "holds no expert" in faults[0]
    assert all("has no description" in fault for fault in faults[1:])


def test_an_expert_of_another_tokenizer_is_not_loaded(model: Path) -> None:
    change_json(model / "experts" / "news.json", tokenizer_sha256="u" * 64)
    with pytest.raises(
        DemixError, match=r"news\.json: is of another tokenizer \(uuuuuuuuuuuu\).*model \(tttttttttttt\)"
    ):
        load_model(model, ("law", "news"))
    assert load_model(model, ("law", "code")).experts == ("law", "code")


def test_an_added_expert_is_the_same_expert(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    trained = load_model(other, ("news",))
    randomise(trained.blocks[0].feedforward, 5)
    save_expert(trained, "news", other, {"parent": "news", "steps": 4, "tokenizer_sha256": "t" * 64}, name="press")
    before = contents(model)
    assert demix("experts", "add", model, other / "experts" / "press.safetensors").exit_code == 0
    assert demix("experts", "add", model, other / "experts" / "press.safetensors", "--name", "press_2").exit_code == 0
    assert expert_names(model) == ("code", "law", "news", "press", "press_2")
    assert before.items() <= contents(model).items()
    assert find_faults(model) == []
    both = load_model(model, ("press", "press_2"))
    for name, tensor in trained.expert_tensors().items():
        assert torch.equal(both.expert_tensors()[name][0], tensor[0])
        assert torch.equal(both.expert_tensors()[name][1], tensor[0])
    assert read_json(model / "experts" / "press_2.json") == read_json(other / "experts" / "press.json") | {
        "name": "press_2"
    }


def test_an_expert_that_does_not_fit_is_refused(model: Path, tmp_path: Path) -> None:
    seeds = tmp_path / "seeds"
    write_model(seeds, seed=1)
    words = tmp_path / "words"
    write_model(words, tokenizer="u" * 64)
    heads = tmp_path / "heads"
    shutil.copytree(model, heads)
    change_json(heads / "model.json", architecture=read_json(heads / "model.json")["architecture"] | {"heads": 2})
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    damaged = broken / "experts" / "law.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    good = tmp_path / "good"
    shutil.copytree(model, good)
    before = contents(model)
    for source, name, message in (
        (seeds, "deeds", "belongs to a model of other shared weights"),
        (words, "deeds", "belongs to a model of other tokenizer"),
        (heads, "deeds", "belongs to a model of other architecture"),
        (broken, "deeds", r"broken.*law\.safetensors: differs from its recorded sha256"),
        (good, None, "is an expert of .* already"),
        (good, "tokens", "is reserved"),
        (good, "dense", "is reserved"),
        (good, "New-Law", "is no usable name"),
        (good, "law\n", "is no usable name"),
    ):
        with pytest.raises(DemixError, match=message):
            add_expert(model, source / "experts" / "law.safetensors", name)
    for missing in (good / "experts" / "deeds.safetensors", good / "model.json"):
        with pytest.raises(DemixError, match=r"is missing|is no expert"):
            add_expert(model, missing, "deeds")
    (good / "experts" / "law.safetensors").unlink()
    with pytest.raises(DemixError, match="is missing"):
        add_expert(model, good / "experts" / "law.safetensors", "deeds")
    assert contents(model) == before


def test_an_expert_that_is_a_whole_model_fits_another_run_of_the_same_shape(tmp_path: Path) -> None:
    made = {
        "ours": {},
        "other": {"seed": 1},
        "words": {"tokenizer": "u" * 64},
        "types": {"vocab_size": 51},
        "heads": {},
    }
    for name, more in made.items():
        write_model(tmp_path / "stacked" / name, **more)
        write_trunks(tmp_path / "stacked" / name, tmp_path / name)
    heads = tmp_path / "heads" / "model.json"
    change_json(heads, architecture=read_json(heads)["architecture"] | {"heads": 2})
    ours = tmp_path / "ours"
    before = contents(ours)
    # What they share is one file of no tensor, which tells no two of them apart.
    assert len({sha256_file(tmp_path / name / "shared.safetensors") for name in made}) == 1
    for name, part in {"words": "tokenizer", "types": "vocabulary", "heads": "architecture"}.items():
        with pytest.raises(DemixError, match=f"belongs to a model of other {part} than"):
            add_expert(ours, tmp_path / name / "experts" / "law.safetensors", "deeds")
    with pytest.raises(DemixError, match="other shared weights"):
        add_expert(tmp_path / "stacked" / "ours", ours / "experts" / "law.safetensors", "deeds")
    assert contents(ours) == before
    add_expert(ours, tmp_path / "other" / "experts" / "law.safetensors", "deeds")
    remove_expert(ours, "news")
    assert expert_names(ours) == ("code", "deeds", "law")
    after = contents(ours)
    assert all(after[path] == content for path, content in before.items() if "news" not in str(path))
    assert find_faults(ours) == []


def test_removing_leaves_a_whole_model_at_any_moment(model: Path) -> None:
    kept = load_model(model, ("code", "news"))
    assert demix("experts", "remove", model, "law").exit_code == 0
    assert expert_names(model) == ("code", "news")
    assert find_faults(model) == []
    for name, tensor in load_model(model).state_dict().items():
        assert torch.equal(tensor, kept.state_dict()[name])
    with pytest.raises(DemixError, match=r"is missing, .*; known are code, news"):
        remove_expert(model, "law")
    # Cut short after the first file: no expert any more, and removing again finishes it.
    weights = model / "experts" / "news.safetensors"
    weights.rename(model / "aside")
    weights.mkdir()
    with pytest.raises(OSError, match=r"news\.safetensors"):
        remove_expert(model, "news")
    weights.rmdir()
    (model / "aside").rename(weights)
    assert load_model(model).experts == ("code",)
    assert [fault.cause for fault in find_faults(model)] == ["has no description beside it"]
    remove_expert(model, "news")
    assert not weights.exists()
    assert find_faults(model) == []
    with pytest.raises(DemixError, match="is the last expert"):
        remove_expert(model, "code")
    assert expert_names(model) == ("code",)


def merged_tensors(model: Path, weights: dict[str, float], output: Path) -> dict[str, torch.Tensor]:
    merge_experts(model, weights, output)
    assert find_faults(output) == []
    return load_file(output / "experts" / "dense.safetensors")


def test_a_merged_model_is_the_average_written_by_hand(model: Path, tmp_path: Path) -> None:
    # 64-bit experts, so that the average is seen before it is rounded.
    stacked = GPT(SMALL, 50, THREE).double()
    randomise(stacked)
    for expert in THREE:
        save_expert(stacked, expert, model, read_json(model / "experts" / f"{expert}.json"))
    weights = {"code": 0.2, "law": 0.5, "news": 0.3}
    found = merged_tensors(model, weights, tmp_path / "merged")
    for name, tensor in stacked.expert_tensors().items():
        expected = sum(weights[expert] * tensor[number] for number, expert in enumerate(THREE)).detach()
        assert found[name].dtype == torch.float64
        torch.testing.assert_close(found[name], expected, rtol=1e-14, atol=1e-15)
    # Linear: an average of averages is the average of the products.
    half = {expert: (weight + (expert == "law")) / 2 for expert, weight in weights.items()}
    law = load_file(model / "experts" / "law.safetensors")
    for name, tensor in merged_tensors(model, half, tmp_path / "half").items():
        torch.testing.assert_close(tensor, (found[name] + law[name]) / 2, rtol=1e-13, atol=1e-15)


def test_one_expert_alone_is_merged_to_the_bit(model: Path, tmp_path: Path) -> None:
    path = model / "experts" / "law.safetensors"
    tensors = load_file(path)
    tensors["blocks.0.feedforward.up_bias"][:2] = torch.tensor([-0.0, 1e-45])
    save_file(tensors, path)
    change_json(path.with_suffix(".json"), sha256=sha256_file(path))
    assert demix("merge", model, "--weights", "law=1,news=0", "--output", tmp_path / "merged").exit_code == 0
    found = load_file(tmp_path / "merged" / "experts" / "dense.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name].view(torch.int32), tensor.view(torch.int32))
    assert sha256_file(tmp_path / "merged" / "shared.safetensors") == sha256_file(model / "shared.safetensors")
    lineage = read_json(tmp_path / "merged" / "experts" / "dense.json")
    assert lineage["parents"] == {"law": {"weight": 1.0, "sha256": sha256_file(path)}}
    assert (lineage["tokens"], lineage["data_sha256"]) == (30, {"law": "0" * 64})
    # The trunk is the same, so that the average may stand among its parents.
    assert add_expert(model, tmp_path / "merged" / "experts" / "dense.safetensors", "law_again") == "law_again"
    assert find_faults(model) == []


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("law=0.5,news=0.4", r"sum to 0\.9; give weights that sum to 1"),
        ("law=1.5,news=-0.5", r"weight of news: is -0\.5"),
        ("law=nan,news=1", "weight of law: is nan"),
        ("law=0", "weights: sum to 0; give"),
        ("law=1e308,news=1e308", "weights: sum to inf; give"),
        ("law=0.5,law=0.5", "'law=0.5' is no weight"),
        ("law", "'law' is no weight"),
        ("law=half", "'law=half' is no weight"),
        ("law=0.5,deeds=0.5", r"deeds\.json: is missing, .*; known are code, law, news"),
    ],
)
def test_wrong_weights_are_refused(model: Path, tmp_path: Path, weights: str, message: str) -> None:
    with pytest.raises(DemixError, match=message):
        merge_experts(model, parse_weights(weights), tmp_path / "merged")
    # The command writes a card first.
    error = demix("merge", model, "--weights", weights, "--output", tmp_path / "merged").exception
    assert isinstance(error, DemixError)
    assert re.search(message, str(error))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(DemixError, match="exists and is not empty"):
        merge_experts(model, {"law": 1.0}, model)


def test_weights_come_from_the_cached_prior(model: Path, tmp_path: Path) -> None:
    sets = {
        ("demix", "training", "history"): (0.7, 0.2, 0.1),
        ("demix", "training", "released"): (1.0, 0.0, 0.0),
        ("demix", "minus-law", "history"): (0.0, 0.5, 0.5),
        ("domain_token", "training", "history"): (0.0, 0.0, 1.0),
    }
    rows = [
        {"model": name, "experts": label, "weights": rule, "domain": domain, "kind": "novel", "expert": expert,
         "prior": prior}
        for (name, label, rule), priors in sets.items()
        for domain in ("songs", "wiki")
        for expert, prior in zip(THREE, priors if domain == "songs" else priors[::-1], strict=True)
    ]  # fmt: skip
    priors = tmp_path / "songs.priors.parquet"
    write_parquet(pa.Table.from_pylist(rows), priors)
    assert prior_weights(priors, "demix", "songs", "training") == dict(zip(THREE, (0.7, 0.2, 0.1), strict=True))
    assert prior_weights(priors, "demix", "wiki", "minus-law") == dict(zip(THREE, (0.5, 0.5, 0.0), strict=True))
    known = r"no prior of model/training on songs \(history\); did you mean demix/training on songs"
    with pytest.raises(DemixError, match=known):
        prior_weights(priors, "model", "songs", "training")
    named = model.rename(tmp_path / "demix")
    done = demix("merge", named, "--priors", priors, "--domain", "wiki", "--output", tmp_path / "merged")
    assert done.exit_code == 0, done.output
    parents = read_json(tmp_path / "merged" / "experts" / "dense.json")["parents"]
    assert {name: parent["weight"] for name, parent in parents.items()} == dict(
        zip(THREE, (0.1, 0.2, 0.7), strict=True)
    )
    for arguments in (("--priors", priors), (), ("--weights", "law=1", "--priors", priors, "--domain", "wiki")):
        assert isinstance(demix("merge", named, "--output", tmp_path / "x", *arguments).exception, DemixError)


def test_a_merged_model_is_scored_and_exported(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import GPT2LMHeadModel, GPT2TokenizerFast

    tokenizer = Tokenizer.load(tokens / "tokenizer.json")
    write_model(tmp_path / "model", THREE, tokenizer.sha256, tokenizer.vocab_size)
    merged = tmp_path / "merged"
    merge_experts(tmp_path / "model", {"law": 0.25, "news": 0.5, "code": 0.25}, merged)
    path = tokens / "tokens" / TRAINING[0] / "test.arrow"
    settings = json.dumps({"dev_blocks": 1, "test_tokens": 5 * SMALL.context, "precision": "fp32", "threads": 1})
    done = demix("score", merged, path, "--experts", "dense", "--settings", settings, "--output", tmp_path / "scores")
    assert done.exit_code == 0, done.output
    table = read_scores(tmp_path / "scores" / f"{TRAINING[0]}.test", ("dense",))
    shard = TokenShard.open(path)
    model = load_model(merged)
    first = torch.tensor([shard.end_of_text, *shard.read(0, SMALL.context).tolist()])[None, None]
    reference = model.log_probabilities(model(first[..., :-1]), first[..., 1:])[0, 0].detach()
    torch.testing.assert_close(torch.from_numpy(table.scores[0, :, 0]).float(), reference, rtol=1e-5, atol=1e-5)

    output = tmp_path / "hf"
    export = ("export", merged, "--format", "hf", "--expert", "dense", "--output")
    done = demix(*export, output, "--tokenizer", tokens / "tokenizer.json")
    assert done.exit_code == 0, done.output
    theirs = GPT2LMHeadModel.from_pretrained(output)
    with torch.no_grad():
        logits = F.log_softmax(theirs(first[0, :, :-1]).logits[0], -1)
    torch.testing.assert_close(logits.gather(-1, first[0, 0, 1:, None])[:, 0], reference, rtol=1e-4, atol=1e-4)
    assert GPT2TokenizerFast.from_pretrained(output)(REAL_TEXT)["input_ids"] == list(tokenizer.encode(REAL_TEXT))

    other = tmp_path / "other.json"
    write_json(other, read_json(tokens / "tokenizer.json") | {"version": "2.0"}, sort_keys=False)
    with pytest.raises(DemixError, match=r"other\.json: is of another tokenizer.*than the model .*merged"):
        raise demix(*export, tmp_path / "refused", "--tokenizer", other).exception
    assert not (tmp_path / "refused").exists()
