"""`demix experts train`: a new domain's expert from text files alone."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from demix.commands.new_domain import adaptation_of, add_domain
from demix.files import read_json, write_json
from demix.model.directory import expert_names
from demix.model.experts import usual_of
from support.cli import demix, succeeds
from support.contents import contents
from support.errors import refused
from support.tokens import TRAINING
from support.training import ADAPT, TRAIN, shard_paths, train_into


@pytest.fixture(scope="module")
def model(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a folder of its own, of which one expert says how it was adapted."""
    folder = tmp_path_factory.mktemp("trained")
    path = train_into(folder, "demix", shard_paths(tokens)) / "model" / "experts" / "licenses.json"
    write_json(path, read_json(path) | {"adaptation": ADAPT.as_dict()})
    write_json(folder / "model" / "model.json", read_json(folder / "model" / "model.json") | {"experts": {}})
    return folder / "model"


@pytest.fixture(scope="module")
def texts(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two plain files, of which one has a suffix that says nothing."""
    documents = pq.read_table(tokens / "corpus" / "fantasy" / "train.parquet")["text"].to_pylist()
    folder, middle = tmp_path_factory.mktemp("texts"), len(documents) // 2
    for name, part in (("one.txt", documents[:middle]), ("two.notes", documents[middle:])):
        (folder / name).write_text("\n\n".join(part))
    return sorted(folder.iterdir())


def test_a_domain_is_added_to_a_copy_and_better_than_before(model: Path, texts: list[Path], tmp_path: Path) -> None:
    before, output, rate = contents(model), tmp_path / "grown", 0.9 * TRAIN.learning_rate
    given = [word for text in texts for word in ("--text", text)]
    done = succeeds("experts", "train", model, "fantasy", *given, "--output", output, "--learning-rate", rate)
    assert contents(model) == before
    after = contents(output)
    new = {"experts/fantasy.json", "experts/fantasy.safetensors", "usual.json"}
    assert {path: digest for path, digest in after.items() if path not in new} == before
    assert expert_names(output) == tuple(sorted((*TRAINING, "fantasy")))
    succeeds("experts", "list", output)
    assert [path.name for path in tmp_path.iterdir()] == ["grown"]

    lineage = read_json(output / "experts" / "fantasy.json")
    assert (lineage["adaptation"]["learning_rate"], lineage["adaptation"]["tokens"]) == (rate, ADAPT.tokens)
    assert lineage["parent"] == max(lineage["priors"], key=lineage["priors"].__getitem__)
    cells = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in done.output.splitlines() if "│" in line]
    (_, best, own), (_, mixed, mixed_after) = ((name, float(a), float(b)) for name, a, b in cells)
    assert own < best
    assert mixed_after < mixed
    assert usual_of(output)["fantasy"].perplexity == pytest.approx(own, abs=0.01)


def test_the_settings_are_those_of_earlier_adaptations_or_follow_the_training(model: Path, tmp_path: Path) -> None:
    assert adaptation_of(model) == ADAPT
    changed = adaptation_of(model, 999, 0.25)
    assert changed == ADAPT.replace(tokens=999, learning_rate=0.25)
    path = shutil.copytree(model, tmp_path / "copy") / "experts" / "licenses.json"
    write_json(path, {key: value for key, value in read_json(path).items() if key not in ("adaptation", "seal")})
    given = adaptation_of(tmp_path / "copy")
    assert (given.tokens, given.passes) == (TRAIN.tokens // len(TRAINING), 4)
    assert given.learning_rate_factor == 1.0, "the best of docs/experiments/adaptation.md"
    given = adaptation_of(tmp_path / "copy", 999)
    assert (given.tokens, given.passes) == (999, None)


def test_interrupted_it_leaves_nothing(model: Path, texts: list[Path], tmp_path: Path) -> None:
    """Ctrl-C arrives when the training has begun."""

    def interrupt() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not list(tmp_path.glob(".grown.*/states/*/metrics.jsonl")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    waiting = threading.Thread(target=interrupt)
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        add_domain(model, "fantasy", texts, tmp_path / "grown", tokens=10**9)
    waiting.join()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_trained_is_refused(model: Path, texts: list[Path], tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short to part")
    for subject, domain, text in (
        ("expert licenses", "licenses", texts[0]),
        ("expert dense", "dense", texts[0]),
        ("expert Two Words", "Two Words", texts[0]),
        ("none.txt", "fantasy", tmp_path / "none.txt"),
        ("fantasy.words", "fantasy", short),
    ):
        words = ("experts", "train", model, domain, "--text", text, "--output", tmp_path / "grown")
        with refused(subject):
            raise demix(*words).exception
    assert sorted(path.name for path in tmp_path.iterdir()) == ["short.txt"]


def untrained(model: Path, copy: Path) -> Path:
    """A copy of `model` that does not say how it was trained, as one that was imported."""
    shutil.copytree(model, copy)
    description = read_json(copy / "model.json")
    write_json(copy / "model.json", {key: value for key, value in description.items() if key != "training"})
    return copy


@pytest.mark.parametrize("given", [None, 2e-3])
def test_a_dense_model_from_elsewhere_gets_an_expert_beside_what_it_was(
    model: Path, texts: list[Path], tmp_path: Path, given: float | None
) -> None:
    succeeds("merge", model, "--weights", "licenses=1", "--output", tmp_path / "merged")
    parent, output = untrained(tmp_path / "merged", tmp_path / "parent"), tmp_path / "grown"
    rate = ("--learning-rate", given) if given else ()
    succeeds("experts", "train", parent, "fantasy", "--text", texts[0], "--output", output, "--tokens", 4096, *rate)
    assert expert_names(output) == ("dense", "fantasy")
    assert read_json(output / "model.json")["kind"] == "demix"
    assert read_json(output / "experts" / "fantasy.json")["adaptation"]["learning_rate"] == (given or 1e-4)
    for name in ("dense.safetensors", "dense.json"):
        assert (output / "experts" / name).read_bytes() == (parent / "experts" / name).read_bytes()
    succeeds("experts", "list", output)
    succeeds("generate", output, "--prompt", "The", "--tokens", 5)
    succeeds("experts", "train", output, "other", "--text", texts[1], "--output", tmp_path / "two")
