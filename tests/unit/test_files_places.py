"""A whole file in the place of another one of its kind: each file says whose it is, and each reader compares it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from demix.files import (
    MisplacedError,
    read_json,
    read_json_lines,
    read_parquet,
    write_json,
    write_json_lines,
    write_parquet,
)
from demix.files.places import place_of, refuse_misplaced
from demix.launch.job import TrainingJob
from demix.launch.slurm import collect
from demix.model.directory import expert_names, load_model
from demix.model.experts import add_expert, expert_fault
from demix.model.merge import merge_experts
from demix.train.parallel import World
from demix.train.state import State, newest_state, save_state
from support.errors import refused
from support.models import write_model

# The files of a run that say which one they are.
LISTED = """
raw/law/0000.parquet documents/law/0000.parquet documents/law/0000.json sources/pile/0000.json sources/pile/card.json
corpus/law/train.parquet corpus/law/card.json corpus/owners.parquet corpus/overlap.parquet corpus/shared.json
tokens/law/train.json sweep/dense.json metrics/dense.jsonl metrics/sweep/dense/0.1.jsonl metrics/btm/law.jsonl
models/dense/model.json models/dense/mixing.json models/dense/usual.json models/dense/experts/law.json
models/dense/clusterer/clusterer.json models/dense/clusterer/routing.json branches/btm/law/model.json
branches/btm/law/experts/law.json clusters/k2/clusterer.json clusters/k2/terms.parquet
clusters/k2/assigned/law.train.parquet clusters/k2/shards/c00/train.json routing/k2/document/law.dev.parquet
scores/dense/law.dev/law.parquet scores/dense/law.test/law.parquet scores/dense/law.dev/tokens.parquet
evaluations/law.parquet evaluations/law.priors.parquet evaluations/law.differences.parquet
evaluations/law.posteriors.parquet evaluations/law.audit.parquet results.parquet priors.parquet differences.parquet
posteriors.parquet audit.parquet suites.parquet tasks.parquet task_weights.parquet examples/topics.parquet
tasks/dense/topics.parquet harness/documents.parquet harness/models/dense.parquet harness/contamination/law.parquet
seeds/dense/step-00000010/manifest.json 0a/step-00000010/manifest.json
finished-0a/done.json
"""
PLACES = LISTED.split()
# Another domain, split, part, model, source, method, clustering, context, rate, task, step, training.
SWAPS = "law:news train:test dev:test 0000:0001 /dense:/demix pile:wiki btm:cbtm k2:k4 c00:c01 /document:/block"
SWAPS += " 0.1:0.2 topics:halves 00010:00020 0a:1b"
OTHER = dict(pair.split(":") for pair in SWAPS.split())
WRITE = {
    ".json": lambda path, name: write_json(path, {"value": name}),
    ".jsonl": lambda path, name: write_json_lines(path, [{"value": name}]),
    ".parquet": lambda path, name: write_parquet(pa.table({"value": [name]}), path),
}
READ = {".json": read_json, ".jsonl": read_json_lines, ".parquet": read_parquet}


@contextmanager
def misplaced(subject: str, place: str) -> Iterator[None]:
    """Expects that the file `subject` is refused for it was written as `place`."""
    with pytest.raises(MisplacedError) as told:
        yield
    assert told.value.subject.endswith(f"/{subject}")
    assert place in told.value.cause


def swap(one: Path, other: Path) -> None:
    aside = one.with_name(".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


@pytest.mark.parametrize("name", PLACES)
def test_a_file_in_the_place_of_another_one_is_refused(name: str, tmp_path: Path) -> None:
    run, suffix = tmp_path / "results" / "old", Path(name).suffix
    others = {name.replace(part, other) for part, other in OTHER.items() if part in name}
    others |= {place for place in PLACES if Path(place).suffix == suffix and place != name}
    for model in ("demix", "dense"):
        write_json_lines(run / "metrics" / f"{model}.jsonl", [])
    assert len(others) > 1
    for made in ("", ".made.7.partial"):
        assert {place_of((run / place).parent / made / Path(place).name) for place in others} == others
    WRITE[suffix](run / name, name)
    for place in others:
        (run / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(run / name, run / place)
        with misplaced(place, name):
            READ[suffix](run / place)
    run.rename(tmp_path / "archived")
    assert name in str(READ[suffix](tmp_path / "archived" / name))
    # Elsewhere a file may be anything.
    READ[suffix](shutil.copy(tmp_path / "archived" / name, tmp_path / f"free{suffix}"))


@pytest.mark.parametrize("name", ["sweep", "metrics", "corpus", "experts", "models", "evaluations", "scores"])
def test_a_domain_may_be_called_like_a_folder(name: str) -> None:
    for split in ("train", "dev"):
        assert place_of(f"results/x/tokens/{name}/{split}.json") == f"tokens/{name}/{split}.json"
        assert place_of(f"results/x/corpus/{name}/{split}.parquet") == f"corpus/{name}/{split}.parquet"
    assert place_of(f"results/x/scores/{name}/{name}.dev/{name}.parquet") == f"scores/{name}/{name}.dev/{name}.parquet"
    assert place_of(f"results/x/evaluations/{name}.priors.parquet") == f"evaluations/{name}.priors.parquet"


def test_the_place_in_json_lines_is_sealed(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "demix.jsonl"
    write_json_lines(path, [{"step": 1}])
    path.write_text(path.read_text().replace("metrics/demix", "metrics/dense"))
    with refused("demix.jsonl"):
        read_json_lines(path)


@pytest.mark.parametrize("path", ["tokens/law/dev.json", "config.json"])
def test_a_file_without_a_place_is_read(path: str, tmp_path: Path) -> None:
    refuse_misplaced(tmp_path / path, None)
    with pytest.raises(ValueError, match="place is taken"):
        write_json(tmp_path / path, {"place": "here"})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two models of equal shapes."""
    run = tmp_path / "run"
    for seed, name in enumerate(("demix", "other")):
        write_model(run / "models" / name, seed=seed)
        write_json_lines(run / "metrics" / f"{name}.jsonl", [])
    return run


