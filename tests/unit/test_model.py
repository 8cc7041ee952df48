"""The DEMix layer and the model against references written from the paper, and against Hugging Face's GPT-2."""

import dataclasses
import os
import shutil
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file as load_tensors
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from demix.config.architecture import PRESETS, Architecture, architecture_from
from demix.config.counts import parameters
from demix.data.tokenizer import Tokenizer, gpt2_tokenizer
from demix.errors import DemixError
from demix.files import read_json, write_json
from demix.model import softmax
from demix.model.checkpoint import expert_names, load_experts, load_model, save_expert, save_shared
from demix.model.experts import find_faults
from demix.model.export import export_hf
from demix.model.gpt import GPT
from demix.model.layers import DEMixLayer
from demix.model.scoring import log_probabilities
from support.contents import contents
from support.models import REAL_TEXT, SMALL, alone, model_of, randomise, save_model

EIGHT = tuple(f"domain{number}" for number in range(8))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_stacked_experts_equal_eight_separate_feedforwards(dtype: torch.dtype, tolerance: float) -> None:
    E, B, T, D = 8, 3, 5, 32
    layer = DEMixLayer(E, D).to(dtype)
    randomise(layer)
    separate = [nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)).to(dtype) for _ in range(E)]
    with torch.no_grad():
        for number, feedforward in enumerate(separate):
            feedforward[0].weight.copy_(layer.up[number])
            feedforward[0].bias.copy_(layer.up_bias[number])
            feedforward[2].weight.copy_(layer.down[number])
            feedforward[2].bias.copy_(layer.down_bias[number])
    x = torch.randn(E, B, T, D, dtype=dtype, generator=torch.Generator().manual_seed(1))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    # Sequences arrive in any order; each is sent to the feedforward of its domain.
    domains = torch.randperm(E * B, generator=torch.Generator().manual_seed(2)) % E
    place = torch.argsort(domains, stable=True)
    flat = torch.empty(E * B, T, D, dtype=dtype)
    flat[place] = theirs.reshape(E * B, T, D)
    chosen = torch.stack([separate[domain](sequence) for domain, sequence in zip(domains, flat, strict=True)])
    reference = chosen[place].view(E, B, T, D)
    output = layer(ours)

    def relative(a: torch.Tensor, b: torch.Tensor) -> float:
        return ((a - b).norm() / b.norm()).item()

    assert relative(output, reference) < tolerance
    with torch.no_grad():
        assert relative(layer(x), reference) < tolerance

    weights = torch.randn(output.shape, dtype=dtype, generator=torch.Generator().manual_seed(3))
    (output * weights).sum().backward()
    (reference * weights).sum().backward()
    assert relative(ours.grad, theirs.grad) < tolerance
    for number, feedforward in enumerate(separate):
        assert relative(layer.up.grad[number], feedforward[0].weight.grad) < tolerance
        assert relative(layer.up_bias.grad[number], feedforward[0].bias.grad) < tolerance
        assert relative(layer.down.grad[number], feedforward[2].weight.grad) < tolerance
        assert relative(layer.down_bias.grad[number], feedforward[2].bias.grad) < tolerance


def test_one_expert_model_equals_dense_model() -> None:
    """A dense transformer written with torch's own encoder layer, pre-norm and exact GELU."""
    model = model_of(("dense",))
    layers = []
    for block in model.blocks:
        layer = nn.TransformerEncoderLayer(
            SMALL.width, SMALL.heads, 4 * SMALL.width, 0.0, F.gelu, batch_first=True, norm_first=True
        ).double()
        with torch.no_grad():
            layer.self_attn.in_proj_weight.copy_(block.attention.qkv.weight)
            layer.self_attn.in_proj_bias.copy_(block.attention.qkv.bias)
            layer.self_attn.out_proj.weight.copy_(block.attention.out.weight)
            layer.self_attn.out_proj.bias.copy_(block.attention.out.bias)
            layer.linear1.weight.copy_(block.feedforward.up[0])
            layer.linear1.bias.copy_(block.feedforward.up_bias[0])
            layer.linear2.weight.copy_(block.feedforward.down[0])
            layer.linear2.bias.copy_(block.feedforward.down_bias[0])
            layer.norm1.load_state_dict(block.attention_norm.state_dict())
            layer.norm2.load_state_dict(block.feedforward_norm.state_dict())
        layers.append(layer)
    tokens = torch.randint(0, 50, (1, 3, SMALL.context), generator=torch.Generator().manual_seed(0))
    x = model.token_embedding[tokens[0]] + model.position_embedding
    causal = nn.Transformer.generate_square_subsequent_mask(SMALL.context, dtype=torch.float64)
    for layer in layers:
        x = layer(x, src_mask=causal, is_causal=True)
    reference = F.log_softmax(model.final_norm(x) @ model.token_embedding.T, -1)
    targets = torch.randint(0, 50, tokens.shape, generator=torch.Generator().manual_seed(1))
    found = model.log_probabilities(model(tokens), targets)
    torch.testing.assert_close(found[0], reference.gather(-1, targets[0].unsqueeze(-1)).squeeze(-1), rtol=1e-10, atol=0)


