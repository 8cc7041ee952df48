"""Small random checkpoints of the families of transformers."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from demix.data.tokenizer import Tokenizer

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
        SIZES
        | QUIET
        | {
            "intermediate_size": 72,
            "use_parallel_residual": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "llama": ("llama", MODERN | {"rope_parameters": LLAMA3}),
    "llama_tied": ("llama", MODERN | {"tie_word_embeddings": True, "head_dim": 16}),
    "llama_linear": ("llama", MODERN | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("mistral", MODERN | {"sliding_window": None, "head_dim": 10}),
    "qwen2": ("qwen2", MODERN | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", MODERN | {"head_dim": 16, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", MODERN | {"num_key_value_heads": 4, "pad_token_id": None}),
    "mixtral": ("mixtral", MODERN | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": (
        "qwen3_moe",
        MODERN
        | {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "moe_intermediate_size": 24}
        | {"norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "flex_olmo": (
        "flex_olmo",
        MODERN | {"num_key_value_heads": 4, "num_experts": 5, "num_experts_per_tok": 3, "pad_token_id": None},
    ),
    "olmoe": (
        "olmoe",
        MODERN | {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None, "norm_topk_prob": True},
    ),
    "olmoe_not_renormalised": (
        "olmoe",
        MODERN | {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None, "norm_topk_prob": False},
    ),
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


def checkpoint(folder: Path, tokens: Path, family: str, shard: str = "1GB", **more: object) -> Any:
    """Write a random model with the tokenizer of `tokens`, as an export of demix has it."""
    model = random_model(family, **more)
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text(Tokenizer.load(tokens / "tokenizer.json").definition)
    return model


def change(folder: Path, **keys: object) -> None:
    """Change keys of a config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def all_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of all files of a checkpoint."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def farthest(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, of the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max())
