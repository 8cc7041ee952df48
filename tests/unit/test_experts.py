"""Experts listed, verified, added, removed, averaged: the model directory from the command line."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.files import read_json, sha256_file, write_json, write_parquet
from demix.model.directory import describe, expert_names, load_model, save_expert
from demix.model.experts import add_expert, changing, find_faults, remove_expert
from demix.model.merge import merge_experts, prior_weights
from support.cli import demix, refusal, succeeds
from support.contents import contents
from support.errors import concerns, refused
from support.models import THREE, own_tensors, randomise, write_model, write_trunks


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
    lineage = {"parent": "law", "tokenizer_sha256": "t" * 64, "shared_sha256": describe(model).shared_sha256}
    save_expert(load_model(model, ("law",)), "law", model, lineage, name="deeds")
    weights = model / "experts" / "news.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    shown = demix("experts", "list", model)
    assert shown.exit_code == 1
    assert str(weights) in shown.output
    lines = (line.split("│") for line in shown.output.splitlines() if "│" in line)
    rows = {line[1].strip(): [cell.strip() for cell in line[2:-1]] for line in lines}
    assert rows["code"] == ["–", "9", "32", "code"]
    assert rows["deeds"][:2] == ["law", "?"]
    assert isinstance(demix("experts", "list", model / "nothing").exception, DemixError)


def test_experts_of_a_model_cannot_be_swapped(model: Path, tmp_path: Path) -> None:
    for kind in ("json", "safetensors"):
        one, other, aside = (model / "experts" / f"{name}.{kind}" for name in ("law", "news", "aside"))
        one.rename(aside)
        other.rename(one)
        aside.rename(other)
    with refused("experts/law.json"):
        load_model(model, ("law",))
    assert "experts/law.json" in {fault.subject.removeprefix(f"{model}/") for fault in find_faults(model)}


def change_json(path: Path, **more: object) -> None:
    write_json(path, read_json(path) | more)


def reshape(model: Path) -> None:
    path = model / "experts" / "law.safetensors"
    save_file({name: tensor[..., :-1].clone() for name, tensor in load_file(path).items()}, path)
    change_json(path.with_suffix(".json"), sha256=sha256_file(path))
    change_json(model / "model.json", experts={})


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no description": (lambda m: (m / "model.json").unlink(), "model.json"),
    "of no model": (lambda m: change_json(m / "model.json", architecture={"layers": 2}), "model.json"),
    "no shared weights": (lambda m: (m / "shared.safetensors").unlink(), "shared.safetensors"),
    "damaged shared weights": (lambda m: (m / "shared.safetensors").write_bytes(b"x"), "shared.safetensors"),
    "damaged expert": (lambda m: (m / "experts" / "law.safetensors").write_bytes(b"x"), "law.safetensors"),
    "no weights": (lambda m: (m / "experts" / "law.safetensors").unlink(), "law.safetensors"),
    "no lineage": (lambda m: (m / "experts" / "law.json").unlink(), "law.json"),
    "damaged lineage": (lambda m: (m / "experts" / "law.json").write_text("{"), "law.json"),
    "other shared": (lambda m: change_json(m / "experts" / "law.json", shared_sha256="0"), "law.json"),
    "other tokenizer": (lambda m: change_json(m / "experts" / "law.json", tokenizer_sha256="0"), "law.json"),
    "other name": (lambda m: change_json(m / "experts" / "law.json", name="deeds"), "law.json"),
    "other shape": (reshape, "law.safetensors"),
    "of another training": (lambda m: change_json(m / "experts" / "law.json", steps=8), "law.json"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found_and_named_alone(model: Path, fault: str) -> None:
    damage, file = FAULTS[fault]
    succeeds("experts", "list", model)
    damage(model)
    done = demix("experts", "list", model)
    assert done.exit_code == 1
    # A model that cannot be described has no list.
    told = [*done.output.splitlines(), str(done.exception)]
    (line,) = (line for line in told if line.startswith(str(model)))
    assert f"{file}: " in line


def test_all_faults_are_found_at_once(model: Path) -> None:
    for expert in THREE:
        (model / "experts" / f"{expert}.json").unlink()
    subjects = [fault.subject for fault in find_faults(model)]
    wanted = ["experts", *(f"{expert}.json" for expert in sorted(THREE))]
    assert all(concerns(subject, [name]) for subject, name in zip(subjects, wanted, strict=True)), subjects


@pytest.mark.parametrize("of", ["tokenizer", "shared"])
def test_an_expert_of_another_tokenizer_or_other_shared_weights_is_not_loaded(of: str, model: Path) -> None:
    change_json(model / "experts" / "news.json", **{f"{of}_sha256": "u" * 64})
    with refused("news.json"):
        load_model(model, ("law", "news"))
    assert load_model(model, ("law", "code")).experts == ("law", "code")


def test_an_added_expert_is_the_same_expert(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    trained = load_model(other, ("news",))
    randomise(trained.blocks[0].feedforward, 5)
    belongs = {"tokenizer_sha256": "t" * 64, "shared_sha256": describe(model).shared_sha256}
    save_expert(trained, "news", other, {"parent": "news", "steps": 4} | belongs, name="press")
    before = contents(model)
    succeeds("experts", "add", model, other / "experts" / "press.safetensors")
    succeeds("experts", "add", model, other / "experts" / "press.safetensors", "--name", "press_2")
    assert expert_names(model) == ("code", "law", "news", "press", "press_2")
    assert before.items() <= contents(model).items()
    assert find_faults(model) == []
    both = load_model(model, ("press", "press_2"))
    for name, tensor in own_tensors(trained).items():
        assert torch.equal(own_tensors(both)[name], torch.cat([tensor, tensor]))
    lineages = (read_json(place) for place in (model / "experts" / "press_2.json", other / "experts" / "press.json"))
    assert next(lineages) == next(lineages) | {"name": "press_2"}


def test_an_expert_that_does_not_fit_is_refused(model: Path, tmp_path: Path) -> None:
    good, heads, broken = (shutil.copytree(model, tmp_path / name) for name in ("good", "heads", "broken"))
    write_model(tmp_path / "seeds", seed=1)
    write_model(tmp_path / "words", tokenizer="u" * 64)
    change_json(heads / "model.json", architecture=read_json(heads / "model.json")["architecture"] | {"heads": 2})
    damaged = broken / "experts" / "law.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    before = contents(model)
    for source in ("seeds", "words", "heads", "broken"):
        with refused(path := tmp_path / source / "experts" / "law.safetensors"):
            add_expert(model, path, "deeds")
    for name in (None, "tokens", "dense", "New-Law", "law\n"):
        with refused(f"expert {name or 'law'}"):
            add_expert(model, good / "experts" / "law.safetensors", name)
    (good / "experts" / "news.safetensors").unlink()
    for missing, subject in (
        ("experts/deeds.safetensors", "deeds.json"),
        ("model.json", "model.json"),
        ("experts/news.safetensors", "news.safetensors"),
    ):
        with refused(subject):
            add_expert(model, good / missing, "deeds")
    assert contents(model) == before


def test_an_expert_that_is_a_whole_model_fits_another_run_of_the_same_shape(tmp_path: Path) -> None:
    made = {
        "words": {"tokenizer": "u" * 64},
        "types": {"vocab_size": 51},
        "heads": {},
        "other": {"seed": 1},
        "ours": {},
    }
    for name, more in made.items():
        write_model(tmp_path / "stacked" / name, **more)
        write_trunks(tmp_path / "stacked" / name, tmp_path / name)
    heads, ours = tmp_path / "heads" / "model.json", tmp_path / "ours"
    change_json(heads, architecture=read_json(heads)["architecture"] | {"heads": 2})
    before = contents(ours)
    # What they share is one file of no tensor, which tells no two of them apart.
    assert len({sha256_file(tmp_path / name / "shared.safetensors") for name in made}) == 1
    for directory, source in ((ours, "words"), (ours, "types"), (ours, "heads"), (tmp_path / "stacked/ours", "ours")):
        with refused(path := tmp_path / source / "experts" / "law.safetensors"):
            add_expert(directory, path, "deeds")
    assert contents(ours) == before
    add_expert(ours, tmp_path / "other" / "experts" / "law.safetensors", "deeds")
    remove_expert(ours, "news")
    assert expert_names(ours) == ("code", "deeds", "law")
    after = contents(ours)
    assert all(after[path] == content for path, content in before.items() if "news" not in str(path))
    assert find_faults(ours) == []


def test_one_process_changes_the_experts_at_a_time(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demix.model.experts.LOCK_SECONDS", 0.0)
    with changing(model):
        with refused(model):
            add_expert(model, model / "experts" / "law.safetensors", "deeds")
        with refused(model):
            remove_expert(model, "law")
    assert expert_names(model) == tuple(sorted(THREE))


def test_removing_leaves_a_whole_model_at_any_moment(model: Path) -> None:
    kept = load_model(model, ("code", "news"))
    succeeds("experts", "remove", model, "law")
    assert expert_names(model) == ("code", "news")
    assert find_faults(model) == []
    for name, tensor in load_model(model).state_dict().items():
        assert torch.equal(tensor, kept.state_dict()[name])
    with refused("law.json"):
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
    assert [fault.subject for fault in find_faults(model)] == [str(weights.with_suffix(".json"))]
    remove_expert(model, "news")
    assert not weights.exists()
    assert find_faults(model) == []
    with refused("code.json"):
        remove_expert(model, "code")
    assert expert_names(model) == ("code",)


def test_one_expert_alone_is_merged_to_the_bit(model: Path, tmp_path: Path) -> None:
    path = model / "experts" / "law.safetensors"
    tensors = load_file(path)
    tensors["blocks.0.feedforward.up_bias"][:2] = torch.tensor([-0.0, 1e-45])
    save_file(tensors, path)
    change_json(path.with_suffix(".json"), sha256=sha256_file(path))
    change_json(model / "model.json", experts={})
    succeeds("merge", model, "--weights", "law=1,news=0", "--output", tmp_path / "merged")
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
    ("weights", "of"),
    [
        ("law=0.5,news=0.4", "weights"),
        ("law=1.5,news=-0.5", "weight of news"),
        ("law=nan,news=1", "weight of law"),
        ("law=0", "weights"),
        ("law=1e308,news=1e308", "weights"),
        ("law=0.5,law=0.5", "--weights"),
        ("law", "--weights"),
        ("law=half", "--weights"),
        ("law=0.5,deeds=0.5", "deeds.json"),
    ],
)
def test_wrong_weights_are_refused(model: Path, tmp_path: Path, weights: str, of: str) -> None:
    refusal("merge", model, "--weights", weights, "--output", tmp_path / "merged", of=of)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    refusal("merge", model, "--weights", "law=1", "--output", model, of=model)


def test_weights_come_from_the_cached_prior(model: Path, tmp_path: Path) -> None:
    sets = {
        ("demix", "training", "history"): (0.7, 0.2, 0.1),
        ("demix", "training", "released"): (1.0, 0.0, 0.0),
        ("demix", "minus-law", "history"): (0.0, 0.5, 0.5),
        ("domain_token", "training", "history"): (0.0, 0.0, 1.0),
    }
    keys = ("model", "experts", "weights", "kind", "domain", "expert", "prior")
    rows = [
        dict(zip(keys, (*of, "novel", domain, expert, prior), strict=True))
        for of, priors in sets.items()
        for domain in ("songs", "wiki")
        for expert, prior in zip(THREE, priors if domain == "songs" else priors[::-1], strict=True)
    ]
    priors = tmp_path / "songs.priors.parquet"
    write_parquet(pa.Table.from_pylist(rows), priors)
    assert prior_weights(priors, "demix", "songs", "training") == dict(zip(THREE, (0.7, 0.2, 0.1), strict=True))
    assert prior_weights(priors, "demix", "wiki", "minus-law") == dict(zip(THREE, (0.5, 0.5, 0.0), strict=True))
    with refused(priors):
        prior_weights(priors, "model", "songs", "training")
    for arguments in ((), ("--weights", "law=1", "--routed")):
        assert isinstance(demix("merge", model, "--output", tmp_path / "x", *arguments).exception, DemixError)


def test_a_merged_model_is_exported_with_its_own_tokenizer_alone(tokens: Path, tmp_path: Path) -> None:
    encoder, merged = Tokenizer.load(tokens / "tokenizer.json"), tmp_path / "merged"
    write_model(tmp_path / "model", THREE, encoder.sha256, encoder.vocab_size)
    merge_experts(tmp_path / "model", {"law": 0.25, "news": 0.5, "code": 0.25}, merged)
    export = ("export", merged, "--expert", "dense", "--output")
    succeeds(*export, tmp_path / "hf", "--tokenizer", tokens / "tokenizer.json")
    other = tmp_path / "other.json"
    write_json(other, read_json(tokens / "tokenizer.json") | {"version": "2.0"}, sort_keys=False)
    refusal(*export, tmp_path / "refused", "--tokenizer", other, of=other)
    refusal(*export, tmp_path / "hf", of=tmp_path / "hf")
    assert not (tmp_path / "refused").exists()
