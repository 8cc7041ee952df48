"""Training in one process: the loop against a plain one, precisions, dropout, the best state."""

import dataclasses
import itertools
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from demix.config.architecture import Architecture
from demix.data.shards import TokenShard, blocks
from demix.errors import StoppedError
from demix.files import seed_for
from demix.model.directory import load_model
from demix.model.gpt import GPT
from demix.model.import_hf import import_hf
from demix.model.scoring import log_probabilities
from demix.model.transformer import Dropout
from demix.train import loop, optimizers
from demix.train.batches import Batch, batches_of
from demix.train.loop import train
from demix.train.schedule import Optimization
from demix.train.trainer import DivergedError
from support.checkpoints import checkpoint, farthest
from support.plain_training import adamw, plain_steps, rates
from support.tokens import TRAINING
from support.training import SIZES, TRAIN, balanced_batches, opened, rows, shard_paths, tensors, train_into, updates

RATE, ARCHITECTURE = 0.25, Architecture(**SIZES)
EXACT = Optimization(
    steps=8, learning_rate=3e-3, warmup=0.3, clip=0.5, weight_decay=0.1, precision="fp64", checkpoint_every=1000
)


def new_model(experts: Sequence[str] = TRAINING, architecture: Architecture = ARCHITECTURE) -> GPT:
    return GPT(architecture, 400, tuple(experts)).initialise(1)


MASKED_LM = {"objective": "mlm"}
ROUTED = {"routed": {"experts": 4, "top_k": 2, "every": 2, "capacity": 1.0, "balance": 0.1}}
# How a step draws its data, further keys of the architecture, and the share of dropout.
LOOPS: dict[str, tuple[str, dict[str, Any], float | None]] = {
    "experts": ("by_domain", {}, None),
    "experts, dropout": ("by_domain", {}, RATE),
    "dense": ("mixed", {}, None),
    "dense, dropout": ("mixed", {}, RATE),
    "masked": ("mixed", MASKED_LM, None),
    "routed": ("mixed", ROUTED, None),
    "routed, masked": ("mixed", ROUTED | MASKED_LM, None),
}


@pytest.mark.parametrize("case", LOOPS)
def test_training_is_a_plain_loop_in_any_micro_batches(case: str, tokens: Path, tmp_path: Path) -> None:
    """The last micro-batch is smaller: of three sequences of each domain, or of the dense model's nine."""
    how, options, dropout = LOOPS[case]
    experts, micro = (TRAINING, 2) if how == "by_domain" else (["dense"], 4)
    architecture = Architecture(**SIZES, **options)
    drawn = batches_of(how, opened(tokens), TRAINING, 3, 32, 1, None, options.get("objective", "clm"))
    plain = new_model(experts, architecture).double()

    def logits_of(batch: Batch) -> torch.Tensor:
        return plain.logits(plain(batch.inputs, dropout=Dropout(dropout, batch.seeds.tolist())))

    of_steps = dict(enumerate(rates(8, 3e-3, 0.3)))
    with_dropout = {"logits_of": logits_of} if dropout else {}
    expected = list(plain_steps(plain, adamw(plain), drawn, of_steps, clip=0.5, **with_dropout))
    for parts in ({}, {"micro_sequences": micro}, {"micro_sequences": 1, "checkpoint_activations": True}):
        ours = new_model(experts, architecture)
        optimization = EXACT.replace(dropout=dropout, **parts)
        found = train(ours, drawn, TRAINING, optimization, tmp_path / "-".join(parts))
        for number, (row, step) in enumerate(zip(found, expected, strict=True), start=1):
            by_domain = step.losses.view(3, -1).sum(1) * 3 / (drawn.targets or drawn.tokens)
            assert row["loss"] == pytest.approx(step.loss, rel=1e-9)
            assert [row[f"loss/{domain}"] for domain in TRAINING] == pytest.approx(by_domain.tolist(), rel=1e-9)
            assert row["gradient_norm"] == pytest.approx(step.norm, rel=1e-9)
            assert row["learning_rate"] == pytest.approx(of_steps[number - 1], rel=1e-12)
            assert row["tokens"] == number * drawn.tokens == number * 3 * 3 * 32
            for router in step.routers:
                counts = [float(count) / drawn.tokens for count in router.counts]
                wanted = (counts[1], counts[3] / 2, counts[5] / 2)
                keys = ("router_entropy", "router_dropped", "router_load/1")
                assert [row[key] for key in keys] == pytest.approx(wanted, rel=1e-9)
                assert row["router_dropped"] > 0
        for name, parameter in ours.named_parameters():
            torch.testing.assert_close(parameter, plain.get_parameter(name), rtol=0, atol=1e-9)
    assert expected[-1].loss < expected[0].loss - 0.1 or "objective" in options


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_coarser_numbers_give_nearly_the_losses_of_fp64(precision: str, tokens: Path, tmp_path: Path) -> None:
    exact, found = (
        updates(train_into(tmp_path / one, "demix", shard_paths(tokens), TRAIN.replace(precision=one)))
        for one in ("fp64", precision)
    )
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in exact], rel=5e-3)
    assert [row["loss"] for row in found] != [row["loss"] for row in exact]
    assert load_model(tmp_path / precision / "model").token_embedding.dtype == torch.float32


