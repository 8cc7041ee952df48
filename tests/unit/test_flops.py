"""Costs against what the paper and its sources print."""

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from demix.config.architecture import PRESETS, Architecture, architecture_from
from demix.config.counts import parameters, sizes
from demix.model.gpt import GPT
from demix.model.scoring import log_probabilities
from demix.model.softmax import ROWS_AT_ONCE
from demix.plan.flops import (
    HARDWARE,
    LOGITS_ROWS,
    achieved_tflops,
    activation_bytes,
    checkpoint_bytes,
    hours,
    scoring_flops,
    scoring_hours,
    training_state_bytes,
    update_flops,
)
from demix.train.updates import group_of

# Of each size: GPUs, updates, TFLOPs an update, hours of Dense and of DEMix (Table 2; FACTS section 2).
TABLE_2 = {
    "gpt3-small": (32, 300_000, 556.84, 46.8, 46.8),
    "gpt3-medium": (64, 120_000, 3279.31, 46.2, 46.2),
    "gpt3-large": (128, 65_000, 13637.84, 42.7, 40.1),
    "gpt3-xl": (128, 50_000, 23250.34, 49.5, 45.9),
}
EIGHT = tuple("abcdefgh")


@pytest.mark.parametrize("vocab_size", [50257, 50264])
@pytest.mark.parametrize("preset", TABLE_2)
def test_the_papers_updates_and_hours(preset: str, vocab_size: int) -> None:
    gpus, steps, tflops, dense, demix = TABLE_2[preset]
    architecture = PRESETS[preset]
    flops = update_flops(architecture, vocab_size, 2 * 8 * gpus, 1024)
    assert round(flops / 1e12, 2) == tflops
    for expected, kind in ((dense, False), (demix, True)):
        achieved = achieved_tflops(HARDWARE["v100"], architecture, demix=kind)
        assert round(hours(flops, steps, gpus, achieved), 1) == expected


@pytest.mark.parametrize(
    ("preset", "dense", "expert", "eight"),
    [
        ("gpt3-small", 124_445_184, 56_669_184, 521_129_472),
        ("gpt3-medium", 354_830_336, 201_449_472, 1_764_976_640),
        ("gpt3-large", 758_737_920, 453_169_152, 3_930_921_984),
        ("gpt3-xl", 1_313_640_448, 805_552_128, 6_952_505_344),
    ],
)
def test_parameters_are_the_papers_and_the_models(preset: str, dense: int, expert: int, eight: int) -> None:
    architecture = PRESETS[preset]
    shared, own = parameters(architecture, 50264)
    assert (shared + expert, own, shared + 8 * expert) == (dense, expert, eight)
    with torch.device("meta"):
        model = GPT(architecture, 50264, EIGHT)
    assert sum(p.numel() for p in model.parameters()) == eight
    assert sum(p.numel() for p in model.expert_tensors().values()) == 8 * expert


DECODERS = [
    {"preset": "gpt3-small"},
    {"preset": "llama", "key_heads": 2, "query_norm": "all", "head": "untied"},
    {"preset": "roberta", "objective": "mlm", "attention": "bidirectional"},
    {"position": "alibi", "head": "clap", "biases": "qkv", "query_norm": "head"},
    {"routed": {"experts": 3, "top_k": 1, "every": 2, "capacity": 1.0, "balance": 0.0}},
]


@pytest.mark.parametrize("scope", ["feedforward", "model"])
@pytest.mark.parametrize("given", DECODERS, ids=lambda given: "-".join(map(str, given)))
def test_sizes_are_those_of_the_models_tensors(given: dict, scope: str) -> None:
    architecture = architecture_from({"layers": 3, "width": 24, "heads": 4, "context": 8, "inner": 40} | given)
    with torch.device("meta"):
        model = GPT(architecture, 96, ("a",), ("a", "b"), scope)
    found = sizes(architecture, 96, 2, scope)
    for mine, theirs in zip(found, (model.shared_tensors(), model.expert_tensors()), strict=True):
        assert sorted(mine) == sorted((p.numel(), group_of(name) == "matrices") for name, p in theirs.items())


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "alibi"])
@pytest.mark.parametrize("scope", ["feedforward", "model"])
def test_scoring_flops_are_those_that_torch_counts(scope: str, position: str) -> None:
    """Shared work once. Of attention torch counts, and without a fused kernel does, what the mask leaves out too."""
    architecture = Architecture(3, 32, 4, 64, position=position)
    trunks = [EIGHT] if scope == "feedforward" else [(name,) for name in EIGHT]
    models = [GPT(architecture, 200, experts, (), scope).initialise(1) for experts in trunks]
    ids = np.zeros((2, 64), np.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        for model in models:
            log_probabilities(model, ids, ids, ids == 0)
    masked = 2 * architecture.context * architecture.width * (len(trunks) + 8 * (architecture.layers - 1))
    found = scoring_flops(architecture, 200, 8, scope)
    assert counter.get_total_flops() == ids.size * (found + (0 if position == "alibi" else masked))
    hours = scoring_hours(architecture, 200, 8, 3_600, 1e-12 * found, scope)
    assert hours == pytest.approx(1, rel=1e-12)


def test_activations_are_what_backward_keeps() -> None:
    """What autograd saves a layer more, counted on the model; Korthikanti's 34 bytes where dropout has its masks."""

    def saved(layers: int) -> int:
        architecture = Architecture(layers, 64, 4, 128)
        model = GPT(architecture, 300, ("x",)).initialise(1)
        weights = {parameter.data_ptr() for parameter in model.parameters()}
        found: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in weights:
                found[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = model(torch.zeros(1, 6, 128, dtype=torch.int64))
        assert hidden.requires_grad
        return sum(tensor.untyped_storage().nbytes() for tensor in found.values())

    def estimate(layers: int) -> int:
        return activation_bytes(Architecture(layers, 64, 4, 128), 300, 6, 4, checkpointing=False)

    assert estimate(4) - estimate(2) == pytest.approx(saved(4) - saved(2), rel=0.1)
    small = PRESETS["gpt3-small"]
    assert ROWS_AT_ONCE["cuda"] == LOGITS_ROWS
    layer = activation_bytes(small, 0, 1, 2, checkpointing=False) / (12 * 1024 * 768)
    assert layer == 34 - 2
    assert activation_bytes(small, 0, 1, 2, checkpointing=True) == 1024 * 768 * (12 * 2 + 32)


def test_training_state_is_what_the_optimizer_holds() -> None:
    model = GPT(Architecture(2, 16, 2, 8), 40, EIGHT).initialise(1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(8, 1, 8, dtype=torch.int64)).sum().backward()
    optimizer.step()
    moments = sum(state[key].nbytes for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    gradients = sum(parameter.grad.nbytes for parameter in model.parameters())
    count = sum(parameter.numel() for parameter in model.parameters())
    assert training_state_bytes(count) == weights + gradients + moments
    assert training_state_bytes(0, count) == weights
    assert checkpoint_bytes(count) == weights + moments
    assert checkpoint_bytes(count, count) == 2 * weights + moments
