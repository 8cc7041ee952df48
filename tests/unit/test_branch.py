"""A seed phase: a DEMix model that goes on from a state of the dense training."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from demix.config.training import fingerprinted
from demix.errors import DemixError, StoppedError
from demix.files import digest, read_json, read_json_lines, write_json
from demix.model.checkpoint import describe, expert_lineage, load_model
from demix.model.description import tokens_learned
from demix.model.gpt import GPT
from demix.model.merge import merge_experts
from demix.train import stage
from demix.train.batches import balanced_batches
from demix.train.branch import branched
from demix.train.stage import ModelTraining, take_seed
from demix.train.state import State
from support.cli import demix, said
from support.plain_training import adamw, plain_steps, rates
from support.tokens import TRAINING
from support.training import TRAIN, losses, opened, shard_paths, stop_at, train_model

# A step of TRAIN is 192 tokens, and there are 24.
STEPS = 24


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, what it has kept as seeds after 10 and after all steps, and DEMix from scratch."""
    folder = tmp_path_factory.mktemp("run")
    for kind, keep in (("dense", (10, STEPS)), ("demix", ())):
        train_into(folder, kind, kind, tokens, keep=keep)
    for step in (10, STEPS):
        kept = ModelTraining("dense", TRAIN, shard_paths(tokens), until=step)
        assert take_seed(kept, folder / "checkpoints" / "dense", seed(folder, step))
    assert not list((folder / "checkpoints" / "dense").iterdir()), "what was kept is moved"
    return folder


def seed(folder: Path, step: int) -> Path:
    return folder / "seeds" / "dense" / f"step-{step:08d}"


def train_into(
    folder: Path, name: str, kind: str, tokens: Path, training: stage.Training = TRAIN, **more: object
) -> None:
    places = folder / "models" / name, folder / "metrics" / f"{name}.jsonl", folder / "checkpoints" / name
    train_model(kind, training, shard_paths(tokens), *places, **more)


def weights(folder: Path, name: str) -> dict[str, bytes]:
    directory = folder / "models" / name
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*.safetensors")}


def test_a_seed_of_all_tokens_is_the_dense_model_in_every_expert(run: Path, tokens: Path) -> None:
    train_into(run, "all", "demix", tokens, branch=seed(run, STEPS))
    dense = weights(run, "dense")
    assert weights(run, "all") == {"shared.safetensors": dense["shared.safetensors"]} | {
        f"experts/{name}.safetensors": dense["experts/dense.safetensors"] for name in TRAINING
    }
    assert [row["branched_from"] for row in read_json_lines(run / "metrics" / "all.jsonl")] == ["dense"]


