"""Decoders of the families of transformers, whose classes are the oracles: in, out, and everything between."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from demix.config.architecture import Architecture
from demix.data.tokenizer import Tokenizer
from demix.model.directory import describe, load_model
from demix.model.experts import find_faults
from demix.model.export import export_hf
from demix.model.gpt import GPT
from demix.model.import_hf import import_hf
from demix.model.scoring import log_probabilities
from support.checkpoints import FAMILIES, all_tensors, checkpoint, farthest, same_tensors
from support.cli import succeeds
from support.models import model_of, save_model

IDS = torch.randint(2, 400, (2, 40), generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Decoder:
    """A model of transformers, the folder with its checkpoint `hf`, its import `in` and that one's export `out`."""

    family: str
    theirs: Any
    folder: Path
    ours: GPT


# Of the other three the hub has one with the same options.
@pytest.fixture(scope="module", params=[name for name in FAMILIES if name not in ("gpt2", "opt", "gpt_neox")])
def decoder(request: pytest.FixtureRequest, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("decoder")
    theirs = checkpoint(folder / "hf", tokens, request.param)
    assert import_hf(folder / "hf", folder / "in", 64) is None
    export_hf(folder / "in", "dense", None, folder / "out")
    return Decoder(request.param, theirs, folder, load_model(folder / "in"))


@torch.no_grad()
def test_logits_at_once_in_pieces_and_as_scores_are_those_of_transformers(decoder: Decoder) -> None:
    model, wanted = decoder.ours, decoder.theirs(IDS).logits
    assert farthest(model.logits(model(IDS[None]))[0], wanted) < 1e-5
    past = model.no_past()
    pieces = torch.cat([model(piece[None], past=past) for piece in IDS.split([7, 1, 32], 1)], 2)
    assert farthest(model.logits(pieces)[0], wanted) < 1e-5
    scored = log_probabilities(model, IDS[:, :-1].numpy(), IDS[:, 1:].numpy(), np.ones((2, 39), bool))
    log_p = wanted[:, :-1].double().log_softmax(-1).gather(2, IDS[:, 1:, None])
    assert farthest(torch.from_numpy(scored).view(2, 39, 1), log_p) < 1e-5


def test_gradients_are_those_of_transformers(decoder: Decoder, tmp_path: Path) -> None:
    """Both go out as checkpoints, so that they have the names of tensors."""
    model, theirs = load_model(decoder.folder / "in"), decoder.theirs
    model.log_probabilities(model(IDS[None])[:, :, :-1], IDS[None, :, 1:]).mean().neg().backward()
    theirs.zero_grad()
    theirs(IDS, labels=IDS).loss.backward()
    theirs.save_pretrained(tmp_path / "theirs", state_dict={n: p.grad for n, p in theirs.named_parameters()})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    tokenizer = decoder.folder / "in" / "tokenizer.json"
    save_model(model, tmp_path / "ours", describe(decoder.folder / "in").tokenizer_sha256)
    export_hf(tmp_path / "ours", "dense", tokenizer, tmp_path / "out")
    ours, wanted = all_tensors(tmp_path / "out"), all_tensors(tmp_path / "theirs")
    largest = max(float(gradient.abs().max()) for gradient in ours.values())
    compared = ours.keys() & wanted.keys()
    assert compared >= ours.keys() - {"lm_head.weight"}
    for name in compared:
        # The bias of keys has no gradient but for rounding.
        scale = max(float(wanted[name].abs().max()), 1e-3 * largest)
        assert float((ours[name] - wanted[name]).abs().max()) < 2e-5 * scale, name


def test_a_checkpoint_goes_out_as_it_came_in(decoder: Decoder) -> None:
    from transformers import AutoModelForCausalLM

    hf, out, theirs = decoder.folder / "hf", decoder.folder / "out", decoder.theirs
    assert not find_faults(decoder.folder / "in")
    assert same_tensors(hf, out, decoder.ours.architecture.head == "tied")
    again = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    assert type(again) is type(theirs)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, theirs(IDS).logits)
    assert theirs.generation_config.to_diff_dict() == again.generation_config.to_diff_dict()
    for key in ("bos_token_id", "eos_token_id", "tie_word_embeddings", "rope_parameters", "head_dim", "vocab_size"):
        found, wanted = (getattr(one.config, key, None) for one in (again, theirs))
        if key != "head_dim" or wanted is not None:
            assert found == wanted, key
    # Software of version 4 reads these.
    written = json.loads((out / "config.json").read_text())
    for key in {"rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base"} & FAMILIES[decoder.family][1].keys():
        assert written[key] == FAMILIES[decoder.family][1][key], key


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("gpt2", torch.bfloat16),
        ("opt", torch.float16),
        ("gpt_neox_sequential", torch.float16),
        ("llama_tied", torch.bfloat16),
        ("olmo2", torch.float16),
    ],
)
def test_half_precision_in_several_files_comes_in_and_goes_out_to_the_bit(
    family: str, dtype: torch.dtype, tokens: Path, tmp_path: Path
) -> None:
    """Products in bf16 are rounded, so logits of the whole model in bf16 agree to 2e-2."""
    from transformers import AutoModelForCausalLM

    hf, name = tmp_path / "hf", str(dtype).removeprefix("torch.")
    theirs = checkpoint(hf, tokens, family).to(dtype)
    (hf / "model.safetensors").unlink()
    theirs.save_pretrained(hf, max_shard_size="20KB")
    assert len(list(hf.glob("*.safetensors"))) > 2
    import_hf(hf, tmp_path / "in")
    model = load_model(tmp_path / "in")
    assert model.token_embedding.dtype == torch.float32
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)(IDS).logits
        assert farthest(model.logits(model(IDS[None]))[0], exact) < 1e-5
        if dtype == torch.bfloat16:
            found = model.to(dtype).logits(model(IDS[None]))[0]
            assert farthest(found.float(), theirs(IDS).logits.float()) < 2e-2
    succeeds("export", tmp_path / "in", "--expert", "dense", "--output", tmp_path / "out", "--dtype", name)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == name
    assert same_tensors(hf, tmp_path / "out")
    assert {tensor.dtype for tensor in all_tensors(tmp_path / "out").values()} == {dtype}


