"""Branch-Train-Merge: experts that are whole models, each branched from a dense training and trained by itself."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from demix.files import read_json, read_json_lines, write_json
from demix.model.checkpoint import describe, load_experts, load_model
from demix.model.experts import add_expert
from demix.model.formats import FORMATS
from demix.train.batches import balanced_batches
from demix.train.join import join_branches, join_metrics
from demix.train.stage import ModelTraining, Training, take_seed
from support.cli import said
from support.plain_training import adamw, plain_steps, rates
from support.tokens import TRAINING
from support.training import TRAIN, opened, shard_paths, train_model

STEPS, SEED = 24, 10
EXACT = dataclasses.replace(TRAIN, precision="fp64")


def branch(
    run: Path, tokens: Path, name: str, step: int = SEED, into: str = "btm", training: Training = EXACT, **more: str
) -> None:
    state = run / "seeds" / "dense" / f"step-{step:08d}"
    train_model(
        "branched", training, shard_paths(tokens, [name]), run / "branches" / into / name,
        run / "metrics" / into / f"{name}.jsonl", run / "checkpoints" / into / name, branch=state, share=3, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, its states after 10 and all steps, and three experts that go on from the first."""
    folder = tmp_path_factory.mktemp("run")
    kept = folder / "checkpoints" / "dense"
    places = folder / "models" / "dense", folder / "metrics" / "dense.jsonl", kept
    train_model("dense", EXACT, shard_paths(tokens), *places, keep=(SEED, STEPS))
    for step in (SEED, STEPS):
        whole = ModelTraining("dense", EXACT, shard_paths(tokens), until=step)
        assert take_seed(whole, kept, folder / f"seeds/dense/step-{step:08d}")
    for name in TRAINING:
        branch(folder, tokens, name)
    return folder


@pytest.fixture(scope="module")
def joined(run: Path) -> Path:
    join_branches([run / "branches" / "btm" / name for name in TRAINING], run / "models" / "btm")
    join_metrics([run / "metrics" / "btm" / f"{name}.jsonl" for name in TRAINING], run / "metrics" / "btm.jsonl")
    return run / "models" / "btm"


