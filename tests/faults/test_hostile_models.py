"""A model folder that somebody else made: each command that reads it ends in one line, soon, and changes nothing."""

import itertools
import json
import os
import random
import shutil
import threading
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
from demix.evaluate.score import Scoring, score
from demix.files import digest, exclusive, read_json, sha256_file, write_json, write_parquet
from demix.generate.playground.answers import opened
from demix.mix.stream import Posterior
from demix.model import experts
from demix.model.checkpoint import load_model
from demix.model.decode import Decoder
from demix.model.scoring import trunk_log_probabilities
from support.breaking import Note
from support.cli import demix, said
from support.models import REAL_TEXT, THREE, write_model

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


def commands(model: Path) -> dict[str, Callable[[], object]]:
    """What reads a model, by name. Each returns or raises the error's line."""
    run = model.parent.parent
    out, tokenizer = run / "out", run / "tokenizer.json"
    lines = {
        "eval": ["eval", model, run / "text.txt"],
        "generate": ["generate", model, "--prompt", "it is", "--tokens", "2"],
        "export": ["export", model, "--expert", "law", "--tokenizer", tokenizer, "--output", out],
        "merge": ["merge", model, "--weights", "law=0.5,news=0.5", "--output", out],
        "add": ["experts", "add", run / "models" / "good", model / "experts" / "law.safetensors", "--name", "deeds"],
    }
    scoring = Scoring(dev_blocks=1, test_tokens=None, precision="fp32", threads=1)
    return {name: lambda words=words: said([*map(str, words)]) for name, words in lines.items()} | {
        "playground": lambda: opened(model, None),
        "score": lambda: score(model, THREE, [run / "tokens" / "law" / "test.arrow"], scoring, out),
    }


def line_of(command: Callable[[], object]) -> str:
    try:
        found = command()
    except DemixError as error:
        found = f"demix: error: {error}"
    assert isinstance(found, str), "not refused"
    assert found.startswith("demix: error: ")
    assert found.isprintable()
    assert len(found) < 4200
    return found


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
        of_expert = path.parent.name == "experts"
        described = path.with_suffix(".json") if of_expert else model / "model.json"
        for file_of in [described] if of_expert else [described, *(model / "experts").glob("*.json")]:
            key = "sha256" if of_expert else "shared_sha256"
            change(str(file_of.relative_to(model)), **{key: sha256_file(path)})(model)

    return replace


def one_value(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return edit


def other_ids(model: Path) -> None:
    tokenizer = read_json(model / "model.json")["tokenizer_sha256"]
    shutil.rmtree(model)
    write_model(model, THREE, tokenizer, IDS - 44)


DEEP = {"a": 1}
for _ in range(400):
    DEEP = {"a": DEEP}
LAW, SHARED = "experts/law.safetensors", "shared.safetensors"
# What is done to a model, and what the line then names.
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no heads": (sizes(heads=0), "architecture.heads is 0"),
    "heads that do not divide": (sizes(heads=3), "architecture.heads 3 does not divide"),
    "20,000 layers": (sizes(layers=20_000), "architecture.layers is 20000"),
    "1e9 layers": (sizes(layers=10**9), "architecture.layers is 1000000000"),
    "64 layers": (sizes(layers=64), "of which the architecture makes"),
    "a wide model": (sizes(width=65_536), "of which the architecture makes"),
    "sizes as text": (sizes(width="\x1b[31m"), r"architecture.width is '\x1b[31m'"),
    "a list as sizes": (change("model.json", architecture=[1] * 100_000), "architecture is [1, 1"),
    "markup as a domain token": (change("model.json", domain_tokens=["[/bold]"]), "domain_tokens.0 is no usable name"),
    "a negative vocabulary": (change("model.json", vocab_size=-1), "vocab_size is -1"),
    "deep JSON": (text("model.json", '{"a":' * 100_000), "model.json: is damaged"),
    "deep JSON that is sealed": (change("model.json", more=DEEP), "model.json: is damaged (it has more than 100"),
    "a description that is too large": (change("model.json", more="a" * (5 << 20)), "has more than 4,194,304 bytes"),
    "a pipe as model.json": (pipe("model.json"), "model.json: is no regular file"),
    "a pipe as lineage": (pipe("experts/law.json"), "law.json: is no regular file"),
    "a lineage of wrong types": (change("experts/law.json", data_sha256=3), "law.json: does not describe an expert"),
    "a pipe as weights": (pipe(LAW), "law.safetensors: is no regular file"),
    "a pipe as shared weights": (pipe(SHARED), "shared.safetensors: is no regular file"),
    "whole numbers": (weights(LAW, lambda tensor: tensor.to(torch.int32)), "of type I32"),
    "NaN": (weights(LAW, one_value(torch.nan)), "law.safetensors: holds numbers from nan to nan in blocks.0"),
    "an infinity": (weights(LAW, one_value(-torch.inf)), "law.safetensors: holds numbers from -inf to"),
    "1e30": (weights(LAW, one_value(1e30)), "law.safetensors: holds numbers from"),
    "NaN in shared weights": (weights(SHARED, one_value(torch.nan)), "shared.safetensors: holds numbers from nan"),
}
# Of the model that an expert comes from, `add` reads no shared weights: their digest is in both descriptions.
UNREAD = {"a pipe as shared weights": "add", "NaN in shared weights": "add"}


