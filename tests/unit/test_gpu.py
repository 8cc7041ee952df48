"""What a GPU computes, beside what the CPU does: training, resuming, scores, continuations, memory."""

from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from demix.api import load
from demix.config.architecture import Architecture, architecture_from
from demix.config.training import OptimizerSettings
from demix.errors import StoppedError
from demix.files import read_json_lines
from demix.model.gpt import GPT
from demix.model.scoring import log_probabilities
from demix.plan.flops import training_state_bytes
from demix.train.batches import Batch, Batches
from demix.train.loop import train
from demix.train.parallel import World
from demix.train.schedule import Optimization
from support.decoding import write_run
from support.models import model_of
from support.training import SIZES, TRAIN, shard_paths, stop_at, train_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

MASKED = {"objective": "mlm"}
LLAMA = {"preset": "llama", "key_heads": 1, "inner": 40, "query_norm": "all"}
ROUTED = {"routed": {"experts": 4, "top_k": 2, "every": 2, "capacity": 1.0, "balance": 0.1}}
VARIED = {"position": "alibi", "head": "clap"}
# A kind of model, options of its decoder, and settings of its training.
CASES = {
    "DEMix": ("demix", {}, {}),
    "dense, unbalanced": ("dense_unbalanced", {}, {}),
    "domain token": ("domain_token", {}, {}),
    "routed": ("routed", ROUTED, {}),
    "Llama's decoder": ("demix", LLAMA, {}),
    "ALiBi and CLAP": ("demix", VARIED, {}),
    "masked": ("demix", MASKED, {}),
    "RoBERTa's decoder": ("demix", {"preset": "roberta", "position": "sinusoidal"}, {}),
    "micro-batches, recomputed": ("demix", {}, {"micro_sequences": 1, "checkpoint_activations": True}),
}
MUON = {"optimizer": OptimizerSettings(kind="muon", matrices=5.0, decay="matrices")}


def no_gpu() -> AbstractContextManager[object]:
    """Within it torch shows no GPU."""
    return patch("torch.cuda.is_available", lambda: False)


def trained(tokens: Path, folder: Path, kind: str, options: dict, **changes: object) -> list[dict]:
    """The rows of metrics of a training with losses on dev, on the GPU if torch shows one."""
    training = TRAIN.replace(architecture=SIZES | options, dev_blocks=2, **changes)
    paths = [*shard_paths(tokens), *shard_paths(tokens, split="dev")]
    train_model(kind, training, paths, folder / "model", folder / "metrics.jsonl", folder / "checkpoints")
    return read_json_lines(folder / "metrics.jsonl")


def losses(rows: list[dict]) -> list[float]:
    return [row["loss"] for row in rows if "loss" in row]


def losses_and_norms(rows: list[dict]) -> list[float]:
    return [row[key] for row in rows for key in ("loss", "gradient_norm", "dev_loss") if key in row]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_gpu_trains_as_the_cpu_does(case: tuple[str, dict, dict], tokens: Path, tmp_path: Path) -> None:
    kind, options, changes = case
    with no_gpu():
        there = trained(tokens, tmp_path / "cpu", kind, options, precision="fp64", **changes)
    torch.cuda.reset_peak_memory_stats()
    here = trained(tokens, tmp_path / "gpu", kind, options, precision="fp64", **changes)
    assert torch.cuda.max_memory_allocated() > 0
    assert losses_and_norms(here) == pytest.approx(losses_and_norms(there), rel=1e-8)


@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-3), ("bf16", 1e-2), ("fp16", 1e-2)])
def test_coarser_types_come_near(precision: str, near: float, tokens: Path, tmp_path: Path) -> None:
    with no_gpu():
        exact = trained(tokens, tmp_path / "exact", "demix", {}, precision="fp64")
    rows = trained(tokens, tmp_path / precision, "demix", {}, precision=precision)
    assert losses(rows) == pytest.approx(losses(exact), rel=near)


def test_muon_comes_near(tokens: Path, tmp_path: Path) -> None:
    """Its iterations are in bf16, which every machine sums in an order of its own."""
    with no_gpu():
        there = trained(tokens, tmp_path / "cpu", "demix", {}, **MUON)
    here = trained(tokens, tmp_path / "gpu", "demix", {}, **MUON)
    assert losses(here) == pytest.approx(losses(there), rel=0.05)


@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"precision": "bf16", "dropout": 0.1}, MUON], ids=str)
def test_a_stopped_training_goes_on_to_the_bit(
    changes: dict, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(tokens, tmp_path / "whole", "demix", LLAMA, **changes)
    with monkeypatch.context() as patched:
        stop_at(patched, {11})
        with pytest.raises(StoppedError):
            trained(tokens, tmp_path / "stopped", "demix", LLAMA, **changes)
    assert losses(trained(tokens, tmp_path / "stopped", "demix", LLAMA, **changes)) == losses(whole)


def test_a_compiled_training_comes_near(tokens: Path, tmp_path: Path) -> None:
    plain, compiled = (trained(tokens, tmp_path / str(on), "demix", LLAMA, compile=on) for on in (False, True))
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-3)


@pytest.mark.parametrize("options", [{}, LLAMA, ROUTED, VARIED, MASKED], ids=str)
def test_a_gpu_scores_as_the_cpu_does(options: dict) -> None:
    experts = ("dense",) if options == ROUTED else ("law", "news", "code")
    model = model_of(experts, architecture=architecture_from(SIZES | options))
    ids = np.random.default_rng(0).integers(0, 50, (2, 7, 32))
    mask = np.ones(ids[0].shape, bool)
    mask[-1, 20:] = False
    there = log_probabilities(model, *ids, mask)
    here = log_probabilities(model.cuda(), *ids, mask)
    np.testing.assert_allclose(here, there, rtol=1e-9)


def test_a_gpu_continues_as_the_cpu_does(tokens: Path, tmp_path: Path) -> None:
    model = write_run(tmp_path, tokens) / "models" / "demix"
    there, here = (
        load(model, device=device).generate("the Lord", tokens=40, temperature=0) for device in ("cpu", "cuda")
    )
    np.testing.assert_array_equal(here.ids, there.ids)
    np.testing.assert_allclose(here.mixture, there.mixture, atol=1e-4)


@pytest.mark.parametrize("muon", [False, True])
def test_the_state_takes_what_the_plan_says(muon: bool, tmp_path: Path) -> None:
    """Weights and moments, before a step has gradients. Kernels keep 5% of these bytes at most."""
    sizes, seen = Architecture(layers=8, width=512, heads=8, context=64), []

    def draw(step: int) -> Batch:
        seen.append(torch.cuda.memory_allocated() - before)
        ids = torch.randint(0, 32000, (2, 2, 1, 64))
        domains = torch.arange(2)[:, None]
        return Batch(ids[0], ids[1], domains, seeds=domains)

    optimization = Optimization(
        steps=3,
        learning_rate=1e-3,
        clip=1.0,
        precision="bf16",
        checkpoint_every=10,
        optimizer=OptimizerSettings(kind="muon") if muon else None,
    )
    model = GPT(sizes, 32000, ("a", "b")).initialise(1)
    numbers = sum(p.numel() for p in model.parameters())
    single = sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1 and "blocks" in name) if muon else 0
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    train(model, Batches(draw, 128), ("a", "b"), optimization, tmp_path, world=World(device=torch.device("cuda")))
    assert seen[-1] == pytest.approx(training_state_bytes(numbers, single=single) - 4 * numbers, rel=0.05)
