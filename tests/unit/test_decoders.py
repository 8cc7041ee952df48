"""Decoders of the field as options of one decoder: rotation, grouped keys, norms, gated feedforwards, their counts."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from demix.config.architecture import DECODERS, Architecture, RopeScaling, Routed, architecture_from
from demix.config.config import Config
from demix.config.counts import parameters, training_flops_per_token, unchosen_parameters
from demix.errors import DemixError
from demix.files import write_json
from demix.model.gpt import GPT
from demix.model.layers.attention import Attention, frequencies, rotated, rotations
from demix.model.layers.feedforward import activated
from demix.model.layers.norm import norm_of, normed
from support.configs import small

SIZES = {"layers": 2, "width": 24, "heads": 4, "context": 16}
SCALED = {"rope_scaling": RopeScaling(kind="llama3", factor=8.0, context=32)}
CASES: dict[str, dict[str, Any]] = {
    "llama": DECODERS["llama"] | {"key_heads": 2, "inner": 40} | SCALED,
    "olmo2": DECODERS["olmo2"],
    "qwen3": DECODERS["qwen3"] | {"key_heads": 1, "head_width": 10},
    "qwen2": DECODERS["llama"] | {"biases": "qkv", "head": "tied"},
    "opt": DECODERS["opt"],
    "pythia": DECODERS["pythia"] | {"head_width": 8},
    "nanochat": DECODERS["llama"] | {"gated": False, "activation": "relu2", "head": "clap", "query_norm": "head"},
    "alibi, gated": {"position": "alibi", "gated": True, "key_heads": 2, "norm": "rms"},
    "routed": DECODERS["llama"] | {"routed": Routed(experts=3, top_k=2, every=2, capacity=3.0, balance=0.01)},
}
EACH = pytest.mark.parametrize("options", CASES.values(), ids=CASES)
VOCAB = 31


def model_of(options: dict[str, Any], experts: int = 2, dtype: torch.dtype = torch.float64) -> GPT:
    """A model of these options with weights that are all of size 1, and biases and norms that count."""
    routed = "routed" in options
    names = tuple("abc"[: 1 if routed else experts])
    model = GPT(Architecture(**SIZES, **options), VOCAB, names).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 1.0 if "embedding" in name else 0.5 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def texts(model: GPT, length: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(VOCAB, (len(model.experts), 2, length), generator=generator)


@settings(deadline=None)
@given(
    st.floats(10, 1e7), st.sampled_from([0.25, 0.5, 1.0]), st.sampled_from([16, 24]), st.integers(0, 400),
    st.sampled_from([None, RopeScaling(kind="linear", factor=3.0), SCALED["rope_scaling"]]),
)  # fmt: skip
def test_scores_of_rotated_states_depend_on_distances_alone(
    theta: float, share: float, unit: int, ahead: int, scaling: RopeScaling | None
) -> None:
    sizes = Architecture(
        **SIZES, position="rope", head_width=unit, rope_theta=theta, rope_share=share, rope_scaling=scaling
    )
    q, k = torch.randn(2, 1, 1, 1, unit, dtype=torch.float64, generator=torch.Generator().manual_seed(unit))
    scores = []
    for start in (0, ahead):
        turns = rotations(sizes, start, 9, q)
        assert turns is not None
        queries, keys = (rotated(x.expand(1, 9, 1, unit), turns)[0, :, 0] for x in (q, k))
        scores.append(queries @ keys.T)
        # Nothing is stretched, and what is not rotated stays.
        torch.testing.assert_close(queries.norm(dim=-1), q.norm().expand(9))
        assert torch.equal(queries[:, int(unit * share) :], q[0, 0, :, int(unit * share) :].expand(9, -1))
    torch.testing.assert_close(*scores, rtol=0, atol=1e-9)
    by_distance = [scores[0].diagonal(distance) for distance in range(-8, 9)]
    assert all(torch.allclose(one, one[:1], rtol=0, atol=1e-9) for one in by_distance)
    assert not torch.allclose(scores[0][0], scores[0][0, :1])


@pytest.mark.parametrize(
    ("scaling", "theirs"),
    [
        (None, {"rope_type": "default"}),
        (RopeScaling(kind="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            RopeScaling(kind="llama3", factor=8.0, low=1.0, high=4.0, context=64),
            {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
    ids=["plain", "linear", "llama3"],
)  # fmt: skip
def test_frequencies_are_those_of_transformers(scaling: RopeScaling | None, theirs: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=512,
        rope_parameters=theirs | {"rope_theta": 500_000.0},
    )  # fmt: skip
    sizes = Architecture(1, 256, 4, 512, position="rope", rope_theta=500_000.0, rope_scaling=scaling)
    torch.testing.assert_close(frequencies(sizes).float(), LlamaRotaryEmbedding(config).inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keys", [1, 2])
def test_grouped_keys_are_repeated_keys(keys: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    grouped, whole = Attention(24, 4, key_heads=keys).to(dtype), Attention(24, 4).to(dtype)
    with torch.no_grad():
        for ours, theirs in zip(grouped.qkv.parameters(), whole.qkv.parameters(), strict=True):
            q, k, v = torch.split(ours.view(-1, 6, *ours.shape[1:]), [4, keys, keys])
            repeated = [q, *(part.repeat_interleave(4 // keys, 0) for part in (k, v))]
            theirs.copy_(torch.cat(repeated).flatten(0, 1))
        whole.out.load_state_dict(grouped.out.state_dict())
    x = torch.randn(1, 2, 9, 24, dtype=dtype)
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            torch.testing.assert_close(grouped(x), whole(x), rtol=tolerance, atol=tolerance)


def test_rotations_turn_gradients_back() -> None:
    sizes = Architecture(**SIZES, position="rope", rope_share=0.5, head_width=8)
    x, incoming = torch.randn(2, 2, 5, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    turns = rotations(sizes, 3, 5, x)
    assert turns is not None
    x.requires_grad_()
    (ours,) = torch.autograd.grad(rotated(x, turns), x, incoming)
    cos, sin = (torch.cat([part, part], -1)[:, None] for part in turns)
    some = x[..., :4]
    plain = torch.cat([some * cos + torch.cat([-some[..., 2:], some[..., :2]], -1) * sin, x[..., 4:]], -1)
    torch.testing.assert_close(rotated(x, turns), plain)
    (theirs,) = torch.autograd.grad(plain, x, incoming)
    torch.testing.assert_close(ours, theirs)


def test_norms_of_the_root_mean_square_have_the_gradients_of_torch() -> None:
    norm = norm_of("rms", 8, 0.1).double()
    x, incoming = torch.randn(2, 2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        norm.weight.copy_(incoming[0, 0])
    x.requires_grad_()
    found = []
    for output in (normed(x, norm), norm(x)):
        found.append((output.detach(), *torch.autograd.grad(output, (x, norm.weight), incoming)))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("gelu", lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2),
        ("gelu_new", lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2),
        ("relu", lambda x: x * (x > 0)),
        ("silu", lambda x: x / (1 + torch.exp(-x))),
        ("relu2", lambda x: x * x * (x > 0)),
    ],
)
def test_activations_are_those_of_the_formulas(name: str, plain: Any, gated: bool) -> None:
    x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = plain(x[:, :4]) * x[:, 4:] if gated else plain(x)
    torch.testing.assert_close(activated(x.clone().requires_grad_(), name, gated), expected)
    with torch.no_grad():
        torch.testing.assert_close(activated(x.clone(), name, gated), expected)


@EACH
def test_each_expert_is_a_model_of_its_own_however_it_is_read(options: dict[str, Any]) -> None:
    """All experts at once, with gradients and without, in pieces with a cache, recomputed, and each expert alone."""
    model = model_of(options)
    inputs, auxiliary = texts(model), [] if "routed" in options else None
    trained = model(inputs, auxiliary=auxiliary)
    with torch.no_grad():
        scored = model(inputs)
        torch.testing.assert_close(trained, scored, rtol=0, atol=1e-10)
        past = model.no_past()
        pieces = [model(inputs[..., part], past=past) for part in (slice(0, 5), slice(5, 6), slice(6, 16))]
        torch.testing.assert_close(torch.cat(pieces, 2), scored, rtol=0, atol=1e-10)
        if "routed" not in options:
            for number, expert in enumerate(model.experts):
                alone = model.only(expert)(inputs[number : number + 1])
                torch.testing.assert_close(alone, scored[number : number + 1], rtol=0, atol=1e-10)
    gradients = []
    for model.checkpoint_activations in (False, True):
        model.zero_grad()
        hidden = model(inputs[..., :-1], auxiliary=auxiliary)
        (-model.log_probabilities(hidden, inputs[..., 1:]).mean()).backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
    assert all(gradient.any() for gradient in gradients[0].values())


def test_no_sequence_has_no_states() -> None:
    model = model_of(CASES["qwen3"])
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            assert model(torch.zeros(2, 0, 16, dtype=torch.long)).shape == (2, 0, 16, 24)


@EACH
def test_a_later_token_changes_no_earlier_state(options: dict[str, Any]) -> None:
    model = model_of(options)
    inputs = texts(model)
    other = inputs.clone()
    other[..., 9] = (other[..., 9] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(inputs), model(other)
    torch.testing.assert_close(before[:, :, :9], after[:, :, :9], rtol=0, atol=1e-12)
    assert not torch.allclose(before[:, :, 9:], after[:, :, 9:])


@EACH
def test_half_precision_is_close(options: dict[str, Any]) -> None:
    model = model_of(options, dtype=torch.float32)
    inputs = texts(model)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            exact, half = model(inputs), model(inputs, dtype=torch.bfloat16)
        difference = (exact - half.float()).norm(dim=-1) / exact.norm(dim=-1)
        # A token that chooses other experts in half precision is another token.
        assert difference.median() < 0.03


def test_compiled_blocks_equal_plain_ones() -> None:
    options = CASES["qwen3"] | {"query_norm": "all"}
    found = []
    for compiled in (False, True):
        model = model_of(options, dtype=torch.float32)
        if compiled:
            model.compile_blocks()
        inputs = texts(model)
        hidden = model(inputs[..., :-1])
        (-model.log_probabilities(hidden, inputs[..., 1:]).mean()).backward()
        found.append([hidden.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@EACH
@pytest.mark.parametrize("scope", ["feedforward", "model"])
def test_parameters_are_counted(options: dict[str, Any], scope: str) -> None:
    sizes = Architecture(**SIZES, **options)
    with torch.device("meta"):
        model = GPT(sizes, VOCAB, ("one",), expert_scope=scope)
    counted = tuple(
        sum(parameter.numel() for parameter in tensors.values())
        for tensors in (model.shared_tensors(), model.expert_tensors())
    )
    assert parameters(sizes, VOCAB, 0, scope) == counted


@EACH
def test_flops_are_those_that_torch_counts(options: dict[str, Any]) -> None:
    sizes = Architecture(**SIZES, **options)
    dense = dataclasses.replace(sizes, routed=None)
    model = GPT(dense, 32, ("one",)).initialise(1)
    # The counter knows the plain products of attention, and those of no fused kernel.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        hidden = model(torch.zeros(1, 1, 16, dtype=torch.long))
        model.logits(hidden)
    head = 2 * 32 * dense.width
    forward = (training_flops_per_token(dense, 32, 16) - 3 * head) / 4 + head
    assert counter.get_total_flops() == 16 * forward
    if sizes.routed:
        each = parameters(dense, 32)[1] // dense.layers
        assert unchosen_parameters(sizes) == sizes.routed_layers * each


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"heads": 5}, "architecture.heads: 5 does not divide the width 24; choose a divisor, or add head_width"),
        ({"key_heads": 3}, "architecture.key_heads: 3 does not divide the 4 heads"),
        ({"rope_theta": 5.0}, "architecture.rope_theta: is given to position learned; leave it out, or use position"),
        ({"rope_share": 0.5}, "architecture.rope_share: is given to position learned"),
        ({"position": "rope", "rope_share": 0.5}, "architecture.rope_share: leaves 3 of a head's 6 units to rotate"),
        ({"position": "rope", "rope_share": 0.1}, "architecture.rope_share: leaves 0 of a head's 6 units to rotate"),
        ({"norm_place": "after", "residual": "parallel"}, "architecture.norm_place: is after, and residual is para"),
        (
            {"position": "rope", "rope_scaling": {"kind": "llama3", "factor": 2.0, "low": 4.0, "high": 1.0}},
            "architecture.rope_scaling.low: is 4, and high is 1; lower it",
        ),
        (
            {"position": "rope", "rope_scaling": {"kind": "yarn", "factor": 2.0}},
            "architecture.rope_scaling.kind: is 'yarn'; allowed is one of linear, llama3",
        ),
        ({"epsilon": 0.0}, "architecture.epsilon: is 0.0; allowed is number > 0"),
        ({"preset": "gemma"}, "architecture.preset: gemma is not known; use one of gpt3-small"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused_in_one_line(section: dict[str, Any], told: str) -> None:
    with pytest.raises(DemixError) as error:
        architecture_from(SIZES | section)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("preset", DECODERS)
def test_a_preset_is_its_options_and_keys_beside_it_come_first(preset: str) -> None:
    sizes = {"layers": 3, "width": 32, "heads": 2, "context": 8}
    assert architecture_from({"preset": preset} | sizes) == Architecture(**sizes, **DECODERS[preset])
    assert architecture_from({"preset": preset, "activation": "relu2"} | sizes).activation == "relu2"
    described = architecture_from({"preset": preset} | sizes).described
    assert Architecture(**described) == Architecture(**sizes, **DECODERS[preset])


def test_a_section_may_be_that_of_the_parent(tmp_path: Path) -> None:
    parent = Architecture(**SIZES, **CASES["qwen3"])
    write_json(tmp_path / "model.json", {"architecture": parent.described})
    rows = {"demix": {"parent": str(tmp_path)}, "dense": {}}
    config = Config.complete(small(models=rows) | {"architecture": {"preset": "parent", "context": 8}})
    section = config.values["architecture"]
    assert section == parent.described | {"context": 8}, "the run's file says it whole"
    assert architecture_from(section) == dataclasses.replace(parent, context=8)
    asked = {"architecture": {"preset": "parent"}}
    for models, content, told in (
        ({}, {}, "architecture.preset: is parent, and rows of models have 0 model folders as parent; give one"),
        (rows, {"architecture": {"layers": 1}}, f"{tmp_path}/model.json: architecture.width: is missing"),
        (rows, {}, f"{tmp_path}/model.json: describes no dense model"),
    ):
        write_json(tmp_path / "model.json", content)
        with pytest.raises(DemixError) as error:
            Config.complete(small(models=models) | asked)
        assert told in str(error.value)
    (tmp_path / "model.json").unlink()
    with pytest.raises(DemixError, match=r"model\.json: is missing; import or train the parent first"):
        Config.complete(small(models=rows) | asked)
