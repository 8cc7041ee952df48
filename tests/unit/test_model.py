"""The language model against references written from papers and torch's own layers, and its directory."""

import copy
import os
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import MptConfig, MptForCausalLM

from demix.config.architecture import DECODERS, Architecture, RopeScaling, Routed
from demix.config.counts import sizes, training_flops_per_token
from demix.mix.mixtures import Mixture
from demix.mix.rules import History
from demix.model.continuations import Continuation, MixedModel, continuation_log_probabilities, text_scores
from demix.model.directory import (
    load_experts,
    load_model,
)
from demix.model.experts import find_faults
from demix.model.gpt import GPT
from demix.model.scoring import expert_tokens_at_once, log_probabilities
from demix.train.optimizers import group_of
from support.decoding import scored_in_blocks
from support.errors import refused
from support.models import (
    SMALL,
    alone,
    gradient_named,
    model_of,
    own_tensors,
    randomise,
    save_model,
    shared_tensors,
    torch_encoder,
    torch_name,
)

EIGHT = tuple(f"domain{number}" for number in range(8))
VOCAB = 31
SIZES = {"layers": 2, "width": 24, "heads": 4, "context": 16}
SCALED = {"rope_scaling": RopeScaling(kind="llama3", factor=8.0, context=32)}
# Options of one decoder that no family of transformers has together, with several experts.
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": DECODERS["llama"] | {"key_heads": 2, "inner": 40} | SCALED,
    "olmo2": DECODERS["olmo2"],
    "qwen3": DECODERS["qwen3"] | {"key_heads": 1, "head_width": 10},
    "pythia": DECODERS["pythia"] | {"head_width": 8},
    "nanochat": DECODERS["llama"] | {"gated": False, "activation": "relu2", "head": "clap", "query_norm": "head"},
    "alibi, gated": {"position": "alibi", "gated": True, "key_heads": 2, "norm": "rms", "query_norm": "head"},
    "sines": {"position": "sinusoidal", "head": "clap"},
    "post": {"norm_place": "post", "biases": "qkv", "head": "untied", "activation": "gelu_new"},
    "compact": DECODERS["compact"] | {"key_heads": 2, "head_width": 10},
    "compact, shared": DECODERS["compact"] | {"bigrams": "shared"},
    "routed": DECODERS["llama"] | {"routed": Routed(experts=3, top_k=2, every=2, capacity=3.0, balance=0.01)},
}
EACH = pytest.mark.parametrize("options", CASES.values(), ids=CASES)