def rows_of(size: tuple[int, ...], vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """States [..., D], an embedding [V, D], targets [...] and a number for each of these."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(*size, 6, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, 6, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, size, generator=generator)
    return states, weight, targets, torch.randn(size, generator=generator, dtype=dtype)


UNIFORM_AND_NOT = [lambda found, factors: -0.3 * found.sum(), lambda found, factors: (found * factors).sum()]


@pytest.mark.parametrize("loss_of", UNIFORM_AND_NOT)
def test_log_probabilities_have_the_gradients_that_differences_show(loss_of: Callable, monkeypatch) -> None:
    monkeypatch.setitem(softmax.ROWS_AT_ONCE, "cpu", 3)
    monkeypatch.setattr(softmax, "NORMALISED_AT_ONCE", 2 * 5)
    states, weight, targets, factors = rows_of((8,), 5, torch.float64)
    for inputs in ((states, weight), (states, weight.detach()), (states.detach(), weight)):
        assert torch.autograd.gradcheck(
            lambda s, w: loss_of(softmax._LogProbabilities.apply(s, w, targets), factors), inputs, nondet_tol=1e-12
        )


@pytest.mark.parametrize("loss_of", UNIFORM_AND_NOT)
@pytest.mark.parametrize(("rows", "normalised"), [(7, 7), (7, 3), (512, 10), (512, 512)])
def test_log_probabilities_in_chunks_equal_cross_entropy(
    rows: int, normalised: int, loss_of: Callable, monkeypatch
) -> None:
    monkeypatch.setitem(softmax.ROWS_AT_ONCE, "cpu", rows)
    monkeypatch.setattr(softmax, "NORMALISED_AT_ONCE", normalised * 50)
    states, weight, targets, factors = rows_of((2, 4, 5), 50, torch.float32)
    model = GPT(dataclasses.replace(SMALL, width=6, heads=1), 50, ("a", "b"))
    model.token_embedding.data.copy_(weight.data)
    found = model.log_probabilities(states, targets)
    reference = -F.cross_entropy((states @ weight.T).flatten(0, 2), targets.flatten(), reduction="none").view(2, 4, 5)
    torch.testing.assert_close(found, reference, rtol=1e-6, atol=1e-6)
    ours = torch.autograd.grad(loss_of(found, factors), (states, model.token_embedding))
    theirs = torch.autograd.grad(loss_of(reference, factors), (states, weight))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation takes or gives, and counts matrix products."""

    numbers = products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        self.numbers = max([self.numbers, *(tensor.numel() for tensor in tensors)])
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss_of", UNIFORM_AND_NOT)
def test_no_more_logits_than_a_chunk_exist(loss_of: Callable, dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setitem(softmax.ROWS_AT_ONCE, "cpu", 8)
    states, weight, targets, factors = rows_of((2, 10, 5), 300, torch.float32)
    model = GPT(dataclasses.replace(SMALL, width=6, heads=1), 300, ("a", "b"))
    with Largest() as chunked:
        loss_of(model.log_probabilities(states.to(dtype), targets), factors).backward()
    assert chunked.numbers == 8 * 300
    with Largest() as whole:
        logits = (states @ weight.T).flatten(0, 2)
        loss_of(F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(factors), factors).backward()
    assert whole.numbers == 100 * 300


def test_only_the_gradients_that_are_needed_cost_matrix_products(monkeypatch) -> None:
    monkeypatch.setitem(softmax.ROWS_AT_ONCE, "cpu", 10)
    states, _, targets, _ = rows_of((1, 4, 5), 50, torch.float32)
    model = GPT(dataclasses.replace(SMALL, width=6, heads=1), 50, ("dense",))

    def products() -> int:
        with Largest() as seen:
            model.log_probabilities(states, targets)
        return seen.products

    both = products()
    model.token_embedding.requires_grad_(False)
    one = products()
    with torch.no_grad():
        none = products()
    assert (both, one, none) == (3 * 2, 2 * 2, 2)


def step_of(
    model: GPT, dtype: torch.dtype | None = None, scale: float = 1.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A training step's mean loss and its gradients times `scale`, on tokens that are always the same."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randint(0, 50, (2, len(model.experts), 3, SMALL.context), generator=generator)
    loss = -model.log_probabilities(model(inputs, dtype=dtype), targets).mean()
    names, parameters = zip(*model.named_parameters(), strict=True)
    return loss.detach(), dict(zip(names, torch.autograd.grad(loss * scale, parameters), strict=True))


def test_activations_computed_again_give_the_same_gradients() -> None:
    model = model_of(EIGHT, torch.float32)
    kept = step_of(model, torch.bfloat16)
    calls = []
    model.blocks[0].attention.register_forward_hook(lambda *_: calls.append(1))
    model.checkpoint_activations = True
    again = step_of(model, torch.bfloat16)
    assert len(calls) == 2
    torch.testing.assert_close(again, kept, rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 0.005)])
def test_half_precision_is_close_to_fp32(dtype: torch.dtype, tolerance: float) -> None:
    model = GPT(SMALL, 50, EIGHT).initialise(0)
    exact, exact_gradients = step_of(model)
    loss, gradients = step_of(model, dtype, 1024.0)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=tolerance / 100, atol=0)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        wanted = exact_gradients[name] * 1024
        assert (gradient - wanted).norm() < tolerance * wanted.norm(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_half_precision_are_normalised_in_fp32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """States and weights are rounded to the half type, and logits too where there are gradients: the rest is exact."""
    monkeypatch.setitem(softmax.ROWS_AT_ONCE, "cpu", 8)
    states, weight, targets, _ = rows_of((2, 4, 5), 300, torch.float32)
    states = states.detach().to(dtype)
    model = GPT(dataclasses.replace(SMALL, width=6, heads=1), 300, ("a", "b"))
    model.token_embedding.data.copy_(weight.data)
    # In the same chunks: other shapes may add up in another order.
    half = weight.detach().to(dtype)
    rounded = torch.cat([rows @ half.T for rows in states.flatten(0, 2).split(8)])
    exact = states.flatten(0, 2).double() @ half.double().T
    with torch.no_grad():
        scored = model.log_probabilities(states, targets)
    for found, logits in ((scored, exact), (model.log_probabilities(states, targets), rounded)):
        reference = logits.double().log_softmax(-1).gather(1, targets.flatten()[:, None]).view(2, 4, 5)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), reference, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler: apt-get install g++, or conda install gxx"
)
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_compiled_blocks_equal_plain_ones() -> None:
    model = model_of(("a", "b"), torch.float32)
    plain, plain_gradients = step_of(model)
    tokens = np.random.default_rng(0).integers(0, 50, (7, SMALL.context))
    scores = [log_probabilities(model, tokens[:n], tokens[:n], np.ones((n, SMALL.context), bool)) for n in (7, 3)]
    model.compile_blocks()
    compiled, gradients = step_of(model)
    torch.testing.assert_close(compiled, plain, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        assert (gradient - plain_gradients[name]).norm() < 1e-5 * plain_gradients[name].norm(), name
    # Neither evaluation, in whatever shape, nor training after it compiles anything again.
    with torch.compiler.set_stance("fail_on_recompile"):
        for n, expected in zip((7, 3), scores, strict=True):
            again = log_probabilities(model, tokens[:n], tokens[:n], np.ones((n, SMALL.context), bool))
            np.testing.assert_array_equal(again, expected)
        torch.testing.assert_close(step_of(model), (compiled, gradients), rtol=0, atol=0)


def test_scoring_all_experts_at_once_equals_one_at_a_time() -> None:
    model = model_of(EIGHT)
    generator = np.random.default_rng(0)
    inputs, targets = generator.integers(0, 50, (2, 5, SMALL.context))
    mask = np.ones_like(inputs, dtype=bool)
    mask[-1, 7:] = False
    together = log_probabilities(model, inputs, targets, mask)
    assert together.shape == (8, mask.sum())
    for number, expert in enumerate(EIGHT):
        (found,) = log_probabilities(alone(model, expert), inputs, targets, mask)
        np.testing.assert_allclose(found, together[number], rtol=1e-10)
    assert not np.allclose(together[0], together[1])


def test_domain_token_is_an_input_only() -> None:
    model = model_of(("dense",), domain_tokens=EIGHT)
    assert model.position_embedding.shape[0] == SMALL.context + 1
    generator = np.random.default_rng(0)
    inputs, targets = generator.integers(0, 50, (2, 3, SMALL.context))
    table = log_probabilities(model, inputs, targets, np.ones_like(inputs, dtype=bool))
    assert table.shape == (8, inputs.size)
    # Column d is what a plain model with the domain's embedding in front says, over the vocabulary alone.
    seen = torch.from_numpy(inputs)
    for number in (0, 5):
        x = torch.cat([model.domain_embedding[number].expand(3, 1, -1), model.token_embedding[seen]], dim=1)
        x = (x + model.position_embedding).unsqueeze(0)
        for block in model.blocks:
            x = block(x)
        logits = model.final_norm(x)[0, :, 1:] @ model.token_embedding.T
        reference = F.log_softmax(logits, -1).gather(-1, torch.from_numpy(targets).unsqueeze(-1)).detach().flatten()
        np.testing.assert_allclose(table[number], reference, rtol=1e-10)
    some = log_probabilities(model, inputs, targets, np.ones_like(inputs, bool), domain_tokens=(EIGHT[5], EIGHT[0]))
    np.testing.assert_allclose(some, table[[5, 0]], rtol=1e-10)
    with pytest.raises(DemixError, match="no domain token"):
        model(seen.unsqueeze(0))


def test_experts_start_alike_and_as_the_dense_model() -> None:
    demix, dense = GPT(SMALL, 50, EIGHT).initialise(3), GPT(SMALL, 50, ("dense",)).initialise(3)
    for name, tensor in demix.expert_tensors().items():
        for number in range(8):
            assert torch.equal(tensor[number], dense.expert_tensors()[name][0])
    for name, tensor in demix.shared_tensors().items():
        assert torch.equal(tensor, dense.shared_tensors()[name])
    wide = GPT(dataclasses.replace(SMALL, width=256, layers=8), 50, ("dense",)).initialise(3)
    assert wide.blocks[0].feedforward.up.std().item() == pytest.approx(0.02, rel=0.02)
    assert wide.blocks[0].feedforward.down.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert wide.blocks[0].attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert not torch.equal(wide.initialise(4).token_embedding, GPT(SMALL, 50, ("dense",)).initialise(3).token_embedding)


def test_gpt2_small_has_gpt2_size() -> None:
    small = PRESETS["gpt3-small"]
    assert sum(parameters(small, 50257)) == 124_439_808
    with torch.device("meta"):
        model = GPT(small, 50257, ("dense",), EIGHT)
        whole = GPT(small, 50257, ("dense",), EIGHT, "model")
    for each in (model, whole):
        counted = [sum(p.numel() for p in part.values()) for part in (each.shared_tensors(), each.expert_tensors())]
        assert tuple(counted) == parameters(small, 50257, 8, each.expert_scope), each.expert_scope


def test_model_directory_is_modular(tmp_path) -> None:
    model = model_of(EIGHT, torch.float32)
    save_model(model, tmp_path)
    before = contents(tmp_path)
    assert expert_names(tmp_path) == EIGHT
    some = load_model(tmp_path, ("domain5", "domain1"))
    assert torch.equal(some.blocks[0].feedforward.up[0], model.blocks[0].feedforward.up[5])
    assert torch.equal(some.blocks[1].feedforward.down_bias[1], model.blocks[1].feedforward.down_bias[1])
    save_expert(some, "domain5", tmp_path, {"parent": "domain5", "tokenizer_sha256": "t" * 64}, name="added")
    assert expert_names(tmp_path) == ("added", *EIGHT)
    assert before.items() <= contents(tmp_path).items()
    with pytest.raises(DemixError, match=r"nothere.*is missing.*known are .*domain\d.* and 4 more"):
        load_model(tmp_path, ("nothere",))
    save_shared(GPT(SMALL, 50, EIGHT).initialise(2), tmp_path / "other", {"kind": "demix"})
    for name in ("model.json", "shared.safetensors"):
        (tmp_path / "other" / name).rename(tmp_path / f"new-{name}")
    kept = {name: (tmp_path / name).read_bytes() for name in ("model.json", "shared.safetensors")}
    for name in kept:
        (tmp_path / f"new-{name}").replace(tmp_path / name)
    with pytest.raises(DemixError, match="belongs to other shared weights"):
        load_model(tmp_path, ("domain3",))
    for name, content in kept.items():
        (tmp_path / name).write_bytes(content)
    damaged = tmp_path / "experts" / "domain3.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(DemixError, match=r"domain3\.safetensors.*sha256"):
        load_model(tmp_path, ("domain3",))


def test_experts_that_are_whole_models_are_trunks_of_their_own(tmp_path) -> None:
    stacked = model_of(("a", "b"), torch.float32)
    save_model(stacked, tmp_path / "layers")
    trunks = {}
    for number, name in enumerate(("a", "b")):
        trunks[name] = model_of((name,), torch.float32, expert_scope="model")
        randomise(trunks[name], number)
        save_model(trunks[name], tmp_path / "trunks")
    (layers,) = load_experts(tmp_path / "layers")
    assert layers.experts == ("a", "b")
    assert load_tensors(tmp_path / "trunks" / "shared.safetensors") == {}
    own = load_tensors(tmp_path / "trunks" / "experts" / "b.safetensors")
    assert own.keys() == dict(stacked.named_parameters()).keys()
    assert own["blocks.0.feedforward.up"].shape == stacked.blocks[0].feedforward.up.shape[1:]
    assert [trunk.experts for trunk in load_experts(tmp_path / "trunks")] == [("a",), ("b",)]
    for trunk in load_experts(tmp_path / "trunks", ("b", "a")):
        for name, tensor in trunks[trunk.experts[0]].named_parameters():
            assert torch.equal(trunk.get_parameter(name), tensor), name
    with pytest.raises(DemixError, match="share no tensor"):
        load_model(tmp_path / "trunks")
    with pytest.raises(DemixError, match="holds no expert"):
        load_experts(tmp_path / "trunks", ())
    with pytest.raises(DemixError, match="expert_scope other: is not known"):
        GPT(SMALL, 50, ("a",), expert_scope="other")
    assert not find_faults(tmp_path / "trunks")


def test_hugging_face_gpt2_gives_the_same_log_probabilities(tmp_path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer, GPT2LMHeadModel

    tokenizer = tmp_path / "tokenizer.json"
    gpt2_tokenizer(tokenizer)
    encoder = Tokenizer.load(tokenizer)
    longer = dataclasses.replace(SMALL, context=128)
    model = model_of(("novels", "licenses"), torch.float32, architecture=longer, vocab_size=encoder.vocab_size)
    save_model(model, tmp_path / "model", encoder.sha256, tokens=1, steps=1)
    ids = np.concatenate([[encoder.end_of_text], encoder.encode(REAL_TEXT)]).astype(np.int64)
    inputs, targets = ids[None, :-1], ids[None, 1:]
    ours = log_probabilities(model, inputs, targets, np.ones_like(inputs, dtype=bool))
    for number, expert in enumerate(model.experts):
        output = tmp_path / f"hf-{expert}"
        export_hf(tmp_path / "model", expert, tokenizer, output)
        theirs = GPT2LMHeadModel.from_pretrained(output)
        assert theirs.config.activation_function == "gelu"
        assert sum(p.numel() for p in theirs.parameters()) == sum(
            p.numel() for p in load_model(tmp_path / "model", (expert,)).parameters()
        )
        with torch.no_grad():
            logits = F.log_softmax(theirs(torch.from_numpy(inputs)).logits, -1)
        reference = logits[0].gather(-1, torch.from_numpy(targets[0]).unsqueeze(-1)).squeeze(-1).numpy()
        np.testing.assert_allclose(ours[number], reference, atol=1e-4)
        # The literal text is ordinary text.
        text = REAL_TEXT + "<|endoftext|>"
        found = AutoTokenizer.from_pretrained(output)(text)["input_ids"]
        assert found == list(encoder.encode(text))
        assert encoder.end_of_text not in found
    assert np.abs(ours[0] - ours[1]).max() > 1e-2
    with pytest.raises(DemixError, match="exists and is not empty"):
        export_hf(tmp_path / "model", "novels", tokenizer, tmp_path / "model")
    other = tmp_path / "other.json"
    write_json(other, read_json(tokenizer) | {"version": "2.0"}, sort_keys=False)
    with pytest.raises(DemixError, match="tokenizer"):
        export_hf(tmp_path / "model", "novels", other, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_wrong_architectures_are_refused() -> None:
    with pytest.raises(DemixError, match="heads"):
        Architecture(layers=1, width=10, heads=3, context=4)
    with pytest.raises(DemixError, match="context"):
        architecture_from({"layers": 1, "width": 8, "heads": 2})
    assert architecture_from({"preset": "gpt3-xl", "context": 2048}).context == 2048