def test_fp16_skips_updates_that_overflow(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "FIRST_SCALE", 2.0**36)
    monkeypatch.setattr(optimizers, "GROW_AFTER", 4)
    found = updates(train_into(tmp_path, "demix", shard_paths(tokens), TRAIN.replace(precision="fp16")))
    scales = [row["loss_scale"] for row in found]
    skipped = [row["gradient_norm"] is None for row in found]
    assert skipped[:3] == [True] * 3
    assert not all(skipped)
    assert scales[0] == 2.0**35
    for before, after, skip in zip(scales, scales[1:], skipped[1:], strict=False):
        assert after in ([before / 2] if skip else [before, before * 2])
    assert any(after > before for before, after in itertools.pairwise(scales))
    assert found[-1]["loss"] < found[0]["loss"]


@pytest.mark.parametrize(("dtype", "grows"), [(torch.float16, True), (torch.float32, False), (torch.bfloat16, False)])
def test_the_loss_is_scaled_in_fp16_alone(dtype: torch.dtype, grows: bool) -> None:
    """A factor that grew in other types would end a training of 64,000 updates as one whose gradients overflow."""
    found = optimizers.LossScale(dtype)
    before = found.factor
    for _ in range(optimizers.GROW_AFTER):
        found.grow()
    assert found.factor == (2 * before if grows else 1.0)


def test_a_loss_that_is_not_finite_stops_before_the_update(tokens: Path, tmp_path: Path) -> None:
    model = new_model()
    with torch.no_grad():
        model.blocks[0].feedforward.down_bias[1] = float("nan")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(DivergedError) as diverged:
        train(model, balanced_batches(opened(tokens), TRAINING, 2, 32, 1), TRAINING, EXACT, tmp_path)
    assert "scripture" in diverged.value.rows[0]["diverged"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(7.0), before[name].double().nan_to_num(7.0))
    how = EXACT.replace(evaluate_every=5, patience=3)
    batches = balanced_batches(opened(tokens), TRAINING, 2, 32, 1)
    with pytest.raises(DivergedError):
        train(new_model(), batches, TRAINING, how, tmp_path / "dev", evaluate=lambda _: (float("nan"), {}))


@pytest.mark.parametrize("stopped_at", [None, 8, 13])
def test_early_stopping_keeps_the_best_parameters(stopped_at: int | None, tokens: Path, tmp_path: Path) -> None:
    """The evaluations since the lowest loss count through a restart."""
    batches = balanced_batches(opened(tokens), TRAINING, 2, 32, 1)
    told, stops = iter([5.0, 4.0, 3.0, 3.5, 3.6, 3.7, 2.0, 2.0, 2.0]), [stopped_at]
    seen: list[dict[str, torch.Tensor]] = []

    def draw(step: int) -> Batch:
        if step in stops:
            stops.remove(step)
            os.kill(os.getpid(), signal.SIGTERM)
        return batches.draw(step)

    def evaluate(model: GPT) -> tuple[float, dict[str, float]]:
        seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        return next(told), {}

    optimization = EXACT.replace(steps=24, precision="fp32", evaluate_every=3, patience=3)
    drawn = dataclasses.replace(batches, draw=draw)
    model = new_model()
    try:
        found = train(model, drawn, TRAINING, optimization, tmp_path, evaluate=evaluate)
    except StoppedError:
        model = new_model()
        found = train(model, drawn, TRAINING, optimization, tmp_path, evaluate=evaluate)
    assert not stops or stops == [None]
    assert {row["step"]: row["early_stopping_loss"] for row in found if "early_stopping_loss" in row} == (
        {0: 5.0, 3: 4.0, 6: 3.0, 9: 3.5, 12: 3.6, 15: 3.7}
    )
    assert max(row["step"] for row in found) == 15
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, seen[2][name])


@pytest.mark.parametrize(("kind", "dropout"), [("demix", RATE), ("dense", None), ("domain_token", None)])
def test_losses_on_dev_are_those_of_scoring(kind: str, dropout: float | None, tokens: Path, tmp_path: Path) -> None:
    """Losses on dev drop no unit."""
    training = TRAIN.replace(learning_rate=0.05, dev_blocks=3, checkpoint_every=3, dropout=dropout)
    train_into(tmp_path, kind, [*shard_paths(tokens), *shard_paths(tokens, split="dev")], training)
    evaluated = {row["step"]: row for row in rows(tmp_path) if "dev_loss" in row}
    assert list(evaluated) == [3, 6, 9, 12, 15, 18, 21, 24]
    assert not [*tmp_path.glob("checkpoints/*/step-*")]
    for row in evaluated.values():
        assert row["dev_loss"] == pytest.approx(np.mean([row[f"dev_loss/{domain}"] for domain in TRAINING]))
    model = load_model(tmp_path / "model", TRAINING if kind == "demix" else None)
    for number, path in enumerate(shard_paths(tokens, split="dev")):
        shard = TokenShard.open(path)
        table = log_probabilities(model, *blocks(shard, 32, 3 * 32))
        expected = -table[number if len(table) > 1 else 0].mean()
        assert loop.dev_loss(model, shard, 3, TRAINING[number]) == pytest.approx(expected, rel=1e-6)
        assert evaluated[24][f"dev_loss/{TRAINING[number]}"] == pytest.approx(expected, rel=1e-6)


