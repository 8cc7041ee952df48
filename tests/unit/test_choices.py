"""Experts among which tokens choose leave a merged model and join it, without anybody's text."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from demix.errors import DemixError
from demix.evaluate.memorization import Audit, audit_rows
from demix.evaluate.score import ScoredModel, Scoring, score_models
from demix.files import read_json, sha256_file, write_json, write_parquet
from demix.model import merge_routed as merging
from demix.model.checkpoint import describe, load_model
from demix.model.experts import add_expert, find_faults, remove_expert
from demix.model.merge_routed import merge_routed
from demix.run.models import left_out
from support.cli import demix
from support.tokens import TRAINING
from support.training import SIZES, TRAIN, shard_paths, train_model

ROUTED = {"experts": 3, "top_k": 2, "every": 1, "capacity": 2.0, "balance": 0.01}
FILES = ("model.json", "shared.safetensors", "experts/dense.json", "experts/dense.safetensors", "sums.safetensors")
# In the order of their names the experts stand elsewhere.
assert list(TRAINING) != sorted(TRAINING)


@pytest.fixture(scope="module")
def models(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DEMix model, the merged model of its experts, and the latter after training: all of it, and routers alone."""
    folder = tmp_path_factory.mktemp("models")
    train_model("demix", TRAIN, shard_paths(tokens), folder / "demix", None, folder / "checkpoints")
    shutil.copy(tokens / "tokenizer.json", folder / "demix")
    shards = {name: tokens / "tokens" / name / "dev.arrow" for name in TRAINING}
    merge_routed(folder / "demix", shards, folder / "merged")
    recipe = dataclasses.replace(TRAIN, architecture=SIZES | {"routed": ROUTED}, tokens=192 * 4)
    for name, trained in (("whole", None), ("routers", "routers")):
        settings = dataclasses.replace(recipe, trained=trained)
        places = folder / name, None, folder / "checkpoints" / name
        train_model("routed", settings, shard_paths(tokens), *places, branch=folder / "merged")
    return folder


def content(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in FILES if (directory / name).exists()}


def changed(directory: Path, **more: object) -> dict[str, object]:
    """The description of an expert of another merging, rewritten with the values `more`."""
    path = directory / "experts" / "dense.json"
    write_json(path, read_json(path) | more)
    return read_json(path)


