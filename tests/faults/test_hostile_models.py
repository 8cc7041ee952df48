"""A model folder that somebody else made: each command that reads it ends in one line, soon, and changes nothing."""

import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from demix.data.shards import tokenize
from demix.data.tokenizer import Tokenizer, train_tokenizer
from demix.errors import DemixError
from demix.evaluate.score import Scoring
from demix.files import digest, read_json, sha256_file, write_json, write_parquet
from demix.generate.completions import opened
from demix.model import experts
from demix.model.directory import load_model
from support.cli import demix, refusal
from support.contents import contents
from support.errors import refused
from support.models import REAL_TEXT, THREE, write_model
from support.scored import score

IDS = 300


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a tokenizer, a text and a good model; not to be written to."""
    run = tmp_path_factory.mktemp("run")
    (run / "text.txt").write_text(REAL_TEXT)
    document = {"id": ["a"], "text": [REAL_TEXT * 20], "n_words": [len(REAL_TEXT.split()) * 20], "origin": ["a"]}
    write_parquet(pa.table(document), run / "text.parquet")
    train_tokenizer([run / "text.parquet"], IDS, run / "tokenizer.json")
    tokenize(run / "tokenizer.json", run / "text.parquet", run / "tokens" / "law" / "test.arrow")
    write_model(run / "models" / "good", THREE, Tokenizer.load(run / "tokenizer.json").sha256, IDS)
    return run


@pytest.fixture
def model(run: Path) -> Path:
    """A copy of the good model that may be changed."""
    copy = run / "models" / "m"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run / "models" / "good", copy)
    return copy


def commands(model: Path) -> dict[str, list[object]]:
    """Commands that read a model."""
    run = model.parent.parent
    out, tokenizer = run / "out", run / "tokenizer.json"
    return {
        "eval": ["eval", model, run / "text.txt"],
        "generate": ["generate", model, "--prompt", "it is", "--tokens", "2"],
        "export": ["export", model, "--expert", "law", "--tokenizer", tokenizer, "--output", out],
        "merge": ["merge", model, "--weights", "law=0.5,news=0.5", "--output", out],
        "add": ["experts", "add", run / "models" / "good", model / "experts" / "law.safetensors", "--name", "deeds"],
    }


def change(file: str, **more: object) -> Callable[[Path], None]:
    return lambda model: write_json(model / file, read_json(model / file) | more)


def sizes(**more: object) -> Callable[[Path], None]:
    def replace(model: Path) -> None:
        change("model.json", architecture=read_json(model / "model.json")["architecture"] | more)(model)

    return replace


def text(file: str, content: str) -> Callable[[Path], object]:
    return lambda model: (model / file).write_text(content)


def pipe(file: str) -> Callable[[Path], None]:
    def replace(model: Path) -> None:
        (model / file).unlink()
        os.mkfifo(model / file)

    return replace


def weights(file: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """The first tensor of a file as `edit` makes it, with the digest that belongs to it."""

    def replace(model: Path) -> None:
        path = model / file
        tensors = load_file(path)
        first = min(tensors)
        save_file(tensors | {first: edit(tensors[first].clone())}, path)
        described = ["experts/law.json"] if file == LAW else ["model.json", *(f"experts/{one}.json" for one in THREE)]
        for name in described:
            change(name, **{"sha256" if file == LAW else "shared_sha256": sha256_file(path)})(model)
        change("model.json", experts={})(model)

    return replace


def one_value(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return edit


DEEP: dict[str, Any] = {"a": 1}
for _ in range(400):
    DEEP = {"a": DEEP}
LAW, LINEAGE, SHARED, MODEL = "experts/law.safetensors", "experts/law.json", "shared.safetensors", "model.json"
# What is done to a model, and the file that the line then names.
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no heads": (sizes(heads=0), MODEL),
    "heads that do not divide": (sizes(heads=3), MODEL),
    "20,000 layers": (sizes(layers=20_000), MODEL),
    "64 layers": (sizes(layers=64), "safetensors"),
    "a wide model": (sizes(width=65_536), "safetensors"),
    "sizes as text": (sizes(width="\x1b[31m"), MODEL),
    "markup as a domain token": (change(MODEL, domain_tokens=["[/bold]"]), MODEL),
    "deep JSON": (text(MODEL, '{"a":' * 100_000), MODEL),
    "deep JSON that is sealed": (change(MODEL, more=DEEP), MODEL),
    "a description that is too large": (change(MODEL, more="a" * (5 << 20)), MODEL),
    "a pipe as model.json": (pipe(MODEL), MODEL),
    "a pipe as lineage": (pipe(LINEAGE), LINEAGE),
    "a lineage of wrong types": (change(LINEAGE, data_sha256=3), LINEAGE),
    "a pipe as weights": (pipe(LAW), LAW),
    "a pipe as shared weights": (pipe(SHARED), SHARED),
    "whole numbers": (weights(LAW, lambda tensor: tensor.to(torch.int32)), LAW),
    "NaN": (weights(LAW, one_value(torch.nan)), LAW),
    "infinite": (weights(LAW, one_value(-torch.inf)), LAW),
    "what no training leaves": (weights(LAW, one_value(-1e30)), LAW),
    "NaN in shared weights": (weights(SHARED, one_value(torch.nan)), SHARED),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_each_command_ends_in_one_line(name: str, model: Path) -> None:
    damage, file = HOSTILE[name]
    damage(model)
    run, good = model.parent.parent, contents(model.parent / "good")
    scoring = Scoring(dev_blocks=1, test_tokens=None, precision="fp32", threads=1)
    for command, words in commands(model).items():
        # Of the model that an expert comes from, `add` reads no shared weights, and names the expert that does not fit.
        if command == "add" and file == SHARED:
            continue
        start = time.monotonic()
        line = refusal(*words, of="" if command == "add" else file)
        assert line.isprintable()
        assert len(line) < 4200
        assert time.monotonic() - start < 30, command
    for act in (
        lambda: opened(model),
        lambda: score(model, THREE, [run / "tokens" / "law" / "test.arrow"], scoring, run / "out"),
    ):
        with pytest.raises(DemixError) as error:
            act()
        assert file in error.value.subject
    assert contents(model.parent / "good") == good
    assert not (run / "out").exists()
    shown = demix("experts", "list", model)
    assert shown.exit_code == 1
    assert file in shown.output + str(shown.exception)
    assert "\x1b" not in shown.output


def test_a_tokenizer_of_other_size_than_the_vocabulary(model: Path) -> None:
    tokenizer = read_json(model / "model.json")["tokenizer_sha256"]
    shutil.rmtree(model)
    write_model(model, THREE, tokenizer, IDS - 44)
    for command in ("eval", "generate", "export"):
        refusal(*commands(model)[command], of="tokenizer.json")
    with refused("tokenizer.json"):
        opened(model)


@pytest.mark.parametrize("name", ["\x1b[31mred", "[bold]x", "\udcff", "LAW", "x" * 230])
def test_names_of_files_are_shown_as_text(name: str, model: Path) -> None:
    for suffix in (".json", ".safetensors"):
        shutil.copy(model / f"experts/law{suffix}", model / "experts" / f"{name}{suffix}")
    for command in ("eval", "generate"):
        assert refusal(*commands(model)[command], of="experts/").isprintable()
    shown = demix("experts", "list", model).output
    assert all(line.isprintable() for line in shown.split("\n"))
    assert name.encode("unicode_escape").decode()[:8] in shown


PLACES = ("../shared", "../model", "experts/../../shared", "/etc/passwd", "", ".", "..", "law\n", "*")


@pytest.mark.parametrize("name", PLACES)
def test_names_that_are_places_are_refused_at_every_entrance(name: str, model: Path) -> None:
    before, out = contents(model.parent), model.parent.parent / "out"
    law = model.parent / "good" / "experts" / "law.safetensors"
    for words in (
        ["experts", "remove", model, name],
        ["experts", "add", model, law, "--name", name or "/"],
        ["merge", model, "--weights", f"{name}=1", "--output", out],
        ["merge", model, "--weights", f"law=1,{name}=1e-9", "--output", out],
        ["export", model, "--expert", name, "--tokenizer", out.with_name("tokenizer.json"), "--output", out],
        ["generate", model, "--prompt", "a", "--experts", f"law,{name}"],
    ):
        refusal(*words, of="")
    assert contents(model.parent) == before


WRONG: list[Any] = [None, True, -1, 0, 10**30, 1.5, 1e300, "", "\x1b", "a" * 9999, "../x"]
WRONG += [[], [[]], ["a", 1], {}, {"a": 1}, {"\x1b": {}}, DEEP]


def test_wrong_values_of_every_key(model: Path, times: Callable[[int, int], int], chance: random.Random) -> None:
    cases = []
    for file in (MODEL, LINEAGE):
        content = read_json(model / file)
        places = [(key,) for key in [*content, "parent", "parents", "training", "adaptation", "expert_scope"]]
        places += [("architecture", key) for key in content.get("architecture", ())]
        cases += [(file, content, place, value) for place, value in itertools.product(places, WRONG)]
    for file, content, place, value in chance.sample(cases, min(times(60, 10_000), len(cases))):
        changed = json.loads(json.dumps(content))
        (changed if len(place) == 1 else changed[place[0]])[place[-1]] = value
        (model / file).write_text(json.dumps(changed | {"seal": digest(changed)}))
        with suppress(DemixError):
            load_model(model)
            experts.read_experts(model)
        write_json(model / file, content)
