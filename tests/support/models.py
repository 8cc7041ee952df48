"""Small models with made-up weights, and their directories."""

from pathlib import Path
from weakref import WeakSet

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demix.config.architecture import Architecture
from demix.config.counts import parameters
from demix.model.directory import (
    describe,
    expert_lineage,
    load_model,
    save_expert,
    save_files,
    save_manifest,
    save_shared,
)
from demix.model.gpt import GPT

SMALL = Architecture(layers=2, width=32, heads=4, context=16)
THREE = ("law", "news", "code")
REAL_TEXT = """It is a truth universally acknowledged, that a single man in possession of a good fortune,
must be in want of a wife. Permission is hereby granted, free of charge, to any person obtaining a copy."""


def randomise(module: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.3)


def model_of(
    experts: tuple[str, ...] = ("dense",),
    dtype: torch.dtype = torch.float64,
    *,
    architecture: Architecture = SMALL,
    vocab_size: int = 50,
    **more: object,
) -> GPT:
    model = GPT(architecture, vocab_size, experts, **more).to(dtype)
    randomise(model)
    return model


def own_tensors(model: GPT) -> dict[str, nn.Parameter]:
    """The parameters that belong to experts, by name. Those of feedforwards are stacked: [E, ...]."""
    return {name: p for name, p in model.named_parameters() if model.owned(name)}


def shared_tensors(model: GPT) -> dict[str, nn.Parameter]:
    """The parameters that every expert uses, by name."""
    return {name: p for name, p in model.named_parameters() if not model.owned(name)}


def alone(model: GPT, expert: str, scope: str = "feedforward") -> GPT:
    """One expert of a stacked model as a model of its own, with a copy of what they share."""
    number, own = model.experts.index(expert), own_tensors(model)
    single = GPT(model.architecture, model.vocab_size, (expert,), expert_scope=scope).to(model.token_embedding.dtype)
    single.load_state_dict({name: p[number : number + 1] if name in own else p for name, p in model.named_parameters()})
    return single


def save_model(model: GPT, directory: Path, tokenizer: str = "t" * 64, kind: str = "demix", **more: object) -> None:
    """The directory of a model with all its experts; `more` goes into the records of all."""
    about = {"tokenizer_sha256": tokenizer} | more
    save_files(model, directory, {"kind": kind} | about, {"parent": None} | about)


def write_model(
    directory: Path,
    experts: tuple[str, ...] = THREE,
    tokenizer: str = "t" * 64,
    vocab_size: int = 50,
    seed: int = 0,
    architecture: Architecture = SMALL,
) -> GPT:
    model = GPT(architecture, vocab_size, experts)
    randomise(model, seed)
    counts = dict(zip(("shared_parameters", "expert_parameters"), parameters(architecture, vocab_size), strict=True))
    seen = {"tokens": 90, "steps": 9, "tokenizer_sha256": tokenizer}
    shared = {"shared_sha256": save_shared(model, directory), "tokenizer_sha256": tokenizer}
    for number, expert in enumerate(experts):
        lineage = {"parent": None, "steps": 9, "tokens": 30 + number, "data_sha256": {expert: f"{number:x}" * 64}}
        save_expert(model, expert, directory, lineage | shared)
    save_manifest(model, directory, experts, {"kind": "demix"} | counts | seen)
    return model


def count_whole_models(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets how many experts that are whole models are in memory, whenever the weights of one are loaded from now on."""
    models: WeakSet[GPT] = WeakSet()
    found: list[int] = []
    load = GPT.load_state_dict

    def counted(self: GPT, *arguments: object, **named: object) -> object:
        loaded = load(self, *arguments, **named)
        if self.expert_scope == "model":
            models.add(self)
            found.append(sum(model.token_embedding.device.type != "meta" for model in models))
        return loaded

    monkeypatch.setattr(GPT, "load_state_dict", counted)
    return found


def write_trunks(directory: Path, output: Path) -> Path:
    """The model in `directory` with each expert as a whole model of its own, which has a copy of what they shared."""
    stacked = load_model(directory)
    for name in stacked.experts:
        own = alone(stacked, name, "model")
        shared = {"shared_sha256": save_shared(own, output)}
        save_expert(own, name, output, expert_lineage(directory, name).content | shared)
    save_manifest(own, output, stacked.experts, describe(directory).content)
    return output


# Names of a block's tensors in torch's encoder layer.
TORCH_NAMES = {
    "attention.qkv.weight": "self_attn.in_proj_weight",
    "attention.qkv.bias": "self_attn.in_proj_bias",
    "attention.out.weight": "self_attn.out_proj.weight",
    "attention.out.bias": "self_attn.out_proj.bias",
    "attention_norm.weight": "norm1.weight",
    "attention_norm.bias": "norm1.bias",
    "feedforward_norm.weight": "norm2.weight",
    "feedforward_norm.bias": "norm2.bias",
    "feedforward.up": "linear1.weight",
    "feedforward.up_bias": "linear1.bias",
    "feedforward.down": "linear2.weight",
    "feedforward.down_bias": "linear2.bias",
}


def torch_name(name: str) -> str | None:
    """The name in `torch_encoder` of a tensor of a block; None for those that no block has."""
    parts = name.split(".", 2)
    return f"layers.{parts[1]}.{TORCH_NAMES[parts[2]]}" if parts[0] == "blocks" else None


def torch_encoder(model: GPT, expert: int = 0) -> nn.TransformerEncoder:
    """The blocks of one expert of a model with GPT-2's options as torch's own encoder: norms before, exact GELU."""
    sizes = model.architecture
    layer = nn.TransformerEncoderLayer(
        sizes.width, sizes.heads, sizes.inner_width, 0.0, F.gelu, batch_first=True, norm_first=True
    )
    encoder = nn.TransformerEncoder(layer, sizes.layers, enable_nested_tensor=False).to(model.token_embedding.dtype)
    own = {torch_name(name): p[expert] if ".feedforward." in name else p for name, p in model.named_parameters()}
    encoder.load_state_dict({name: tensor.detach() for name, tensor in own.items() if name})
    return encoder


def gradient_named(encoder: nn.TransformerEncoder, name: str) -> Tensor:
    """The gradient in `torch_encoder` of the tensor of a block that demix calls `name`."""
    gradient = encoder.get_parameter(str(torch_name(name))).grad
    assert gradient is not None
    return gradient