def model_with(options: dict[str, Any], dtype: torch.dtype = torch.float64, experts: int = 2, **more: Any) -> GPT:
    """A model of these options with weights that are all of size 1, and biases and norms that count."""
    names = ("a", "b")[: 1 if "routed" in options else experts]
    model = GPT(Architecture(**SIZES, **options), VOCAB, names, **more).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 1.0 if "embedding" in name else 0.5 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def texts(model: GPT, sequences: int = 40) -> Tensor:
    """Texts for each expert: more tokens than a CPU computes at once."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(VOCAB, (len(model.experts), sequences, 16), generator=generator)


def step_of(model: GPT, dtype: torch.dtype | None = None, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """A training step's mean loss and its gradients times `scale`, on tokens that are always the same."""
    inputs = texts(model, 3)
    auxiliary = [] if model.architecture.routed else None
    hidden = model(inputs[..., :-1], dtype=dtype, auxiliary=auxiliary)
    loss = -model.log_probabilities(hidden, inputs[..., 1:]).mean()
    names, tensors = zip(*model.named_parameters(), strict=True)
    return loss.detach(), dict(zip(names, torch.autograd.grad(loss * scale, tensors), strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_experts_are_torchs_encoders_that_share_all_but_feedforwards(dtype: torch.dtype, tolerance: float) -> None:
    model = model_of(EIGHT, dtype)
    tokens, targets = torch.randint(50, (2, 8, 3, 16), generator=torch.Generator().manual_seed(0))
    found = model.log_probabilities(model(tokens), targets)
    (0.3 * found.sum()).backward()
    causal = nn.Transformer.generate_square_subsequent_mask(16, dtype=dtype)
    loose = {"rtol": 100 * tolerance, "atol": 100 * tolerance}
    sums: dict[str, Tensor] = {}
    for number in range(8):
        encoder, plain = torch_encoder(model, number), copy.deepcopy(model)
        plain.zero_grad()
        states = encoder(plain.token_embedding[tokens[number]] + plain.position_embedding, mask=causal, is_causal=True)
        logits = plain.final_norm(states) @ plain.token_embedding.T
        wanted = -F.cross_entropy(logits.flatten(0, 1), targets[number].flatten(), reduction="none").view(3, 16)
        torch.testing.assert_close(found[number], wanted, rtol=tolerance, atol=tolerance)
        (0.3 * wanted.sum()).backward()
        for name, parameter in model.named_parameters():
            gradient = gradient_named(encoder, name) if torch_name(name) else plain.get_parameter(name).grad
            if ".feedforward." in name:
                torch.testing.assert_close(parameter.grad[number], gradient, **loose)
            else:
                sums[name] = sums.get(name, 0) + gradient
    for name, gradient in sums.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, **loose, msg=name)


@EACH
def test_each_expert_is_a_model_of_its_own_however_it_is_read(options: dict[str, Any]) -> None:
    """All experts at once, with gradients and without, and each expert alone."""
    model = model_with(options)
    inputs, auxiliary = texts(model), [] if "routed" in options else None
    trained = model(inputs, auxiliary=auxiliary)
    targets = inputs.roll(1, -1)
    learned = model.log_probabilities(trained, targets)
    with torch.no_grad():
        scored = model(inputs)
        torch.testing.assert_close(trained, scored, rtol=0, atol=1e-10)
        torch.testing.assert_close(learned, model.log_probabilities(scored, targets), rtol=0, atol=1e-10)
        plain = model.logits(scored).log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
        torch.testing.assert_close(learned, plain, rtol=0, atol=1e-10)
        shared = model(inputs[:1])
        for number, expert in enumerate(model.experts):
            single = alone(model, expert)
            torch.testing.assert_close(single(inputs[number, None]), scored[number, None], rtol=0, atol=1e-10)
            torch.testing.assert_close(single(inputs[:1]), shared[number, None], rtol=0, atol=1e-10)
        assert model(inputs[:, :0]).shape == (len(model.experts), 0, 16, 24)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(CASES)),
    end=st.integers(0, VOCAB - 1),
    ids=st.lists(st.integers(0, VOCAB - 1) | st.none(), min_size=3, max_size=40),
    lengths=st.lists(st.integers(1, 17), min_size=40, max_size=40),
)
@example(name="llama", end=3, ids=[1, 2, None, 4, 5, None, 6], lengths=[4, *[1] * 39])
def test_decoding_and_continuing_give_what_scoring_gives(
    name: str, end: int, ids: list[int | None], lengths: list[int]
) -> None:
    """However a text is cut, wherever documents end in it (None), and each expert alone as all of them at once."""
    model = model_with(CASES[name], experts=2)
    text = [end if token is None else token for token in ids]
    scored, read = scored_in_blocks(model, text), torch.tensor([text])
    mixture = MixedModel([model], Mixture(History(), np.zeros(len(scored))))
    decoder, cuts = mixture.decoder(read[:, 0]), np.minimum(np.cumsum([1, *lengths]), len(text))
    parts = [decoder.read(read[:, first:last])[0][:, 0] for first, last in pairwise(cuts)]
    np.testing.assert_allclose(torch.cat(parts, 1), scored, rtol=0, atol=1e-10)
    # Two continuations of one context, which is read once.
    start = min(int(cuts[1]), 15, len(text) - 1)
    log_p = mixture.mixed(torch.from_numpy(scored)[:, None], read[:, 1:], read[:, 0])[0][0]
    wanted = [Continuation(tuple(text[:start]), tuple(some)) for some in (text[start : start + 2], [0, 0])]
    (found, _), _ = continuation_log_probabilities(mixture, wanted)
    assert found == pytest.approx(float(log_p[start - 1 : start + 1].sum()), abs=1e-9)
    (scores,) = text_scores(mixture, [text[1:]], text[0])
    assert float(scores[2].sum()) == pytest.approx(float(log_p.sum()), abs=1e-9)
    for row, expert in zip(scored, model.experts, strict=False):
        np.testing.assert_allclose(scored_in_blocks(model.only(expert), text)[0], row, rtol=0, atol=1e-10)


