"""Training: the order of data, the schedule, the loop, its precisions, its best state."""

import dataclasses
import itertools
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from demix.config.architecture import Architecture
from demix.data.shards import TokenShard, blocks, tokenize
from demix.errors import DemixError, StoppedError
from demix.files import read_json, read_json_lines, write_json
from demix.model.checkpoint import load_model
from demix.model.gpt import GPT
from demix.model.scoring import log_probabilities
from demix.train import scale, stage
from demix.train.batches import Batch, balanced_batches, mixed_batches, proportional_batches
from demix.train.loop import train
from demix.train.schedule import Optimization
from demix.train.stopping import EarlyStopping
from support.plain_training import adamw, plain_steps, rates
from support.tokens import NOVEL, TRAINING
from support.training import SIZES, TRAIN, opened, shard_paths, train_model


def test_every_block_is_seen_once_an_epoch_and_the_order_depends_on_step_alone(tokens: Path) -> None:
    shards = opened(tokens)
    length, sequences = 32, 3
    batches = balanced_batches(shards, TRAINING, sequences, length, seed=5)
    for d, shard in enumerate(shards):
        cut, targets, mask = blocks(shard, length)
        whole = Counter(tuple(row) for row in np.concatenate([cut, targets], 1)[mask.all(1)].tolist())
        count = sum(whole.values())
        seen: list[tuple[int, ...]] = []
        for step in range(2 * count // sequences + 1):
            batch = batches.draw(step)
            seen += map(tuple, torch.cat([batch.inputs[d], batch.targets[d]], 1).tolist())
        # An epoch is a permutation of the full blocks, and the next one is another.
        first, second = seen[:count], seen[count : 2 * count]
        assert Counter(first) == Counter(second) == whole
        in_text = [tuple(row) for row in np.concatenate([cut, targets], 1)[mask.all(1)].tolist()]
        assert first != second
        assert in_text not in (first, second)
    again = balanced_batches(shards, TRAINING, sequences, length, seed=5)
    assert torch.equal(again.draw(17).inputs, batches.draw(17).inputs)
    assert torch.equal(again.draw(3).inputs, batches.draw(3).inputs)
    assert not torch.equal(
        balanced_batches(shards, TRAINING, sequences, length, seed=6).draw(3).inputs, again.draw(3).inputs
    )
    # The order of one domain does not depend on which other domains there are.
    alone = balanced_batches(shards[1:2], TRAINING[1:2], sequences, length, seed=5)
    assert torch.equal(alone.draw(9).inputs[0], again.draw(9).inputs[1])
    # Nor is it that of another domain of as many blocks.
    renamed = balanced_batches(shards[1:2], TRAINING[:1], sequences, length, seed=5)
    assert not torch.equal(renamed.draw(9).inputs, alone.draw(9).inputs)
    mixed = mixed_batches(shards, TRAINING, sequences, length, seed=5).draw(4)
    assert torch.equal(mixed.inputs[0], again.draw(4).inputs.flatten(0, 1))
    assert mixed.domains[0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_unbalanced_batches_follow_the_sizes_of_the_domains(tokens: Path) -> None:
    shards = opened(tokens)
    small = dataclasses.replace(shards[0], files=(shards[0].read(0, 32 * 10),))
    counts = [len(shard) // 32 for shard in (small, *shards[1:])]
    batches = proportional_batches([small, *shards[1:]], TRAINING, 4, 32, seed=1)
    size = 3 * 4
    drawn = np.concatenate([batches.draw(step).domains[0].numpy() for step in range(sum(counts) // size)])
    assert len(drawn) == sum(counts) // size * size
    found = np.bincount(drawn, minlength=3)
    assert np.abs(found - counts).max() < size  # one epoch but for its last incomplete step
    assert found[0] <= 10


def test_learning_rate_warms_up_and_decays_to_zero() -> None:
    # 0.08 of 30 updates are 2.4: the third warms up too.
    optimization = Optimization(steps=30, learning_rate=3.0, warmup=0.08)
    rates = [optimization.learning_rate_at(step) for step in range(31)]
    assert rates[:3] == pytest.approx([1.0, 2.0, 3.0])
    assert rates[3:] == pytest.approx(np.linspace(3.0, 0.0, 28))


def test_the_loop_is_the_obvious_one(tokens: Path) -> None:
    """Ten steps against a plain loop."""
    shards = opened(tokens)
    batches = balanced_batches(shards, TRAINING, 2, 32, seed=1)
    optimization = Optimization(
        steps=10, learning_rate=3e-3, warmup=0.1, clip=0.5, weight_decay=0.1, precision="fp64", checkpoint_every=1000
    )
    ours = GPT(Architecture(**SIZES), shards[0].vocab_size, TRAINING).initialise(1)
    rows = train(ours, batches, TRAINING, optimization, tokens / "none")

    theirs = GPT(Architecture(**SIZES), shards[0].vocab_size, TRAINING).initialise(1).double()
    of_steps = dict(enumerate(rates(10, 3e-3, 0.1)))
    expected = plain_steps(theirs, adamw(theirs), batches, of_steps, clip=0.5)
    for number, (row, step) in enumerate(zip(rows, expected, strict=True), start=1):
        by_domain = step.losses.mean((1, 2)).tolist()
        assert row["loss"] == pytest.approx(step.loss, rel=1e-9)
        assert [row[f"loss/{domain}"] for domain in TRAINING] == pytest.approx(by_domain, rel=1e-9)
        assert row["gradient_norm"] == pytest.approx(step.norm, rel=1e-9)
        assert row["tokens"] == number * 3 * 2 * 32
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, dict(theirs.named_parameters())[name], rtol=0, atol=1e-9)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1


@pytest.mark.parametrize("kind", ["demix", "dense", "domain_token"])
def test_the_best_checkpoint_on_dev_is_kept(tokens: Path, tmp_path: Path, kind: str) -> None:
    training = dataclasses.replace(TRAIN, learning_rate=0.05, dev_blocks=3, checkpoint_every=3, keep_checkpoints=1)
    paths = [*shard_paths(tokens), *shard_paths(tokens, split="dev")]
    train_model(kind, training, paths, tmp_path / "model", tmp_path / "metrics.jsonl", tmp_path / "checkpoints")
    rows = read_json_lines(tmp_path / "metrics.jsonl")
    measured = {row["step"]: row["dev_loss"] for row in rows if "dev_loss" in row}
    assert list(measured) == [3, 6, 9, 12, 15, 18, 21, 24]
    # The last is the model itself, beside which only a better one is kept.
    last = measured.pop(24)
    best = min(measured, key=measured.__getitem__)
    kept = {int(path.name[5:]): path for path in tmp_path.glob("checkpoints/*/step-*")}
    assert [*kept] == [best] * (measured[best] < last)
    assert (kind != "demix") or kept
    for path in kept.values():
        assert read_json(path / "manifest.json")["dev_loss"] == measured[best]
    for row in rows:
        if "dev_loss" in row:
            assert row["dev_loss"] == pytest.approx(np.mean([row[f"dev_loss/{domain}"] for domain in TRAINING]))
    model = load_model(tmp_path / "model", TRAINING if kind == "demix" else None)
    for number, path in enumerate(shard_paths(tokens, split="dev")):
        shard = TokenShard.open(path)
        table = log_probabilities(model, *blocks(shard, 32, 3 * 32))
        expected = -table[number if len(table) > 1 else 0].mean()
        assert stage.dev_loss(model, shard, 3, TRAINING[number]) == pytest.approx(expected, rel=1e-6)


def trained_rows(tokens: Path, folder: Path, kind: str = "demix", **changes: object) -> list[dict]:
    training = dataclasses.replace(TRAIN, **changes)
    train_model(kind, training, shard_paths(tokens), folder / "model", folder / "metrics.jsonl", folder / "checkpoints")
    return read_json_lines(folder / "metrics.jsonl")


def test_how_a_step_is_computed_does_not_change_it(tokens: Path, tmp_path: Path) -> None:
    plain = trained_rows(tokens, tmp_path / "plain", precision="fp64")
    saving = {"micro_sequences": 1, "checkpoint_activations": True}
    other = trained_rows(tokens, tmp_path / "other", precision="fp64", **saving)
    assert [row["loss"] for row in other] == pytest.approx([row["loss"] for row in plain], rel=1e-12)
    # Coarser types: near, and not the same.
    for precision in ("fp32", "bf16", "fp16"):
        rows = trained_rows(tokens, tmp_path / precision, precision=precision)
        assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in plain], rel=5e-3)
        assert rows != plain
        assert load_model(tmp_path / precision / "model").token_embedding.dtype == torch.float32


@pytest.mark.parametrize("kind", ["demix", "dense"])
def test_the_last_part_of_a_step_may_be_smaller(tokens: Path, tmp_path: Path, kind: str) -> None:
    """Three sequences of each domain, two or, of the dense model's nine, four at a time."""
    settings = {"precision": "fp64", "sequences": 3}
    whole = trained_rows(tokens, tmp_path / "whole", kind, **settings)
    micro = 2 if kind == "demix" else 4
    parts = trained_rows(tokens, tmp_path / "parts", kind, **settings, micro_sequences=micro)
    for key in ("loss", "gradient_norm", *(f"loss/{domain}" for domain in TRAINING)):
        assert [row[key] for row in parts] == pytest.approx([row[key] for row in whole], rel=1e-12)


def test_fp16_skips_updates_that_overflow_and_resumes_to_the_bit(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "FIRST_SCALE", 2.0**36)
    monkeypatch.setattr(scale, "GROW_AFTER", 4)
    whole = trained_rows(tokens, tmp_path / "whole", precision="fp16")
    scales = [row["loss_scale"] for row in whole]
    skipped = [row["gradient_norm"] is None for row in whole]
    assert skipped[:3] == [True] * 3
    assert not all(skipped)
    assert scales[0] == 2.0**35
    for before, after, skip in zip(scales, scales[1:], skipped[1:], strict=False):
        assert after in ([before / 2] if skip else [before, before * 2])
    assert any(after > before for before, after in itertools.pairwise(scales))
    assert whole[-1]["loss"] < whole[0]["loss"]
    # From the last checkpoint but one.
    kept = dataclasses.replace(TRAIN, precision="fp16", keep_checkpoints=100)
    monkeypatch.setattr(stage, "remove_states", lambda *finished: None)
    folder = tmp_path / "resumed"
    places = folder / "model", folder / "metrics.jsonl", folder / "checkpoints"
    train_model("demix", kept, shard_paths(tokens), *places)
    for path in sorted(folder.glob("checkpoints/*/step-*"))[2:]:
        shutil.rmtree(path)
    train_model("demix", kept, shard_paths(tokens), *places)
    again = read_json_lines(folder / "metrics.jsonl")
    keys = ("step", "loss", "gradient_norm", "loss_scale")
    assert [[row[key] for key in keys] for row in again] == [[row[key] for key in keys] for row in whole]


@pytest.mark.parametrize(("dtype", "grows"), [(torch.float16, True), (torch.float32, False), (torch.bfloat16, False)])
def test_the_loss_is_scaled_in_fp16_alone(dtype: torch.dtype, grows: bool) -> None:
    """A factor that grew in other types would end a training of 64,000 updates as one whose gradients overflow."""
    found = scale.LossScale(dtype)
    before = found.factor
    for _ in range(scale.GROW_AFTER):
        found.grow()
    assert found.factor == (2 * before if grows else 1.0)


def test_the_scale_of_the_loss_resumes_wherever_training_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "GROW_AFTER", 3)
    whole, rows = scale.LossScale(torch.float16), []
    for overflows in (1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0):
        whole.shrink() if overflows else whole.grow()
        rows.append(whole.metrics)
        resumed = scale.LossScale(torch.float16)
        resumed.resume(rows)
        assert (resumed.factor, resumed.unscathed) == (whole.factor, whole.unscathed)
    assert {row["loss_scale"] for row in rows} == {2.0**14, 2.0**15}


def test_a_loss_that_is_not_finite_stops_before_the_update(tokens: Path, tmp_path: Path) -> None:
    shards = opened(tokens)
    model = GPT(Architecture(**SIZES), shards[0].vocab_size, TRAINING).initialise(1)
    with torch.no_grad():
        model.blocks[0].feedforward.down_bias[1] = float("nan")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(DemixError, match=r"step 1: the loss of scripture is not finite"):
        train(
            model,
            balanced_batches(shards, TRAINING, 2, 32, 1),
            TRAINING,
            Optimization(steps=5, learning_rate=1e-3, clip=1.0, checkpoint_every=5),
            tmp_path,
        )
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(7.0), before[name].nan_to_num(7.0))


def test_early_stopping_keeps_the_best_parameters(tokens: Path, tmp_path: Path) -> None:
    shards = opened(tokens)
    model = GPT(Architecture(**SIZES), shards[0].vocab_size, TRAINING).initialise(1)
    told = iter([5.0, 4.0, 3.0, 3.5, 3.6, 3.7])
    seen: list[dict] = []

    def evaluate(model: GPT) -> tuple[float, dict[str, float]]:
        seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return next(told), {}

    rows = train(
        model,
        balanced_batches(shards, TRAINING, 2, 32, 1),
        TRAINING,
        Optimization(
            steps=100, learning_rate=1e-3, warmup=0.1, clip=1.0, checkpoint_every=1000,
            stopping=EarlyStopping(every=3, patience=2),
        ),
        tmp_path,
        evaluate=evaluate,
    )  # fmt: skip
    assert [row["step"] for row in rows if "early_stopping_loss" in row] == [0, 3, 6, 9, 12]
    assert max(row["step"] for row in rows) == 12
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, seen[2][name])