def test_a_seed_of_no_tokens_is_demix_from_scratch(
    run: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dense model's state before its first step."""
    begun = GPT(load_model(run / "models" / "dense").architecture, 400, ("dense",)).initialise(1)
    shared, own = begun.parted({f"parameter/{name}": p.detach() for name, p in begun.named_parameters()})
    none = State(0, shared, own, [])
    monkeypatch.setattr(stage, "branched", lambda state, *about: branched(none, *about))
    train_into(tmp_path, "none", "demix", tokens, branch=seed(run, 10))
    assert weights(tmp_path, "none") == weights(run, "demix")


def test_a_branch_is_the_obvious_one(run: Path, tokens: Path, tmp_path: Path) -> None:
    """Against a plain loop, from the dense model's own files after ten steps."""
    train_into(tmp_path, "half", "demix", tokens, branch=seed(run, 10))
    folder = seed(run, 10)
    shared, own = load_file(folder / "shared.safetensors"), load_file(folder / "expert-dense.safetensors")
    model = GPT(load_model(run / "models" / "dense").architecture, 400, TRAINING)
    optimizer = adamw(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_own = f"parameter/{name}" in own
            tensors, copies = (own, 3) if is_own else (shared, 1)
            state = {"step": torch.tensor(10.0)}
            for key in ("exp_avg", "exp_avg_sq"):
                moment = tensors[f"optimizer/{key}/{name}"] / copies
                state[key] = moment.expand(3, *moment.shape).clone() if is_own else moment
            parameter.copy_(tensors[f"parameter/{name}"])
            optimizer.state[parameter] = state
    batches = balanced_batches(opened(tokens), TRAINING, 2, 32, seed=1)
    rows = [row for row in read_json_lines(tmp_path / "metrics" / "half.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(11, STEPS + 1))
    of_steps = dict(list(enumerate(rates(STEPS, TRAIN.learning_rate, TRAIN.warmup)))[10:])
    for row, step in zip(rows, plain_steps(model, optimizer, batches, of_steps), strict=True):
        assert row["loss"] == pytest.approx(step.loss, rel=1e-5)
        assert row["tokens"] == row["step"] * 192
    trained = load_model(tmp_path / "models" / "half", TRAINING)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained.get_parameter(name), parameter, rtol=0, atol=2e-5)


def test_its_record_says_where_it_comes_from(run: Path, tokens: Path, tmp_path: Path) -> None:
    train_into(tmp_path, "half", "demix", tokens, branch=seed(run, 10))
    description, manifest = describe(tmp_path / "models" / "half"), read_json(seed(run, 10) / "manifest.json")
    sha256 = digest(manifest["sha256"])
    assert description["parent"] == {"model": "dense", "step": 10, "tokens": 1920, "state_sha256": sha256}
    assert (description["tokens"], description["tokens_seed"], description["tokens_branch"]) == (4608, 1920, 2688)
    for name in TRAINING:
        lineage = expert_lineage(tmp_path / "models" / "half", name)
        assert (lineage["parent"], lineage["tokens"], lineage["steps"]) == ("dense", 1920 + 2688 // 3, STEPS)
        assert lineage["seeds"] == {sha256: 1920}
        assert lineage["data_sha256"] == manifest["data_sha256"], "the seed has read all domains"
    merge_experts(tmp_path / "models" / "half", dict.fromkeys(TRAINING, 1 / 3), tmp_path / "merged")
    assert expert_lineage(tmp_path / "merged", "dense")["tokens"] == 4608
    assert describe(run / "models" / "demix").get("parent") is None
    assert "seeds" not in expert_lineage(run / "models" / "demix", TRAINING[0])


def test_a_stopped_branch_resumes_to_the_bit(
    run: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_into(tmp_path, "whole", "demix", tokens, branch=seed(run, 10))

    # The first before any update of its own, the others between checkpoints.
    stops = {10, 13, 17}
    stop_at(monkeypatch, stops)
    for _ in range(3):
        with pytest.raises(StoppedError):
            train_into(tmp_path, "again", "demix", tokens, branch=seed(run, 10))
    # Neither another seed nor a training from scratch goes on with these checkpoints.
    for branch, same in ((seed(run, STEPS), "dense"), (None, "demix")):
        train_into(tmp_path, "again", "demix", tokens, branch=branch)
        found = weights(tmp_path, "again")["shared.safetensors"]
        assert found == weights(run, same)["shared.safetensors"]
    train_into(tmp_path, "again", "demix", tokens, branch=seed(run, 10))
    assert not stops
    assert weights(tmp_path, "again") == weights(tmp_path, "whole")
    found = [read_json_lines(tmp_path / "metrics" / f"{name}.jsonl") for name in ("again", "whole")]
    assert [row.get("loss") for row in found[0]] == [row.get("loss") for row in found[1]]
    assert found[0][0]["branched_from"] == "dense"


def test_moments_of_experts_are_an_eth_of_the_dense_ones() -> None:
    tensors = {f"optimizer/{key}/blocks.0.feedforward.up": torch.full((2,), 8.0) for key in ("exp_avg", "exp_avg_sq")}
    tensors |= {"parameter/blocks.0.feedforward.up": torch.full((2,), 8.0)}
    shared = {"optimizer/exp_avg/x": torch.ones(1), "optimizer/step/blocks.0.feedforward.up": torch.tensor(7.0)}
    state = branched(State(7, shared, {"dense": tensors}, [{"step": 7}]), ("a", "b", "c", "d"))
    assert (state.step, state.shared, state.metrics) == (7, shared, [{"step": 7}])
    assert [*state.experts] == ["a", "b", "c", "d"]
    for own in state.experts.values():
        assert [own[name].tolist() for name in tensors] == [[2.0, 2.0], [2.0, 2.0], [8.0, 8.0]]


def command(tokens: Path, folder: Path, step: int) -> list[str]:
    return [
        "seed", "dense", *map(str, shard_paths(tokens)), "--settings", json.dumps(dataclasses.asdict(TRAIN)),
        "--step", str(step), "--output", str(seed(folder, step)), "--kept", str(folder / "checkpoints" / "dense"),
        "--checkpoints", str(folder / "checkpoints" / "again"),
    ]  # fmt: skip


def test_a_state_that_was_not_kept_is_trained_again_and_the_command_says_so(
    run: Path, tokens: Path, tmp_path: Path
) -> None:
    train_into(tmp_path, "dense", "dense", tokens)
    before = weights(tmp_path, "dense")
    done = demix(*command(tokens, tmp_path, 10))
    assert done.exit_code == 0, done.exception
    assert "dense: training it again to step 10, after which it kept no state" in done.stdout
    for name in ("manifest.json", "shared.safetensors", "expert-dense.safetensors"):
        assert (seed(tmp_path, 10) / name).read_bytes() == (seed(run, 10) / name).read_bytes()
    assert weights(tmp_path, "dense") == before
    assert not list((tmp_path / "checkpoints").rglob("step-*"))
    assert "--step 99: is beyond the 24 updates" in said(command(tokens, tmp_path, 99))


def test_a_damaged_state_is_not_moved(run: Path, tokens: Path, tmp_path: Path) -> None:
    train_into(tmp_path, "dense", "dense", tokens, keep=(10,))
    (kept,) = (tmp_path / "checkpoints" / "dense").glob("*/step-00000010/shared.safetensors")
    kept.write_bytes(kept.read_bytes()[:-1] + b"x")
    done = demix(*command(tokens, tmp_path, 10))
    assert "(differs from its recorded sha256)" in done.stdout
    assert (seed(tmp_path, 10) / "shared.safetensors").read_bytes() == (
        seed(run, 10) / "shared.safetensors"
    ).read_bytes()


def test_seeds_that_do_not_fit_are_refused(run: Path, tokens: Path, tmp_path: Path) -> None:
    for key, value in (("learning_rate", 1e-3), ("tokens", 9600), ("sequences", 4), ("warmup", 0.2), ("seed", 2)):
        other = dataclasses.replace(TRAIN, **{key: value})
        told = ("sequences of a step", 4 * len(TRAINING)) if key == "sequences" else (key, value)
        with pytest.raises(
            DemixError, match="step-00000010: is of a training with {} .*, and this one has {}".format(*told)
        ):
            train_into(tmp_path, "other", "demix", tokens, other, branch=seed(run, 10))
    assert not (tmp_path / "models").exists()
    # What time and memory alone depend on, and how often dev is measured, may differ.
    other = dataclasses.replace(TRAIN, checkpoint_every=3, micro_sequences=1, dev_blocks=1)
    assert fingerprinted(other) != fingerprinted(TRAIN)
    assert ModelTraining("demix", other, shard_paths(tokens), branch=seed(run, 10)).seed is not None

    shutil.copytree(seed(run, 10), moved := tmp_path / "seeds" / "dense" / "step-00000011")
    with pytest.raises(DemixError, match="is another file of the run"):
        train_into(tmp_path, "other", "demix", tokens, branch=moved)
    shutil.copytree(seed(run, 10), damaged := seed(tmp_path, 10))
    (damaged / "expert-dense.safetensors").write_bytes(b"x" * 99)
    with pytest.raises(DemixError, match=r"expert-dense\.safetensors: differs from its recorded sha256"):
        train_into(tmp_path, "other", "demix", tokens, branch=damaged)
    write_json(damaged / "manifest.json", {"step": -1})
    with pytest.raises(DemixError, match=r"manifest\.json: does not describe a seed"):
        train_into(tmp_path, "other", "demix", tokens, branch=damaged)


def test_the_losses_go_on_where_the_dense_ones_were(run: Path, tokens: Path, tmp_path: Path) -> None:
    """Before its first update a branch predicts as the dense model did, on the same sequences of that step."""
    train_into(tmp_path, "half", "demix", tokens, branch=seed(run, 10))
    dense = losses(run / "metrics" / "dense.jsonl")
    ours = [row for row in read_json_lines(tmp_path / "metrics" / "half.jsonl") if row["step"] == 11]
    assert dense[10][0] == 11
    assert ours[0]["loss"] == pytest.approx(dense[10][1], rel=1e-6)
    assert read_json_lines(tmp_path / "metrics" / "half.jsonl")[1]["loss/licenses"] > 0


def test_a_model_in_a_folder_gives_its_parameters_and_nothing_else(run: Path, tokens: Path, tmp_path: Path) -> None:
    """As `demix import` writes them: each rate, step and batch is that of a training from scratch."""
    shutil.copytree(run / "models" / "dense", folder := tmp_path / "my model")
    train_into(tmp_path, "mine", "demix", tokens, branch=folder)
    rows = read_json_lines(tmp_path / "metrics" / "mine.jsonl")
    scratch = read_json_lines(run / "metrics" / "demix.jsonl")
    for key in ("step", "tokens", "learning_rate"):
        assert [row[key] for row in rows] == [row[key] for row in scratch]
    batch, dense = balanced_batches(opened(tokens), TRAINING, 2, 32, seed=1).draw(0), load_model(folder)
    with torch.no_grad():
        loss = -dense.log_probabilities(
            dense(batch.inputs.flatten(0, 1)[None]), batch.targets.flatten(0, 1)[None]
        ).mean()
    assert rows[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert rows[-1]["loss"] < scratch[-1]["loss"] - 0.1
    description = describe(tmp_path / "models" / "mine")
    assert (description["parent"]["model"], description["parent"]["step"]) == ("my_model", 0)
    assert (description["tokens_seed"], description["tokens_branch"]) == (0, 4608)
    assert tokens_learned(description) == 2 * 4608

    other = dataclasses.replace(TRAIN, architecture=TRAIN.architecture | {"activation": "gelu_new"})
    with pytest.raises(DemixError, match=r"my model: has the architecture .*; set the section architecture"):
        train_into(tmp_path, "other", "demix", tokens, other, branch=folder)
    write_json(folder / "model.json", {**describe(folder), "tokenizer_sha256": "f" * 64})
    with pytest.raises(DemixError, match="tokenizer"):
        train_into(tmp_path, "other", "demix", tokens, branch=folder)