@pytest.mark.parametrize("name", HOSTILE)
def test_each_command_ends_in_one_line(name: str, model: Path, note: Note) -> None:
    damage, fault = HOSTILE[name]
    damage(model)
    good = {path: path.stat().st_mtime_ns for path in (model.parent / "good").rglob("*") if path.name != ".lock"}
    reading = {command: read for command, read in commands(model).items() if UNREAD.get(name) != command}
    for command, read in reading.items():
        start = time.monotonic()
        with note.timed(f"a hostile model: {name}", "refused, file named"):
            line = line_of(read)
        assert time.monotonic() - start < 30, command
        # Two models of different sizes are told apart before the files are opened.
        assert fault in line or (command == "add" and "belongs to a model of other architecture" in line), command
    assert {path: path.stat().st_mtime_ns for path in good} == good
    assert not (model.parent.parent / "out").exists()
    faults = demix("experts", "verify", model)
    assert faults.exit_code == 1
    assert fault in faults.output
    shown = demix("experts", "list", model)
    assert shown.exit_code == 0 or isinstance(shown.exception, DemixError)
    assert "\x1b" not in shown.output


def test_a_tokenizer_of_other_size_than_the_vocabulary(model: Path, note: Note) -> None:
    other_ids(model)
    for command in ("eval", "generate", "export", "playground"):
        with note.timed("a tokenizer larger than the vocabulary", "refused, file named"):
            assert "tokenizer.json: has 300 ids" in line_of(commands(model)[command])


@pytest.mark.parametrize("name", ["\x1b[31mred", "[bold]x", "\udcff", "LAW", "x" * 230])
def test_names_of_files_are_shown_as_text(name: str, model: Path, note: Note) -> None:
    for suffix in (".json", ".safetensors"):
        shutil.copy(model / f"experts/law{suffix}", model / "experts" / f"{name}{suffix}")
    with note.timed("codes and markup in an expert's name", "shown as text"):
        for command in ("eval", "generate", "playground"):
            assert "is no usable name of an expert" in line_of(commands(model)[command])
        for words in ("list", "verify"):
            shown = demix("experts", words, model).output
            assert all(line.isprintable() for line in shown.split("\n"))
            assert name.encode("unicode_escape").decode()[:8] in shown
            assert "no usable" in shown


PLACES = ("../shared", "../model", "experts/../../shared", "/etc/passwd", "", ".", "..", "law\n", "*")