@pytest.mark.parametrize("name", TRAINING)
def test_what_is_left_of_a_merged_model_is_what_is_merged_of_the_rest(
    models: Path, tokens: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged again from the texts, by the penalty and the factor that the model had."""
    left = shutil.copytree(models / "merged", tmp_path / "left")
    done = demix("experts", "remove", left, name)
    assert (done.exit_code, done.stdout) == (0, f"{left}: removed {name}\n"), done.exception
    router = read_json(models / "merged" / "experts" / "dense.json")["router"]
    monkeypatch.setattr(merging, "PENALTIES", (router["penalty"],))
    monkeypatch.setattr(merging, "FACTORS", (router["factor"],))
    rest = {one: tokens / "tokens" / one / "dev.arrow" for one in TRAINING if one != name}
    merge_routed(models / "demix", rest, tmp_path / "again")
    assert content(left) == content(tmp_path / "again")
    assert find_faults(left) == []
    assert describe(left)["architecture"]["routed"]["experts"] == len(TRAINING) - 1
    own, before = (load_file(place / "experts" / "dense.safetensors") for place in (left, models / "merged"))
    row = TRAINING.index(name)
    for key, tensor in before.items():
        assert np.array_equal(own[key], np.delete(tensor, row, 0)) == (not key.endswith("router")), key


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("model", ["merged", "whole", "routers"])
def test_an_expert_that_leaves_and_joins_again_leaves_no_trace(
    models: Path, model: str, name: str, tmp_path: Path
) -> None:
    mine, before = shutil.copytree(models / model, tmp_path / "mine"), content(models / model)
    remove_expert(mine, name)
    assert content(mine) != before
    done = demix("experts", "add", mine, models / model / "experts" / f"{name}.safetensors")
    assert (done.exit_code, done.stdout) == (0, f"{mine}: added {name}\n"), done.exception
    assert content(mine) == before


@pytest.mark.parametrize("model", ["whole", "routers"])
def test_a_trained_model_loses_the_rows_of_the_expert_alone(models: Path, model: str, tmp_path: Path) -> None:
    mine = shutil.copytree(models / model, tmp_path / "mine")
    assert not (mine / "sums.safetensors").exists(), "sums of states before training"
    remove_expert(mine, TRAINING[1])
    assert find_faults(mine) == []
    own, before = (load_file(place / "experts" / "dense.safetensors") for place in (mine, models / model))
    for key, tensor in before.items():
        assert np.array_equal(own[key], tensor[[0, 2]]), key
    assert (mine / "shared.safetensors").read_bytes() == (models / model / "shared.safetensors").read_bytes()
    routed = load_model(mine).architecture.routed
    assert dataclasses.asdict(routed) == ROUTED | {"experts": 2, "renormalise": True}
    lineage, was = (read_json(place / "experts" / "dense.json") for place in (mine, models / model))
    assert [choice["expert"] for choice in lineage["choices"]] == [TRAINING[0], TRAINING[2]]
    assert {key for key in was if lineage[key] != was[key]} == {"choices", "sha256"}


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("model", ["merged", "whole"])
def test_scores_without_an_expert_are_those_of_what_removal_leaves(
    models: Path, tokens: Path, model: str, name: str, tmp_path: Path
) -> None:
    for folder in ("mine", "left"):
        shutil.copytree(models / model, tmp_path / "models" / folder)
    remove_expert(tmp_path / "models" / "left", name)
    before = content(tmp_path / "models" / "mine")
    asked = {"experts": ("dense",), "domains": TRAINING[:1], "splits": ("test",)}
    several = tuple(
        ScoredModel(model=folder, without=gone, **asked)
        for folder, gone in (("mine", ""), ("mine", name), ("left", ""))
    )
    scoring = Scoring(models=several, dev_blocks=4, test_tokens=200, precision="fp32", threads=1)
    score_models(tmp_path / "models", [tokens / "tokens" / TRAINING[0] / "test.arrow"], scoring, tmp_path / "scores")
    whole, without, left = (
        pq.read_table(tmp_path / "scores" / folder / f"{TRAINING[0]}.test" / "dense.parquet").column(0).to_pylist()
        for folder in ("mine", f"mine@minus-{name}", "left")
    )
    assert without == left != whole
    assert content(tmp_path / "models" / "mine") == before


def test_the_audit_is_that_of_what_removal_leaves(
    models: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, label = TRAINING[0], left_out(TRAINING[0])
    for copy, of in {"demix": "demix", "untaught": "demix", "mine": "merged", "left": "merged"}.items():
        shutil.copytree(models / of, tmp_path / copy)
    remove_expert(tmp_path / "left", name)
    sets = [("demix", "training", TRAINING), ("demix", label, TRAINING[1:]), ("untaught", "training", TRAINING)]
    rows = [
        {"model": model, "experts": of, "weights": "history", "domain": name, "expert": one, "prior": 1 / len(experts)}
        for model, of, experts in sets
        for one in experts
    ]
    write_parquet(pa.Table.from_pylist(rows), tmp_path / "priors.parquet")

    def audited(folder: str, system: str) -> list[dict[str, object]]:
        audit = Audit(
            3, model="demix", training=TRAINING, left_out=label, without_model="untaught", without=TRAINING,
            merged=(folder,), threads=1,
        )  # fmt: skip
        found = audit_rows(name, tmp_path, tokens / "tokens" / name, tmp_path / "priors.parquet", audit)
        assert {row["experts"] for row in found if row["system"] == "merged_minus"} == {label}
        return [{"nll": row["nll"], "share": row["share"]} for row in found if row["system"] == system]

    whole, without = audited("mine", "merged"), audited("mine", "merged_minus")
    monkeypatch.setattr("demix.evaluate.memorization.load_without", lambda folder, _: load_model(folder))
    assert audited("left", "merged") == without != whole
    assert len(whole) == len(without) > 2


def test_experts_of_another_name_join_behind_the_others(models: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(models / "merged", tmp_path / "mine")
    source = models / "merged" / "experts" / f"{TRAINING[2]}.safetensors"
    assert add_expert(mine, source, "twin") == "twin"
    choices = read_json(mine / "experts" / "dense.json")["choices"]
    assert [choice["expert"] for choice in choices] == [*TRAINING, "twin"]
    router = load_file(mine / "experts" / "dense.safetensors")["blocks.1.feedforward.router"]
    np.testing.assert_allclose(router[2], router[3], rtol=1e-4, atol=1e-6)
    assert describe(mine)["architecture"]["routed"]["capacity"] == 4.0
    assert find_faults(mine) == []


def test_commands_take_what_is_left(models: Path, tmp_path: Path) -> None:
    mine, text = shutil.copytree(models / "merged", tmp_path / "mine"), tmp_path / "own.txt"
    remove_expert(mine, TRAINING[0])
    text.write_text("It is a truth universally acknowledged. " * 40)
    for words in (("eval", mine, text), ("experts", "list", mine), ("experts", "verify", mine)):
        done = demix(*words)
        assert done.exit_code == 0, (words, done.exception)


def test_what_cannot_leave_or_join_is_refused_in_one_line(models: Path, tmp_path: Path) -> None:
    two, other = (shutil.copytree(models / "merged", tmp_path / name) for name in ("two", "other"))
    nameless = shutil.copytree(models / "whole", tmp_path / "nameless")
    changed(nameless, choices=[])
    old = shutil.copytree(models / "merged", tmp_path / "old")
    kept = read_json(old / "experts" / "dense.json")["choices"]
    changed(old, choices=[{key: one[key] for key in ("expert", "sha256", "data_sha256")} for one in kept])
    remove_expert(two, TRAINING[0])
    path = other / "shared.safetensors"
    shared = load_file(path)
    save_file(shared | {"token_embedding": shared["token_embedding"] * 2}, path)
    write_json(other / "model.json", read_json(other / "model.json") | {"shared_sha256": sha256_file(path)})
    changed(other, shared_sha256=sha256_file(path))
    without = shutil.copytree(models / "routers", tmp_path / "without")
    remove_expert(without, TRAINING[0])

    def expert(model: str | Path, name: str = TRAINING[0]) -> Path:
        return models / model / "experts" / f"{name}.safetensors"

    refused = {
        ("remove", two, TRAINING[0]): "expert parliament: is none among which tokens of .*two choose; known are",
        ("remove", two, TRAINING[1]): "is one of 2 experts, among which each token chooses 2; keep it, or delete",
        ("remove", nameless, TRAINING[0]): "is no model that was merged of experts among which its tokens choose; use",
        ("remove", old, TRAINING[0]): "does not say what each of its experts has learned from; merge it again",
        ("add", two, expert("merged", TRAINING[1])): "is an expert of .*two already; give another name, or remove it",
        ("add", two, expert("merged", "licences")): "is none among which tokens of .*merged choose; did you",
        ("add", two, expert(other)): "belongs to a model of other shared weights than",
        ("add", two, expert("demix")): "belongs to a model of other architecture than .*two; an expert fits",
        ("add", two, expert("merged"), "--name", "dense"): "expert dense: is reserved",
        ("add", without, expert("merged")): "without/sums.safetensors: keeps no sums, and the routers of .*merged are",
        ("add", two, expert("routers")): "routers/sums.safetensors: keeps no sums, and the routers of .*two are",
        ("add", models / "demix", expert("merged")): "parliament.json: is missing|is an expert of",
    }  # fmt: skip
    for words, message in refused.items():
        before = content(words[1])
        done = demix("experts", *words)
        assert isinstance(done.exception, DemixError), words
        assert "\n" not in str(done.exception)
        with pytest.raises(DemixError, match=message):
            raise done.exception
        assert content(words[1]) == before


def test_damaged_sums_are_a_fault(models: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(models / "merged", tmp_path / "mine")
    path = mine / "sums.safetensors"
    sums = load_file(path)
    save_file({key: 0 * tensor for key, tensor in sums.items()}, path)
    (fault,) = find_faults(mine)
    assert "sums.safetensors: differs from its recorded sha256" in str(fault)
    with pytest.raises(DemixError, match="differs from its recorded sha256"):
        remove_expert(mine, TRAINING[0])
    changed(mine, sums_sha256=sha256_file(path))
    before = content(mine)
    with pytest.raises(DemixError, match=r"sums\.safetensors: holds sums that no text has"):
        remove_expert(mine, TRAINING[0])
    save_file({key: np.full_like(tensor, np.nan) for key, tensor in sums.items()}, path)
    changed(mine, sums_sha256=sha256_file(path))
    with pytest.raises(DemixError, match=r"sums\.safetensors: holds numbers from nan"):
        remove_expert(mine, TRAINING[0])
    assert (mine / "experts" / "dense.safetensors").read_bytes() == before["experts/dense.safetensors"]