ROPE = {"position": "rope", "norm": "rms", "gated": True, "activation": "silu", "biases": "none"}


@pytest.mark.parametrize(
    ("options", "model_class"),
    [
        ({}, "GPT2LMHeadModel"),
        ({"head": "clap"}, "GPT2LMHeadModel"),
        ({"head": "clap", "activation": "relu"}, "OPTForCausalLM"),
        ({"head": "clap", "position": "rope", "rope_share": 0.5}, "GPTNeoXForCausalLM"),
        ({"head": "clap", **ROPE, "query_norm": "head"}, "Qwen3ForCausalLM"),
        ({**ROPE, "heads": 3, "head_width": 8}, "MistralForCausalLM"),
        ({**ROPE, "norm_place": "after", "query_norm": "all", "head": "untied"}, "Olmo2ForCausalLM"),
    ],
)
def test_an_expert_goes_out_as_the_class_of_its_architecture(
    options: dict[str, Any], model_class: str, tokens: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    encoder = Tokenizer.load(tokens / "tokenizer.json")
    architecture = Architecture(layers=2, width=32, heads=4, context=64).replace(**options)
    model = model_of(("law", "news"), torch.float32, architecture=architecture, vocab_size=encoder.vocab_size)
    save_model(model, tmp_path / "m", encoder.sha256)
    export_hf(tmp_path / "m", "news", tokens / "tokenizer.json", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(theirs).__name__ == model_class
    assert theirs.config.tie_word_embeddings == (architecture.head == "tied")
    with torch.no_grad():
        assert farthest(theirs(IDS).logits, model.logits(model(IDS[None]))[1]) < 1e-5
    # The literal text of the token that ends a text is ordinary text.
    text = "It is a truth <|endoftext|>"
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] == encoder.encode(text).tolist()
    import_hf(tmp_path / "out", tmp_path / "again")
    assert describe(tmp_path / "again").tokenizer_sha256 == encoder.sha256
    if architecture.head == "tied":
        again = load_model(tmp_path / "again")
        assert architecture.described.items() <= again.architecture.described.items()
        assert torch.equal(again.blocks[0].feedforward.up[0], model.blocks[0].feedforward.up[1])