@pytest.mark.parametrize("name", PLACES)
def test_names_that_are_places_are_refused_at_every_entrance(name: str, model: Path, note: Note) -> None:
    def contents() -> dict[str, str]:
        return {str(path): sha256_file(path) for path in model.parent.rglob("*") if path.is_file()}

    before, out = contents(), model.parent.parent / "out"
    words: list[list[object]] = [
        ["experts", "remove", model, name],
        ["experts", "add", model, model.parent / "good" / "experts" / "law.safetensors", "--name", name or "/"],
        ["merge", model, "--weights", f"{name}=1", "--output", out],
        ["merge", model, "--weights", f"law=1,{name}=1e-9", "--output", out],
        ["export", model, "--expert", name, "--tokenizer", out.with_name("tokenizer.json"), "--output", out],
        ["generate", model, "--prompt", "a", "--experts", f"law,{name}"],
    ]
    for line in words:
        with note.timed("a name that is a place", "refused, nothing changed"):
            assert line_of(lambda line=line: said([*map(str, line)])).count("; ")
    assert contents() == before


def test_two_that_change_the_experts_do_so_in_turn(model: Path, monkeypatch: pytest.MonkeyPatch, note: Note) -> None:
    source, good = model.parent / "good" / "experts", experts.shutil.copyfile
    both, outcomes = threading.Barrier(2), []

    def copied(*paths: Path) -> None:
        # Without a lock the other one gets here too.
        with suppress(threading.BrokenBarrierError):
            both.wait(1)
        good(*paths)

    def add(expert: str, name: str = "deeds") -> None:
        try:
            outcomes.append(experts.add_expert(model, source / f"{expert}.safetensors", name))
        except DemixError as error:
            outcomes.append(error.cause)

    monkeypatch.setattr(experts.shutil, "copyfile", copied)
    threads = [threading.Thread(target=add, args=(expert,)) for expert in ("law", "news")]
    with note.timed("two experts added under one name", "one is added, the other refused"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(outcomes) == sorted(["deeds", f"is an expert of {model} already"])
    assert experts.find_faults(model) == []
    monkeypatch.setattr(experts, "LOCK_SECONDS", 0.0)
    with exclusive(model / experts.LOCK, "changes the experts"):
        for act in (lambda: add("news", "more"), lambda: experts.remove_expert(model, "deeds")):
            with suppress(DemixError):
                act()
    assert "another process" in outcomes[-1]
    assert (model / "experts" / "deeds.safetensors").exists()


WRONG: list[Any] = [None, True, -1, 0, 10**30, 1.5, 1e300, "", "\x1b", "a" * 9999, "../x"]
WRONG += [[], [[]], ["a", 1], {}, {"a": 1}, {"\x1b": {}}, DEEP]


def test_wrong_values_of_every_key(
    model: Path, times: Callable[[int, int], int], chance: random.Random, note: Note
) -> None:
    cases = []
    for file in ("model.json", "experts/law.json"):
        content = read_json(model / file)
        places = [(key,) for key in [*content, "parent", "parents", "training", "adaptation", "expert_scope"]]
        places += [("architecture", key) for key in content.get("architecture", ())]
        cases += [(file, content, place, value) for place, value in itertools.product(places, WRONG)]
    for file, content, place, value in chance.sample(cases, min(times(60, 10_000), len(cases))):
        changed = json.loads(json.dumps(content))
        (changed if len(place) == 1 else changed[place[0]])[place[-1]] = value
        (model / file).write_text(json.dumps(changed | {"seal": digest(changed)}))
        with note.timed("a wrong value in a description", "read or refused"), suppress(DemixError):
            load_model(model)
            experts.read_experts(model)
        write_json(model / file, content)


def test_a_model_that_gives_no_probabilities_is_refused(model: Path, note: Note) -> None:
    trunk = load_model(model, ("law", "news"))
    with torch.no_grad():
        trunk.blocks[0].feedforward.up[1, 0, 0] = torch.nan
    ids = torch.arange(8)
    with note.timed("a model that gives NaN", "refused"):
        with pytest.raises(DemixError, match="expert news: gives tokens"):
            trunk_log_probabilities([trunk], ids[None, :7].numpy(), ids[None, 1:].numpy(), (ids[None, 1:] > 0).numpy())
        with pytest.raises(DemixError, match="gives tokens no probability"):
            Decoder([trunk], ids[:1], Posterior(torch.zeros(2), trunk.architecture.context))
