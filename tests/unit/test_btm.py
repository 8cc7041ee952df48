"""Branch-Train-Merge: experts that are whole models, each branched from a dense training and trained by itself."""

import copy
import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from demix.errors import StoppedError
from demix.files import read_json, read_json_lines, write_json
from demix.model.checkpoint import describe, load_experts, load_model
from demix.model.experts import add_expert
from demix.model.formats import FORMATS
from demix.run.check import completed_run
from demix.run.models import Model
from demix.run.rules import RunRules
from demix.train.batches import balanced_batches
from demix.train.in_turn import job_folder
from demix.train.join import join_branches, join_metrics
from support.cli import demix, said
from support.errors import refused
from support.plain_training import adamw, plain_steps, rates
from support.tokens import TRAINING
from support.training import TRAIN, dense_with_seeds, opened, shard_paths, stop_at, train_into

STEPS, SEED = 24, 10
EXACT = dataclasses.replace(TRAIN, precision="fp64")
SHORT = dataclasses.replace(TRAIN, tokens=32 * 2 * 3 * 12)
TINY = yaml.safe_load((Path(__file__).parents[1] / "workflow" / "tiny.yaml").read_text())


def branch(run: Path, tokens: Path, name: str, step: int = SEED, into: str = "btm", **more: Any) -> Path:
    """The training of one expert from the dense state after `step` updates."""
    training = more.pop("training", EXACT)
    state, shards = run / "seeds" / "dense" / f"step-{step:08d}", shard_paths(tokens, [name])
    return train_into(run / into / name, "branched", shards, training, branch=state, share=3, **more)


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, its states after 10 and all steps, and three experts that go on from the first, joined."""
    folder = tmp_path_factory.mktemp("run")
    dense_with_seeds(folder, shard_paths(tokens), [SEED, STEPS], EXACT)
    branches = [branch(folder, tokens, name) for name in TRAINING]
    join_branches([path / "model" for path in branches], folder / "joined")
    join_metrics([path / "metrics.jsonl" for path in branches], folder / "joined.jsonl")
    return folder


@pytest.mark.parametrize("schedule", ["continue", "restart"])
def test_an_expert_is_that_of_a_loop_in_transformers(run: Path, tokens: Path, schedule: str) -> None:
    restart, name = schedule == "restart", TRAINING[1]
    if restart:
        plain = dataclasses.replace(EXACT, warmup=0.0, learning_rate=2e-3)
        branch(run, tokens, name, into="restarted", training=plain, schedule="restart")
    sizes = load_model(run / "model").architecture
    config = GPT2Config(
        vocab_size=400,
        n_positions=sizes.context,
        n_embd=sizes.width,
        n_layer=sizes.layers,
        n_head=sizes.heads,
        activation_function=sizes.activation,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    model = GPT2LMHeadModel(config).double()
    optimizer = adamw(model)
    folder = run / "seeds" / "dense" / f"step-{SEED:08d}"
    state = load_file(folder / "shared.safetensors") | load_file(folder / "expert-dense.safetensors")
    rows = FORMATS["gpt2"].tensors(sizes, {name.partition("/")[2] for name in state})
    names = [(row.ours, model.get_parameter(row.theirs[0]), row.change) for row in rows]
    assert len(names) == 28
    with torch.no_grad():
        for ours, parameter, turned in names:
            kept = {key: state[f"{key}/{ours}"] for key in ("parameter", "optimizer/exp_avg", "optimizer/exp_avg_sq")}
            value, *moments = (turned(tensor, sizes) for tensor in kept.values())
            parameter.copy_(value)
            if restart:
                continue
            first, second = (moment.clone() for moment in moments)
            optimizer.state[parameter] = {"step": torch.tensor(float(SEED)), "exp_avg": first, "exp_avg_sq": second}
    batches = balanced_batches(opened(tokens)[1:2], [name], 2, 32, seed=1)
    own, of_parent = rates(STEPS - SEED, 2e-3, 0), rates(STEPS, EXACT.learning_rate, EXACT.warmup)[SEED:]
    of_steps = dict(enumerate(own if restart else of_parent, start=SEED))
    list(plain_steps(model, optimizer, batches, of_steps, logits_of=lambda batch: model(batch.inputs[0]).logits))
    expert = dict(load_model(run / ("restarted" if restart else "btm") / name / "model").named_parameters())
    for ours, parameter, turned in names:
        own = expert[ours][0] if ".feedforward." in ours else expert[ours]
        torch.testing.assert_close(own, turned(parameter, sizes), rtol=0, atol=1e-9)


def test_a_seed_of_all_tokens_is_the_dense_model(run: Path, tokens: Path) -> None:
    every = branch(run, tokens, TRAINING[0], STEPS, into="all")
    expert, dense = (load_model(path / "model").state_dict() for path in (every, run))
    assert expert.keys() == dense.keys()
    assert all(torch.equal(expert[name], dense[name]) for name in dense)


def test_the_joined_model_has_the_experts_and_counts_the_seed_once(run: Path) -> None:
    joined = run / "joined"
    for name, whole in zip(TRAINING, load_experts(joined, TRAINING), strict=True):
        alone = load_model(run / "btm" / name / "model").state_dict()
        assert all(torch.equal(tensor, alone[key]) for key, tensor in whole.state_dict().items())
    step_tokens = 3 * 2 * 32
    counts = {"steps": STEPS, "tokens": STEPS * step_tokens, "shared_parameters": 0}
    counts |= {"tokens_seed": SEED * step_tokens, "tokens_branch": (STEPS - SEED) * step_tokens}
    about = describe(joined)
    assert {key: about[key] for key in counts} == counts
    assert about["data_sha256"].keys() == {*TRAINING}
    assert read_json(joined / "experts" / f"{TRAINING[0]}.json")["tokens"] == (SEED * 3 + STEPS - SEED) * 2 * 32
    rows = read_json_lines(run / "joined.jsonl")
    parts = [read_json_lines(run / "btm" / name / "metrics.jsonl") for name in TRAINING]
    assert [row["step"] for row in rows] == list(range(SEED, STEPS + 1))
    for row, *several in zip(rows[1:], *(part[1:] for part in parts), strict=True):
        assert row["tokens"] == row["step"] * step_tokens
        assert row["loss"] == pytest.approx(sum(one["loss"] for one in several) / 3)
        assert {key for key in row if key.startswith("loss/")} == {f"loss/{name}" for name in TRAINING}
    assert said(["experts", "verify", str(joined)]) is None


def test_a_merged_model_counts_each_seed_once(run: Path, tokens: Path, tmp_path: Path) -> None:
    """In the model's description, too, since whole models share nothing. Experts without a weight count nothing."""
    model, seed, own = tmp_path / "btm", SEED * 3 * 64, (STEPS - SEED) * 64
    shutil.copytree(run / "joined", model)
    first, second, third = TRAINING
    late = branch(run, tokens, first, STEPS, into="late")
    add_expert(model, late / "model" / "experts" / f"{first}.safetensors", "late")

    def tokens_of(*names: str) -> int:
        weights = ",".join([*(f"{name}={1 / len(names)!r}" for name in names), *(f"{first}=0",) * (first not in names)])
        output = tmp_path / "-".join(names)
        assert said(["merge", str(model), "--weights", weights, "--output", str(output)]) is None
        about, lineage = describe(output), read_json(output / "experts" / "dense.json")
        assert about["tokens"] == lineage["tokens"] == about["tokens_seed"] + about["tokens_branch"]
        assert about["tokens_seed"] == sum(lineage["seeds"].values())
        assert about["data_sha256"] == lineage["data_sha256"]
        return int(about["tokens"])

    assert tokens_of(first, second, third) == seed + 3 * own == describe(run / "joined")["tokens"]
    assert tokens_of(second, third) == seed + 2 * own
    of_late = STEPS * 3 * 64
    assert tokens_of(first, "late") == seed + own + of_late, "of another seed"
    add_expert(model, tmp_path / f"{first}-late" / "experts" / "dense.safetensors", "both")
    assert tokens_of("both", third) == seed + of_late + 2 * own, "an average of averages"