@EACH
def test_activations_computed_again_give_the_same_gradients(options: dict[str, Any]) -> None:
    model = model_with(options)
    loss, gradients = step_of(model)
    model.checkpoint_activations = True
    torch.testing.assert_close(step_of(model), (loss, gradients), rtol=0, atol=1e-12)
    assert all(gradient.any() for gradient in gradients.values())


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_fp32(options: dict[str, Any], dtype: torch.dtype) -> None:
    model = GPT(Architecture(**SIZES, **options), VOCAB, ("a",) if "routed" in options else ("a", "b")).initialise(0)
    exact, exact_gradients = step_of(model)
    scale = 64.0
    loss, gradients = step_of(model, dtype, scale)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=1e-3, atol=0)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        wanted = exact_gradients[name] * scale
        assert (gradient - wanted).norm() < 0.1 * wanted.norm() + 1e-3, name


@EACH
@pytest.mark.parametrize(("scope", "domains"), [("feedforward", 0), ("feedforward", 2), ("model", 0)])
def test_sizes_are_those_of_the_tensors(options: dict[str, Any], scope: str, domains: int) -> None:
    architecture = Architecture(**SIZES, **options)
    with torch.device("meta"):
        model = GPT(architecture, VOCAB, ("one",), ("law", "news")[:domains], scope)
    found = sizes(architecture, VOCAB, domains, scope)
    for mine, theirs in zip(found, (shared_tensors(model), own_tensors(model)), strict=True):
        assert sorted(mine) == sorted((p.numel(), group_of(name) == "matrices") for name, p in theirs.items())


@EACH
def test_flops_are_those_that_torch_counts(options: dict[str, Any]) -> None:
    dense = Architecture(**SIZES, **options).replace(routed=None)
    model = GPT(dense, 32, ("one",)).initialise(1)
    # The counter knows the plain products of attention, and those of no fused kernel.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.logits(model(torch.zeros(1, 1, 16, dtype=torch.long)))
    head = 2 * 32 * dense.width
    forward = (training_flops_per_token(dense, 32, 16) - 3 * head) / 4 + head
    assert counter.get_total_flops() == 16 * forward


@pytest.mark.parametrize(("width", "heads"), [(32, 4), (48, 6), (40, 20)])
@pytest.mark.parametrize("length", [16, 41])
def test_a_model_with_alibi_is_mpt_at_any_length(width: int, heads: int, length: int) -> None:
    """MPT has neither biases nor those of norms, and takes softmax in fp32. 41 positions are more than the context."""
    ours = model_of(
        architecture=Architecture(layers=2, width=width, heads=heads, context=16, position="alibi")
    ).requires_grad_(False)
    for name, parameter in ours.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
    sizes = {"d_model": width, "n_heads": heads, "n_layers": 2, "vocab_size": 50, "max_seq_len": 64}
    theirs = MptForCausalLM(MptConfig(**sizes)).double().eval()
    names = {
        "attention_norm.weight": "norm_1.weight",
        "feedforward_norm.weight": "norm_2.weight",
        "attention.qkv.weight": "attn.Wqkv.weight",
        "attention.out.weight": "attn.out_proj.weight",
        "feedforward.up": "ffn.up_proj.weight",
        "feedforward.down": "ffn.down_proj.weight",
    }
    own = dict(ours.named_parameters())
    state = {"transformer.wte.weight": own["token_embedding"], "lm_head.weight": own["token_embedding"]}
    state["transformer.norm_f.weight"] = own["final_norm.weight"]
    for layer in range(2):
        for mine, name in names.items():
            tensor = own[f"blocks.{layer}.{mine}"]
            state[f"transformer.blocks.{layer}.{name}"] = tensor[0] if "feedforward." in mine else tensor
    theirs.load_state_dict(state)
    ids = torch.randint(0, 50, (3, length), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        reference = theirs(ids).logits.log_softmax(-1)
        found = ours.logits(ours(ids[None]))[0].log_softmax(-1)
    torch.testing.assert_close(found, reference, rtol=0, atol=1e-5)


def test_the_head_clap_is_an_untied_head_of_rows_of_length_one() -> None:
    model = model_of(("a", "b"), architecture=SMALL.replace(head="clap"))
    ids, targets = torch.randint(50, (2, 2, 3, 16), generator=torch.Generator().manual_seed(5))
    plain = copy.deepcopy(model)
    unit = plain.token_embedding / plain.token_embedding.square().sum(1, keepdim=True).sqrt()
    own = {name: p for name, p in plain.named_parameters() if name not in ("token_embedding", "logit_scale")}
    scaled = {"token_embedding": unit, "output_embedding": plain.logit_scale * unit}
    untied = model_of(("a", "b"), architecture=SMALL.replace(head="untied"))
    logits = functional_call(untied, own | scaled, (ids,)) @ scaled["output_embedding"].T
    torch.testing.assert_close(model.logits(model(ids)), logits, rtol=0, atol=1e-12)
    reference = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    found = model.log_probabilities(model(ids), targets)
    torch.testing.assert_close(found, reference, rtol=0, atol=1e-12)
    found.sum().backward()
    reference.sum().backward()
    assert abs(model.logit_scale.grad.item()) > 0.1
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=1e-9, atol=1e-10)


