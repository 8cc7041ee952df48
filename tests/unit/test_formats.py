"""Checkpoint formats: the classes of transformers are the oracles, through files."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from demix.config.architecture import parameters
from demix.data.tokenizer import Tokenizer
from demix.model.checkpoint import load_model
from demix.model.experts import find_faults
from demix.model.export import export_hf
from demix.model.formats import FORMATS
from demix.model.import_hf import import_hf

os.environ["HF_HUB_OFFLINE"] = "1"
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64,
    "vocab_size": 400, "bos_token_id": 399, "eos_token_id": 399, "attn_implementation": "eager",
}  # fmt: skip
MODERN = SIZES | {"num_key_value_heads": 2, "intermediate_size": 88, "rms_norm_eps": 1e-6}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", SIZES | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gpt2_wide": ("gpt2", SIZES | {"n_inner": 72, "layer_norm_epsilon": 1e-6, "tie_word_embeddings": False}),
    "opt": ("opt", SIZES | {"ffn_dim": 128, "word_embed_proj_dim": 32, "dropout": 0.0, "pad_token_id": None}),
    "opt_untied": ("opt", SIZES | {"ffn_dim": 72, "enable_bias": False, "dropout": 0.0, "tie_word_embeddings": False}),
    "gpt_neox": ("gpt_neox", SIZES | QUIET | {"intermediate_size": 128}),
    "gpt_neox_sequential": (
        "gpt_neox",
        SIZES | QUIET | {"intermediate_size": 72, "use_parallel_residual": False, "tie_word_embeddings": True},
    ),
    "llama": ("llama", MODERN | {"rope_parameters": LLAMA3}),
    "llama_tied": ("llama", MODERN | {"tie_word_embeddings": True, "head_dim": 16}),
    "llama_linear": ("llama", MODERN | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("mistral", MODERN | {"sliding_window": None, "head_dim": 10}),
    "qwen2": ("qwen2", MODERN | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", MODERN | {"head_dim": 16, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", MODERN | {"num_key_value_heads": 4, "pad_token_id": None}),
}


def random_model(family: str, **more: object) -> Any:
    """A model of transformers whose norms and biases are not those of initialisation."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name, keys = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **keys | more)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or "ln_" in key or key.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(0, 1.0 if "emb" in key or "wte" in key else 0.08)
    return model


@pytest.fixture
def tokenizer(tokens: Path) -> Path:
    """A tokenizer of 400 ids."""
    assert Tokenizer.load(tokens / "tokenizer.json").vocab_size == SIZES["vocab_size"]
    return tokens / "tokenizer.json"


def checkpoint(folder: Path, tokenizer: Path, family: str, shard: str = "1GB", **more: object) -> Any:
    """Write a random model with a tokenizer of demix, as an export has it."""
    model = random_model(family, **more)
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text(Tokenizer.load(tokenizer).definition)
    return model


def change(folder: Path, **keys: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def all_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def farthest(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, of the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_comes_in_and_goes_out_exactly(family: str, tokenizer: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = checkpoint(tmp_path / "hf", tokenizer, family)
    assert import_hf(tmp_path / "hf", tmp_path / "in") is None
    assert not find_faults(tmp_path / "in")
    model = load_model(tmp_path / "in")
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == sum(parameters(model.architecture, 400))
    # OPT's table has two rows that nothing reads.
    assert count == sum(p.numel() for p in theirs.parameters()) - (64 if family.startswith("opt") else 0)

    ids = torch.randint(2, 400, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = theirs(ids).logits
        assert farthest(model.logits(model(ids[None]))[0], wanted) < 1e-5
        past, pieces = model.no_past(), ids.split([7, 1, 32], 1)
        pieced = torch.cat([model(piece[None], past=past) for piece in pieces], 2)
        assert farthest(model.logits(pieced)[0], wanted) < 1e-5

    model.requires_grad_(True)
    hidden = model(ids[None])
    model.log_probabilities(hidden[:, :, :-1], ids[None, :, 1:]).mean().neg().backward()
    theirs(ids, labels=ids).loss.backward()
    theirs.save_pretrained(tmp_path / "gradients", state_dict={n: p.grad for n, p in theirs.named_parameters()})
    export_hf(tmp_path / "in", "dense", None, tmp_path / "out")
    before, after = all_tensors(tmp_path / "hf"), all_tensors(tmp_path / "out")
    before.pop("lm_head.weight" if model.architecture.head == "tied" else "", None)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        rows = slice(2, None) if "embed_positions" in name else slice(None)
        assert torch.equal(tensor[rows], after[name][rows]), name
    # Gradients have the names of tensors.
    grads = {n: (p.grad[0] if ".feedforward." in n else p.grad) for n, p in model.named_parameters()}
    ours = FORMATS[FAMILIES[family][0]].theirs_of(model.architecture, grads)
    largest = max(float(gradient.abs().max()) for gradient in ours.values())
    for name, gradient in all_tensors(tmp_path / "gradients").items():
        if name in ours and "embed_positions" not in name:
            # The bias of keys has no gradient but for rounding.
            scale = max(float(gradient.abs().max()), 1e-3 * largest)
            assert float((ours[name] - gradient).abs().max()) < 2e-5 * scale, name

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert type(again) is type(theirs)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, theirs(ids).logits)
        cached = theirs.generation_config.to_diff_dict() == again.generation_config.to_diff_dict()
    assert cached
    for key in ("bos_token_id", "eos_token_id", "tie_word_embeddings", "rope_parameters", "head_dim", "vocab_size"):
        found, wanted_value = (getattr(one.config, key, None) for one in (again, theirs))
        if key != "head_dim" or wanted_value is not None:
            assert found == wanted_value, key