def test_a_training_stopped_while_it_waits_for_a_lower_loss_ends_where_it_would_have(
    tokens: Path, tmp_path: Path
) -> None:
    """The evaluations since the lowest loss count through a restart."""
    batches = balanced_batches(opened(tokens), TRAINING, 2, 32, 1)

    def run(folder: Path, stopped_at: int) -> tuple[list[tuple], dict[str, torch.Tensor]]:
        told, stops = iter([5.0, 4.0, 3.0, 3.5, 3.6, 3.7, 2.0, 2.0, 2.0]), [stopped_at]

        def draw(step: int) -> Batch:
            if step in stops:
                stops.remove(step)
                os.kill(os.getpid(), signal.SIGTERM)
            return batches.draw(step)

        optimization = Optimization(
            steps=24, learning_rate=1e-3, warmup=0.1, clip=1.0, checkpoint_every=1000,
            stopping=EarlyStopping(every=3, patience=3),
        )  # fmt: skip
        while True:
            model = GPT(Architecture(**SIZES), 400, TRAINING).initialise(1)
            try:
                rows = train(
                    model, dataclasses.replace(batches, draw=draw), TRAINING, optimization, folder,
                    evaluate=lambda model: (next(told), {}),
                )  # fmt: skip
            except StoppedError:
                continue
            return [(row["step"], row.get("loss"), row.get("early_stopping_loss")) for row in rows], model.state_dict()

    whole, best = run(tmp_path / "whole", 100)
    # The lowest loss is that after 6 updates.
    assert whole[-1] == (15, None, 3.7)
    for step in (8, 13):
        again, model = run(tmp_path / f"stopped{step}", step)
        assert again == whole
        for name, tensor in model.items():
            assert torch.equal(tensor, best[name])