def test_branches_that_do_not_belong_together_are_refused(run: Path, tmp_path: Path) -> None:
    one, two = (run / "btm" / name / "model" for name in TRAINING[:2])
    with refused(one):
        join_branches([one, one], tmp_path / "model")
    other = tmp_path / "other" / "model.json"
    about = {key: value for key, value in describe(two).items() if key != "place"}
    other.parent.mkdir()
    write_json(other, about | {"steps": 9})
    with refused(other):
        join_branches([one, other.parent], tmp_path / "model")
    assert not (tmp_path / "model").exists()


def command(tokens: Path, folder: Path, *experts: str) -> list[str]:
    """Train these experts by one job, below `folder`."""
    places = {"output": "branches", "metrics": "metrics", "checkpoints": "checkpoints"}
    options = [word for key, name in places.items() for word in (f"--{key}", str(folder / name))]
    settings = json.dumps(dataclasses.asdict(SHORT))
    shards = map(str, shard_paths(tokens))
    return ["train", "branched", *shards, "--settings", settings, "--experts", ",".join(experts), *options]


@pytest.mark.parametrize("again", [[TRAINING], [(name,) for name in TRAINING]], ids=["one job", "a job for each"])
def test_experts_of_one_job_are_those_of_many(
    again: list[tuple[str, ...]], tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order, and after the job was stopped."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    for name in reversed(TRAINING):
        assert said(command(tokens, alone, name)) is None
    drawn = stop_at(monkeypatch, {7}, TRAINING[1:2])
    lost = demix(*command(tokens, together, *TRAINING))
    assert isinstance(lost.exception, StoppedError)
    assert not list((together / "branches").glob("*")), "Snakemake would delete them"
    assert not list((together / "metrics").glob("*"))
    assert {names for names, _ in drawn} == {(name,) for name in TRAINING[:2]}
    drawn.clear()
    for experts in again:
        assert said(command(tokens, together, *experts)) is None
    # The lost one goes on from its own state after seven updates, and the one before it is not trained again.
    counts = [sum(names == (name,) for names, _ in drawn) for name in TRAINING]
    assert counts == [0, 12 - 7, 12]
    for name in TRAINING:
        files = [
            {path.relative_to(folder): path.read_bytes() for path in (folder / "branches" / name).rglob("*.*")}
            for folder in (alone, together)
        ]
        assert files[0] == files[1] != {}
        losses = [
            [(row["step"], row["loss"], row["gradient_norm"]) for row in read_json_lines(folder / f"{name}.jsonl")]
            for folder in (alone / "metrics", together / "metrics")
        ]
        assert losses[0] == losses[1] != []
    assert not list((together / "checkpoints").rglob("*.safetensors"))


def test_the_job_tells_slurm_when_all_are_written(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank of a SLURM job has WORLD_SIZE, and outputs below the folder of `done.json`."""
    done = tmp_path / "done.json"
    for name, value in (("WORLD_SIZE", "1"), ("RANK", "0"), ("MASTER_ADDR", "here"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DEMIX_DONE", str(done))
    assert said(command(tokens, tmp_path, *TRAINING[:2])) is None
    told = read_json(done)["files"]
    for name in TRAINING[:2]:
        assert {f"branches/{name}/model.json", f"metrics/{name}.jsonl"} <= told.keys()
    assert os.environ["DEMIX_DONE"] == str(done)
    assert len({job_folder(Path("c"), names) for names in (["a"], ["a", "b"], ["b", "c"])}) == 3


BTM = {"kind": "branched", "parent": "dense", "seed_tokens": 6000}


def planned(**sections: Any) -> RunRules:
    return RunRules(completed_run(copy.deepcopy(TINY) | sections))


def entry(one: RunRules, name: str) -> Model:
    return next(model for model in one.run.trained if model.name == name)


def test_the_number_of_experts_a_job_changes_nothing_that_reruns_a_job() -> None:
    one, two = planned(models={"btm": BTM}), planned(models={"btm": BTM | {"experts_per_job": 2}})
    model = entry(two, "btm")
    assert [[part.part for part in job] for job in entry(one, "btm").jobs] == [[name] for name in model.domains]
    assert [[part.part for part in job] for job in model.jobs] == [[*model.domains[:2]], [model.domains[2]]]
    for told in (RunRules.training_settings, RunRules.beginning, RunRules.train_inputs, RunRules.seed_of):
        assert told(one, entry(one, "btm")) == told(two, model)


def test_a_model_without_a_domain_has_its_own_training_of_the_replacement_alone() -> None:
    removal = {"retrain_without": ["licenses"], "replacement": "fantasy", "model": "btm"}
    model = entry(planned(models={"btm": BTM}, removal=removal), "without-licenses")
    (job,) = model.jobs
    assert [part.folder for part in job] == ["branches/without-licenses/fantasy"]
    others = {"branches/btm/parliament", "branches/btm/scripture", "branches/without-licenses/fantasy"}
    assert {part.folder for part in model.parts} == others