@pytest.mark.parametrize("schedule", ["continue", "restart"])
def test_an_expert_is_that_of_a_loop_in_transformers(run: Path, tokens: Path, schedule: str) -> None:
    restart, name = schedule == "restart", TRAINING[1]
    if restart:
        plain = dataclasses.replace(EXACT, warmup=0.0, learning_rate=2e-3)
        branch(run, tokens, name, into="restarted", training=plain, schedule="restart")
    sizes = load_model(run / "models" / "dense").architecture
    config = GPT2Config(
        vocab_size=400, n_positions=sizes.context, n_embd=sizes.width, n_layer=sizes.layers, n_head=sizes.heads,
        activation_function=sizes.activation, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
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
    expert = dict(load_model(run / "branches" / ("restarted" if restart else "btm") / name).named_parameters())
    for ours, parameter, turned in names:
        own = expert[ours][0] if ".feedforward." in ours else expert[ours]
        torch.testing.assert_close(own, turned(parameter, sizes), rtol=0, atol=1e-9)


def test_the_order_of_the_trainings_changes_no_byte(run: Path, tokens: Path) -> None:
    for name in reversed(TRAINING):
        branch(run, tokens, name, into="again")
    for path in (run / "branches" / "btm").rglob("*.*"):
        other = run / "branches" / "again" / path.relative_to(run / "branches" / "btm")
        if path.suffix == ".safetensors":
            assert path.read_bytes() == other.read_bytes()


def test_a_seed_of_all_tokens_is_the_dense_model(run: Path, tokens: Path) -> None:
    branch(run, tokens, TRAINING[0], STEPS, into="all")
    expert, dense = (load_model(run / place).state_dict() for place in (f"branches/all/{TRAINING[0]}", "models/dense"))
    assert expert.keys() == dense.keys()
    assert all(torch.equal(expert[name], dense[name]) for name in dense)


def test_the_joined_model_has_the_experts_and_counts_the_seed_once(run: Path, joined: Path) -> None:
    trunks = load_experts(joined, TRAINING)
    for name, trunk in zip(TRAINING, trunks, strict=True):
        alone = load_model(run / "branches" / "btm" / name).state_dict()
        assert all(torch.equal(tensor, alone[key]) for key, tensor in trunk.state_dict().items())
    step_tokens = 3 * 2 * 32
    about = describe(joined)
    counts = {key: about[key] for key in ("steps", "tokens", "tokens_seed", "tokens_branch", "shared_parameters")}
    assert counts == {
        "steps": STEPS, "tokens": STEPS * step_tokens, "tokens_seed": SEED * step_tokens,
        "tokens_branch": (STEPS - SEED) * step_tokens, "shared_parameters": 0,
    }  # fmt: skip
    assert about["data_sha256"].keys() == {*TRAINING}
    assert read_json(joined / "experts" / f"{TRAINING[0]}.json")["tokens"] == (SEED * 3 + STEPS - SEED) * 2 * 32
    rows = read_json_lines(run / "metrics" / "btm.jsonl")
    parts = [read_json_lines(run / "metrics" / "btm" / f"{name}.jsonl") for name in TRAINING]
    assert [row["step"] for row in rows] == list(range(SEED, STEPS + 1))
    for row, *several in zip(rows[1:], *(part[1:] for part in parts), strict=True):
        assert row["tokens"] == row["step"] * step_tokens
        assert row["loss"] == pytest.approx(sum(one["loss"] for one in several) / 3)
        assert {key for key in row if key.startswith("loss/")} == {f"loss/{name}" for name in TRAINING}
    assert said(["experts", "verify", str(joined)]) is None


def test_a_merged_model_counts_each_seed_once(run: Path, joined: Path, tokens: Path, tmp_path: Path) -> None:
    """In the model's description, too, since whole models share nothing. Experts without a weight count nothing."""
    model, seed, own = tmp_path / "btm", SEED * 3 * 64, (STEPS - SEED) * 64
    shutil.copytree(joined, model)
    first, second, third = TRAINING
    branch(run, tokens, first, STEPS, into="late")
    add_expert(model, run / "branches" / "late" / first / "experts" / f"{first}.safetensors", "late")

    def tokens_of(*names: str) -> int:
        weights = ",".join([*(f"{name}={1 / len(names)!r}" for name in names), *(f"{first}=0",) * (first not in names)])
        output = tmp_path / "-".join(names)
        assert said(["merge", str(model), "--weights", weights, "--output", str(output)]) is None
        about, lineage = describe(output), read_json(output / "experts" / "dense.json")
        assert about["tokens"] == lineage["tokens"] == about["tokens_seed"] + about["tokens_branch"]
        assert about["tokens_seed"] == sum(lineage["seeds"].values())
        assert about["data_sha256"] == lineage["data_sha256"]
        assert f"Together these are {about['tokens']:,} tokens" in (output / "README.md").read_text()
        return int(about["tokens"])

    assert tokens_of(first, second, third) == seed + 3 * own == describe(joined)["tokens"]
    assert tokens_of(second, third) == seed + 2 * own
    late = STEPS * 3 * 64
    assert tokens_of(first, "late") == seed + own + late, "of another seed"
    add_expert(model, tmp_path / f"{first}-late" / "experts" / "dense.safetensors", "both")
    assert tokens_of("both", third) == seed + late + 2 * own, "an average of averages"


def test_branches_that_do_not_belong_together_are_refused(run: Path, tmp_path: Path) -> None:
    folders = [str(run / "branches" / "btm" / name) for name in TRAINING]
    metrics = [str(run / "metrics" / "btm" / f"{name}.jsonl") for name in TRAINING]
    output = ["--output", str(tmp_path / "model"), "--metrics", str(tmp_path / "metrics.jsonl")]
    told = said(["join-branches", folders[0], folders[0], "--metrics-of", ",".join(metrics[:2]), *output])
    assert told is not None
    assert f"has an expert {TRAINING[0]}, as a branch before it" in told
    other = tmp_path / "other" / "model.json"
    other.parent.mkdir()
    write_json(
        other, {key: value for key, value in describe(Path(folders[1])).items() if key != "place"} | {"steps": 9}
    )
    told = said(["join-branches", folders[0], str(other.parent), "--metrics-of", ",".join(metrics[:2]), *output])
    assert told is not None
    assert "has steps 9 where" in told
    assert not list(tmp_path.glob("model*"))