def test_losses_on_dev_change_no_weight_and_leave_no_state(tokens: Path, tmp_path: Path) -> None:
    paths = [*shard_paths(tokens), *shard_paths(tokens, split="dev")]
    for number in (0, 2):
        folder = tmp_path / str(number)
        settings = dataclasses.replace(TRAIN, dev_blocks=number, checkpoint_every=7)
        train_model("demix", settings, paths, folder / "m", folder / "metrics", folder / "checkpoints")
    without, with_dev = (
        {path.name: path.read_bytes() for path in (tmp_path / name / "m").rglob("*.safetensors")} for name in "02"
    )
    assert without == with_dev
    assert len(without) == 1 + len(TRAINING)
    losses = [row["dev_loss"] for row in read_json_lines(tmp_path / "2" / "metrics") if "dev_loss" in row]
    assert len(losses) > 2
    # The finished model is the best, so that no other state needs to stay.
    assert min(losses) == losses[-1]
    assert not [*(tmp_path / "2" / "checkpoints").iterdir()]


def test_text_of_another_tokenizer_is_refused(tokens: Path, tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer.json", read_json(tokens / "tokenizer.json") | {"other": 1}, sort_keys=False)
    other = tmp_path / NOVEL[0] / "train.arrow"
    tokenize(tmp_path / "tokenizer.json", tokens / "corpus" / NOVEL[0] / "train.parquet", other)
    places = tmp_path / "model", tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    with pytest.raises(DemixError, match=rf"{NOVEL[0]}/train\.arrow: was made with another tokenizer than"):
        train_model("dense", TRAIN, [*shard_paths(tokens), other], *places)
    assert not places[0].exists()
