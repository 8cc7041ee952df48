"""Small random checkpoints of the families of transformers."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from demix.data.tokenizer import Tokenizer

os.environ["HF_HUB_OFFLINE"] = "1"
HUB_CONFIGS = Path(__file__).parents[1] / "unit" / "data" / "hub_configs.json"
IDS = {"vocab_size": 400, "bos_token_id": 399, "eos_token_id": 399}
SIZES = IDS | {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
MODERN = SIZES | {"num_key_value_heads": 2, "intermediate_size": 88, "rms_norm_eps": 1e-6}
OLMO = MODERN | {"num_key_value_heads": 4, "pad_token_id": None}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "tie_word_embeddings": False}
CHOSEN = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
# The class of config.json and its keys, by the name that tests give it.
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
        | {"intermediate_size": 72, "use_parallel_residual": False, "tie_word_embeddings": True}
        | {"rope_parameters": PARTIAL},
    ),
    "llama": ("llama", MODERN | {"rope_parameters": LLAMA3}),
    "llama_tied": ("llama", MODERN | {"tie_word_embeddings": True, "head_dim": 16}),
    "llama_linear": ("llama", MODERN | {"rope_parameters": LINEAR, "hidden_act": "relu2"}),
    "mistral": ("mistral", MODERN | {"sliding_window": None, "head_dim": 10, "hidden_act": "gelu_new"}),
    "qwen2": ("qwen2", MODERN | {"tie_word_embeddings": True, "hidden_act": "relu"}),
    "qwen3": ("qwen3", MODERN | {"head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "olmo2": ("olmo2", OLMO | {"hidden_act": "gelu"}),
    "flex_olmo": ("flex_olmo", OLMO | {"num_experts": 5, "num_experts_per_tok": 3}),
    "olmoe": ("olmoe", MODERN | CHOSEN | {"pad_token_id": None}),
}


def _in_small(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The keys of a config.json of the hub, with small sizes in place of its own."""
    heads = {"num_attention_heads": 4, "n_head": 4}
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "n_embd": 32, "num_hidden_layers": 2, "n_layer": 2}
    inner = {"intermediate_size": 48, "moe_intermediate_size": 24, "ffn_dim": 48, "max_window_layers": 2}
    chosen = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    others = {"pad_token_id": None, "torch_dtype": "float32", "n_positions": 64}
    small = IDS | {name: size for name, size in (heads | sizes | inner | chosen | others).items() if name in config}
    if "num_key_value_heads" in config:
        small["num_key_value_heads"] = max(1, 4 * config["num_key_value_heads"] // config["num_attention_heads"])
    if "head_dim" in config:
        small["head_dim"] = 8 * config["head_dim"] * config["num_attention_heads"] // config["hidden_size"]
    if config["model_type"] == "opt":
        small["max_position_embeddings"] = 64
    return config["model_type"], config | small | {"attn_implementation": "eager"}


FAMILIES |= {f"hub/{name}": _in_small(config) for name, config in json.loads(HUB_CONFIGS.read_text()).items()}


def random_model(family: str, **more: object) -> Any:
    """A model of transformers whose norms and biases are not those of initialisation."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name, keys = FAMILIES[family]
    torch.manual_seed(0)
    # It changes what it is given.
    config = AutoConfig.for_model(**copy.deepcopy(keys | more | {"model_type": name}))
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or "ln_" in key or key.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.normal_(0, 1.0 if "emb" in key or "wte" in key else 0.08)
    return model


def write_tokenizer(folder: Path, tokens: Path) -> None:
    """The tokenizer.json of the run in `tokens`, as an export of demix has it."""
    (folder / "tokenizer.json").write_text(Tokenizer.load(tokens / "tokenizer.json").definition)


def checkpoint(folder: Path, tokens: Path, family: str, shard: str = "1GB", **more: object) -> Any:
    """Write a random model with the tokenizer of the run in `tokens`."""
    model = random_model(family, **more)
    model.save_pretrained(folder, max_shard_size=shard)
    write_tokenizer(folder, tokens)
    return model


def change(folder: Path, **keys: object) -> None:
    """Change keys of a config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def all_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of all files of a checkpoint; without the rows of OPT's table of positions that nothing reads."""
    found = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return {name: tensor[2:] if "embed_positions" in name else tensor for name, tensor in found.items()}


def same_tensors(folder: Path, other: Path, tied: bool = False) -> bool:
    """Whether two checkpoints hold the same bits; a `tied` head may lie in one of them once more."""
    ours, theirs = all_tensors(folder), all_tensors(other)
    for head in ("lm_head.weight", "embed_out.weight") if tied else ():
        ours.pop(head, None), theirs.pop(head, None)
    same = (torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    return ours.keys() == theirs.keys() and all(same)


def farthest(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, of the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max())
