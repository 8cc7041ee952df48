"""Small models with made-up weights, and their directories."""

from pathlib import Path
from weakref import WeakSet

import pytest
import torch
from torch import nn

from demix.config.architecture import Architecture
from demix.config.counts import parameters
from demix.model.checkpoint import describe, expert_lineage, load_model, save_expert, save_shared
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
    experts: tuple[str, ...] = ("dense",), dtype: torch.dtype = torch.float64, *, architecture: Architecture = SMALL,
    vocab_size: int = 50, **more: object,
) -> GPT:  # fmt: skip
    model = GPT(architecture, vocab_size, experts, **more).to(dtype)
    randomise(model)
    return model


def alone(model: GPT, expert: str, scope: str = "feedforward") -> GPT:
    """One expert of a stacked model as a model of its own, with a copy of what they share."""
    number, own = model.experts.index(expert), model.expert_tensors()
    single = GPT(model.architecture, model.vocab_size, (expert,), expert_scope=scope).to(model.token_embedding.dtype)
    single.load_state_dict({name: p[number : number + 1] if name in own else p for name, p in model.named_parameters()})
    return single


def save_model(model: GPT, directory: Path, tokenizer: str = "t" * 64, kind: str = "demix", **more: object) -> None:
    """The directory of a model with all its experts; `more` goes into the records of all."""
    about = {"tokenizer_sha256": tokenizer} | more
    save_shared(model, directory, {"kind": kind} | about)
    for expert in model.experts:
        save_expert(model, expert, directory, {"parent": None} | about)


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
    save_shared(model, directory, {"kind": "demix"} | counts | seen)
    for number, expert in enumerate(experts):
        lineage = {"parent": None, "steps": 9, "tokens": 30 + number, "data_sha256": {expert: f"{number:x}" * 64}}
        save_expert(model, expert, directory, lineage | {"tokenizer_sha256": tokenizer})
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
        save_shared(own, output, describe(directory))
        save_expert(own, name, output, expert_lineage(directory, name))
    return output