def test_the_head_clap_in_half_precision_keeps_its_scale_exact() -> None:
    model = GPT(SMALL.replace(head="clap"), 50, ("dense",)).initialise(1)
    assert model.logit_scale.tolist() == [1.0]
    # 1.003 is 1 in bf16.
    model.logit_scale.data.fill_(1.003)
    hidden = torch.randn(1, 1, 4, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    unit = F.normalize(model.token_embedding, dim=-1).bfloat16()
    states = (hidden.float() * 1.003).bfloat16()
    assert not torch.equal(states, hidden)
    torch.testing.assert_close(model.logits(hidden), states @ unit.T)


def rows_of(size: tuple[int, ...], vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """States [..., D], an embedding [V, D] and targets [...]."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(*size, 6, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, 6, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, size, generator=generator)
    return states, weight, targets


def head_of(weight: Tensor) -> GPT:
    """A model of two experts with this embedding."""
    model = GPT(SMALL.replace(width=6, heads=1), len(weight), ("a", "b")).to(weight.dtype)
    model.token_embedding.data.copy_(weight.data)
    return model


# More rows than one chunk of logits has, and more logits than a CPU normalises at once.
SIZE, TYPES = (2, 3, 101), 3000


def test_log_probabilities_and_their_gradients_are_those_of_cross_entropy() -> None:
    states, weight, targets = rows_of(SIZE, TYPES, torch.float64)
    model = head_of(weight)
    found = model.log_probabilities(states, targets)
    logits = states @ weight.T
    reference = -F.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none").view(SIZE)
    torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad(-0.3 * found.sum(), (states, model.token_embedding))
    wanted = torch.autograd.grad(-0.3 * reference.sum(), (states, weight))
    torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-10)


class Seen(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation takes or gives."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        self.numbers = max([self.numbers, *(tensor.numel() for tensor in tensors)])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_logits_than_a_chunk_exist(dtype: torch.dtype) -> None:
    states, weight, targets = rows_of(SIZE, TYPES, torch.float32)
    model = head_of(weight)
    with Seen() as chunked:
        model.log_probabilities(states.to(dtype), targets).sum().backward()
    assert chunked.numbers < 0.9 * targets.numel() * TYPES


def test_logits_of_half_precision_are_normalised_in_fp32_and_scored_from_exact_ones() -> None:
    """Where there are no gradients: in 8 bits of bf16 a logit of 16 would be off by up to 0.06 nats."""
    states, weight, targets = rows_of((2, 4, 5), 300, torch.float32)
    model, half = head_of(weight), (4 * states.detach()).bfloat16()
    with torch.no_grad():
        scored = model.log_probabilities(half, targets)
    exact = (half.double() @ weight.detach().bfloat16().double().T).log_softmax(-1)
    assert scored.dtype == torch.float32
    torch.testing.assert_close(scored.double(), exact.gather(3, targets[..., None])[..., 0], rtol=0, atol=1e-4)
    rounded = (half @ weight.detach().bfloat16().T).double().log_softmax(-1)
    found = model.log_probabilities(half, targets)
    torch.testing.assert_close(found.double(), rounded.gather(3, targets[..., None])[..., 0], rtol=0, atol=1e-4)


@pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler: apt-get install g++, or conda install gxx"
)
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_compiled_blocks_equal_plain_ones() -> None:
    model = model_with(CASES["qwen3"] | {"query_norm": "all"}, torch.float32)
    plain, plain_gradients = step_of(model)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (7, 16))
    scores = [log_probabilities(model, tokens[:n], tokens[:n], np.ones((n, 16), bool)) for n in (7, 3)]
    model.compile_blocks()
    compiled, gradients = step_of(model)
    torch.testing.assert_close(compiled, plain, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        assert (gradient - plain_gradients[name]).norm() < 1e-4 * plain_gradients[name].norm(), name
    # Neither evaluation, in whatever shape, nor training after it compiles anything again.
    with torch.compiler.set_stance("fail_on_recompile"):
        for n, expected in zip((7, 3), scores, strict=True):
            again = log_probabilities(model, tokens[:n], tokens[:n], np.ones((n, 16), bool))
            np.testing.assert_array_equal(again, expected)
        torch.testing.assert_close(step_of(model), (compiled, gradients), rtol=0, atol=0)


def test_scoring_all_experts_at_once_equals_one_at_a_time() -> None:
    model = model_of(EIGHT)
    inputs, targets = np.random.default_rng(0).integers(0, 50, (2, 70, 16))
    mask = np.ones_like(inputs, dtype=bool)
    mask[-1, 7:] = False
    advanced: list[int] = []
    together = log_probabilities(model, inputs, targets, mask, advance=advanced.append)
    assert together.shape == (8, mask.sum())
    assert sum(advanced) == mask.sum()
    assert len(advanced) > 1
    for number, expert in enumerate(EIGHT):
        (found,) = log_probabilities(alone(model, expert), inputs, targets, mask)
        np.testing.assert_allclose(found, together[number], rtol=1e-10)
    assert not np.allclose(together[0], together[1])


def test_a_gpu_computes_as_much_at_once_as_fits() -> None:
    """12 x 768 in fp32: a block holds 17 vectors of 768 numbers for each token and expert, beside 824 MB of logits."""
    with torch.device("meta"):
        model = GPT(Architecture(layers=12, width=768, heads=12, context=256), 50257, ("a", "b"))
    for dtype, each, logits in ((None, 17 * 4, 4), (torch.bfloat16, 16 * 2 + 4, 6)):
        for fits, expected in ((0, 1), (1, 1), (1023, 512), (1024, 1024), (100_000, 65_536)):
            free = 2 * (logits * 4096 * 50257 + fits * each * 768)
            assert expert_tokens_at_once(model, dtype, free) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_a_gpu_computes_at_once_takes_no_more_than_was_free(dtype: torch.dtype | None) -> None:
    model = (
        GPT(Architecture(layers=4, width=512, heads=8, context=256), 32000, ("a", "b", "c", "d")).initialise(1).cuda()
    )
    ids = np.random.default_rng(0).integers(0, 32000, (2, 256, 256))
    batch = expert_tokens_at_once(model, dtype)
    torch.cuda.reset_peak_memory_stats()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    found = log_probabilities(model, *ids, np.ones(ids[0].shape, bool), dtype)
    assert torch.cuda.max_memory_allocated() - before < free
    assert found.shape == (4, 256 * 256)
    assert expert_tokens_at_once(model, dtype) == batch, "what torch keeps is free"


@pytest.mark.parametrize("options", [{}, {"position": "alibi", "head": "clap"}], ids=str)
def test_a_domain_token_is_an_input_only(options: dict[str, str]) -> None:
    """A model with it is a dense one of a further position whose vocabulary has the domains, too."""
    sizes = SMALL.replace(**options)
    model = model_of(("dense",), architecture=sizes, domain_tokens=EIGHT)
    inputs, targets = np.random.default_rng(0).integers(0, 50, (2, 3, SMALL.context))
    table = log_probabilities(model, inputs, targets, np.ones_like(inputs, dtype=bool))
    assert table.shape == (8, inputs.size)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "domain_embedding"}
    wide = GPT(sizes.replace(context=SMALL.context + 1), 58, ("dense",)).double()
    wide.load_state_dict(state | {"token_embedding": torch.cat([model.token_embedding, model.domain_embedding])})
    seen = torch.from_numpy(inputs)
    for number in (0, 5):
        with torch.no_grad():
            hidden = wide(F.pad(seen, (1, 0), value=50 + number)[None])[0, :, 1:]
            log_p = wide.logits(hidden)[..., :50].log_softmax(-1).gather(-1, torch.from_numpy(targets)[..., None])
        np.testing.assert_allclose(table[number], log_p.flatten(), rtol=1e-9)
    some = log_probabilities(model, inputs, targets, np.ones_like(inputs, bool), domain_tokens=(EIGHT[5], EIGHT[0]))
    np.testing.assert_allclose(some, table[[5, 0]], rtol=1e-10)
    with refused("domains"):
        model(seen.unsqueeze(0))


def test_what_a_model_has_no_row_or_place_for_is_refused() -> None:
    model, ids = model_of(), torch.zeros(1, 2, SMALL.context + 1, dtype=torch.long)
    for wrong in (ids, ids[..., :3] - 1, ids[..., :3] + 50):
        with torch.no_grad(), refused("inputs"):
            model(wrong)
    for options in ({}, {"position": "rope"}):
        model = model_of(architecture=SMALL.replace(**options))
        with torch.no_grad():
            for seen, more in ((SMALL.context - 1, 3), (SMALL.context, 1)):
                past = model.no_past()
                model(ids[..., :seen], past=past)
                with refused("inputs"):
                    model(ids[..., :more], past=past)


def test_no_targets_have_no_gradient() -> None:
    model = model_of()
    hidden = model(torch.zeros(1, 2, 4, dtype=torch.long))[:, :, :0]
    model.log_probabilities(hidden, torch.zeros(1, 2, 0, dtype=torch.long)).sum().backward()
    assert not model.token_embedding.grad.any()


def test_experts_start_alike_and_as_the_dense_model() -> None:
    demix, dense = GPT(SMALL, 50, EIGHT).initialise(3), GPT(SMALL, 50, ("dense",)).initialise(3)
    for name, tensor in own_tensors(demix).items():
        for number in range(8):
            assert torch.equal(tensor[number], own_tensors(dense)[name][0])
    for name, tensor in shared_tensors(demix).items():
        assert torch.equal(tensor, shared_tensors(dense)[name])
    wide = GPT(SMALL.replace(width=256, layers=8), 50, ("dense",)).initialise(3)
    assert wide.blocks[0].feedforward.up.std().item() == pytest.approx(0.02, rel=0.02)
    assert wide.blocks[0].feedforward.down.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert wide.blocks[0].attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert not torch.equal(wide.initialise(4).token_embedding, GPT(SMALL, 50, ("dense",)).initialise(3).token_embedding)


def test_experts_that_are_whole_models_are_trunks_of_their_own(tmp_path: Path) -> None:
    stacked = model_of(("a", "b"), torch.float32)
    save_model(stacked, tmp_path / "layers")
    trunks = {}
    for number, name in enumerate(("a", "b")):
        trunks[name] = model_of((name,), torch.float32, expert_scope="model")
        randomise(trunks[name], number)
        save_model(trunks[name], tmp_path / "trunks")
    (layers,) = load_experts(tmp_path / "layers")
    assert layers.experts == ("a", "b")
    assert load_file(tmp_path / "trunks" / "shared.safetensors") == {}
    own = load_file(tmp_path / "trunks" / "experts" / "b.safetensors")
    assert own.keys() == dict(stacked.named_parameters()).keys()
    assert own["blocks.0.feedforward.up"].shape == stacked.blocks[0].feedforward.up.shape[1:]
    assert [trunk.experts for trunk in load_experts(tmp_path / "trunks")] == [("a",), ("b",)]
    for trunk in load_experts(tmp_path / "trunks", ("b", "a")):
        for name, tensor in trunks[trunk.experts[0]].named_parameters():
            assert torch.equal(trunk.get_parameter(name), tensor), name
    with refused("experts a, b"):
        load_model(tmp_path / "trunks")
    with refused("experts"):
        load_experts(tmp_path / "trunks", ())
    assert not find_faults(tmp_path / "trunks")
