"""Small models with made-up weights, and their directories."""

from pathlib import Path

import torch
from torch import nn

from demix.config.architecture import Architecture, expert_parameters, shared_parameters
from demix.model.checkpoint import save_expert, save_shared
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


def model_of(experts: tuple[str, ...], dtype: torch.dtype = torch.float64, **more: object) -> GPT:
    model = GPT(SMALL, 50, experts, **more).to(dtype)
    randomise(model)
    return model


def write_model(
    directory: Path, experts: tuple[str, ...] = THREE, tokenizer: str = "t" * 64, vocab_size: int = 50, seed: int = 0
) -> GPT:
    model = GPT(SMALL, vocab_size, experts)
    randomise(model, seed)
    counts = {
        "shared_parameters": shared_parameters(SMALL, vocab_size),
        "expert_parameters": expert_parameters(SMALL),
    }
    seen = {"tokens": 90, "steps": 9, "tokenizer_sha256": tokenizer}
    save_shared(model, directory, {"kind": "demix"} | counts | seen)
    for number, expert in enumerate(experts):
        lineage = {"parent": None, "steps": 9, "tokens": 30 + number, "data_sha256": {expert: str(number) * 64}}
        save_expert(model, expert, directory, lineage | {"tokenizer_sha256": tokenizer})
    return model