def test_losses_on_dev_and_kept_states_change_no_weight(tokens: Path, tmp_path: Path) -> None:
    shards = [*shard_paths(tokens), *shard_paths(tokens, split="dev")]

    def trained(name: str, keep: tuple[int, ...] = (), **changes: Any) -> Path:
        training = TRAIN.replace(**changes)
        return train_into(tmp_path / name, "demix", shards, training, keep=keep)

    plain, measured = trained("plain"), trained("measured", dev_blocks=2, checkpoint_every=7)
    kept = trained("kept", (2, 5, 24))
    assert tensors(plain) == tensors(measured) == tensors(kept)
    assert len(tensors(plain)) == 1 + len(TRAINING)
    assert len([row for row in rows(measured) if "dev_loss" in row]) > 2
    assert not [*(measured / "checkpoints").iterdir()]
    states = sorted(path.name for path in kept.glob("checkpoints/*/step-*"))
    assert states == ["step-00000002", "step-00000005", "step-00000024"]


def test_a_mask_is_the_draw_of_its_sequence_and_layer() -> None:
    x = torch.empty(2, 3, 5, 7)
    kept, _ = Dropout(RATE, [[1, 2, 3], [4, 5, 6]]).masks(3, x)
    for (e, b), seed in np.ndenumerate([[1, 2, 3], [4, 5, 6]]):
        generator = torch.Generator().manual_seed(seed_for(int(seed), 3))
        for place_of in range(2):
            for t in range(5):
                drawn = torch.rand(7, generator=generator)
                assert torch.equal(kept[place_of, e, b, t], drawn >= RATE)
    # Another sequence beside it changes nothing, another layer all.
    assert torch.equal(Dropout(RATE, [[6, 1]]).masks(3, x[:1, :2])[0][:, 0, 1], kept[:, 0, 0])
    assert not torch.equal(Dropout(RATE, [[1, 2, 3], [4, 5, 6]]).masks(2, x)[0], kept)
    (some, scale), ones = Dropout(RATE, [[9]]).masks(0, torch.empty(1, 1, 400, 500)), torch.ones(400, 500)
    theirs = F.dropout(ones, RATE)
    assert (some[0] * scale).unique().tolist() == theirs.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert (some * scale).mean(dim=(1, 2, 3, 4)).tolist() == pytest.approx([theirs.mean().item()] * 2, abs=0.01)


def test_the_places_are_those_of_opt(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients are those of transformers' OPT, whose F.dropout takes the same masks one after the other."""
    theirs = checkpoint(tmp_path / "hf", tokens, "opt", dropout=RATE, attn_implementation="sdpa")
    import_hf(tmp_path / "hf", tmp_path / "in")
    model, ids = load_model(tmp_path / "in"), torch.randint(2, 400, (2, 40), generator=torch.Generator().manual_seed(1))
    dropout = Dropout(RATE, [[11, 12]])
    masks = iter([mask for layer in range(3) for mask in dropout.masks(layer, torch.empty(1, 2, 40, 32))[0][:, 0]])

    def drop(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
        assert (p, training) == (RATE, True)
        return x * next(masks).reshape(x.shape) / (1 - p)

    monkeypatch.setattr(torch.nn.functional, "dropout", drop)
    wanted = theirs.train()(ids, labels=ids)
    assert next(masks, None) is None, "two places in each block, and none besides"
    wanted.loss.backward()
    model.requires_grad_(True)
    hidden = model(ids[None], dropout=dropout)
    assert farthest(model.logits(hidden)[0].detach(), wanted.logits.detach()) < 1e-5
    model.log_probabilities(hidden[:, :, :-1], ids[None, :, 1:]).mean().neg().backward()
    decoder = "model.decoder.layers"
    pairs = {
        "token_embedding": "model.decoder.embed_tokens.weight",
        "blocks.1.attention.out.weight": f"{decoder}.1.self_attn.out_proj.weight",
        "blocks.2.feedforward.up": f"{decoder}.2.fc1.weight",
    }
    for ours, name in pairs.items():
        gradient = model.get_parameter(ours).grad
        assert farthest(gradient.view_as(theirs.get_parameter(name)), theirs.get_parameter(name).grad) < 1e-4, name