@pytest.mark.parametrize("copied", [False, True])
def test_experts_of_a_model_cannot_be_swapped(copied: bool, run: Path, tmp_path: Path) -> None:
    model = run / "models" / "demix"
    if copied:
        model = shutil.copytree(model, tmp_path / "elsewhere")
    for kind in ("json", "safetensors"):
        swap(*(model / "experts" / f"{name}.{kind}" for name in ("law", "news")))
    with refused("experts/law.json"):
        load_model(model, ("law",))
    assert expert_fault(model, "law") is not None


def test_copied_and_merged_models_stand_on_their_own(run: Path, tmp_path: Path) -> None:
    model = run / "models" / "demix"
    shared = model / "shared.safetensors"
    for place in (tmp_path / "mine", tmp_path / "models" / "mine", run / "models" / "mine"):
        copy = shutil.copytree(model, place)
        assert load_model(copy).experts == expert_names(model)
        assert add_expert(copy, model / "experts" / "law.safetensors", "again") == "again"
        assert load_model(copy, ("again",)).experts == ("again",)
        merged = place.with_name("merged")
        merge_experts(copy, {"law": 0.5, "news": 0.5}, merged)
        shutil.copytree(merged, place.with_name("merged-again"))
        assert load_model(place.with_name("merged-again")).experts == ("dense",)
    assert shared.exists()


def test_the_state_of_another_training_is_neither_resumed_nor_deleted(tmp_path: Path) -> None:
    for name in ("dense", "dense_unbalanced"):
        for step in (1, 2):
            state = State(step, {"a": torch.full((2,), float(step))}, {}, [])
            save_state(tmp_path / name / f"{name}-settings", state, World(), keep=2)
    ours, theirs = (tmp_path / name / f"{name}-settings" / "step-00000002" for name in ("dense", "dense_unbalanced"))
    assert newest_state(ours.parent, (), World()).step == 2
    swap(ours, theirs)
    with misplaced("manifest.json", "dense_unbalanced-settings/step-00000002"):
        newest_state(ours.parent, (), World())
    assert ours.exists()
    swap(ours, theirs)
    swap(ours, ours.with_name("step-00000001"))
    with misplaced("manifest.json", "dense-settings/step-00000001"):
        newest_state(ours.parent, (), World())


def test_what_a_slurm_job_leaves_says_where_it_was_put(tmp_path: Path) -> None:
    run = tmp_path / "results" / "tiny"
    outputs = {"--output": run / "models" / "dense", "--metrics": run / "metrics" / "dense.jsonl"}
    job = TrainingJob((), "0a", outputs, 1, 1, run / "checkpoints" / "dense", 1)
    write_model(job.finished / "output", ("dense",))
    write_json_lines(job.finished / "metrics", [{"step": 1, "loss": float("nan")}])
    collect(job)
    assert load_model(run / "models" / "dense").experts == ("dense",)
    (row,) = read_json_lines(run / "metrics" / "dense.jsonl")
    assert row["step"] == 1
    write_json_lines(run / "metrics" / "other.jsonl", [])
    (run / "models" / "dense").rename(run / "models" / "other")
    with misplaced("models/other/model.json", "models/dense/"):
        load_model(run / "models" / "other")
    shutil.copy(run / "metrics" / "dense.jsonl", run / "metrics" / "other.jsonl")
    with misplaced("metrics/other.jsonl", "metrics/dense.jsonl"):
        read_json_lines(run / "metrics" / "other.jsonl")
