"""Merging domain experts, without training, into one model whose tokens choose among them in every layer."""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from demix.config.architecture import parameters
from demix.config.models import DENSE_EXPERT
from demix.data.shards import TokenShard, blocks
from demix.errors import DemixError
from demix.files import read_json, refuse_used
from demix.model.checkpoint import (
    describe,
    expert_lineage,
    expert_names,
    load_model,
    refuse_masked,
    refuse_other_tokenizer,
    refuse_routed,
    whole_models,
)
from demix.model.description import run_of
from demix.model.device import own_device
from demix.model.gpt import GPT, seeing
from demix.model.merge import learned_of, write_merged
from demix.model.scoring import EXPERT_TOKENS_AT_ONCE

# Blocks of a domain's dev split whose mean states route to its expert, and what the cosine to them is divided by.
BLOCKS = 20
TEMPERATURE = 0.1


def dev_shards(directory: Path, tokens: Path | None = None) -> dict[str, Path]:
    """The dev tokens `tokens`/<domain>/dev.arrow of each expert's domain; `tokens` is by default the folder of the run.

    Nobody has looked whether the files are there.
    """
    folder = run_of(directory) / "tokens" if tokens is None else tokens
    return {expert: folder / expert / "dev.arrow" for expert in expert_names(directory)}


def merge_routed(
    directory: Path, shards: Mapping[str, Path], output: Path, card: str | None = None, *, again: bool = False
) -> None:
    """Write a model to `output` in every layer of which each token chooses two of the experts in `directory`.

    `shards` are the dev tokens by expert, in the order that the merged layers have. A layer's feedforwards are those of
    the experts as they are. Its router's logit for an expert is the cosine of the layer's normed input with the mean of
    this input over the first `BLOCKS` blocks of the expert's dev tokens (`mean_states`), divided by `TEMPERATURE`: the
    router's rows are the means, with the length 1 / `TEMPERATURE`, and `cosine` in the architecture gives the states
    unit length. The shared weights and the tokenizer are copied. README.md holds `card`.

    Raises DemixError unless the experts are several ones that share layers, for tokens that are missing, empty or of
    another tokenizer, and for an `output` that is not empty, unless it may be made `again`.
    """
    if not again:
        refuse_used(output)
    _refuse_unmergeable(directory, shards)
    parents = {expert: expert_lineage(directory, expert) for expert in shards}
    texts = {expert: _opened(directory, expert, path) for expert, path in shards.items()}
    model = load_model(directory, tuple(shards)).to(own_device()).requires_grad_(False)
    means = torch.stack([mean_states(model.only(expert), text) for expert, text in texts.items()], 1)
    routers = F.normalize(means, dim=-1) / TEMPERATURE
    merged = {name: parameter.detach() for name, parameter in model.expert_tensors().items()}
    for number, router in enumerate(routers):
        merged[f"blocks.{number}.feedforward.router"] = router.to(model.token_embedding.dtype)
    architecture = model.architecture.merged_routed(len(shards))
    description = describe(directory) | {
        "kind": "merged",
        "architecture": architecture.described,
        "expert_parameters": parameters(architecture, model.vocab_size)[1],
    }
    learned, seeds = learned_of(parents.values())
    lineage = learned | {
        "choices": [
            {"expert": expert, "sha256": parents[expert]["sha256"], "data_sha256": read_json(beside)["sha256"]}
            for expert, beside in ((expert, path.with_suffix(".json")) for expert, path in shards.items())
        ],
        "seeds": seeds,
    }
    write_merged(directory, description, merged, lineage, output, card)


@torch.no_grad()
def mean_states(model: GPT, shard: TokenShard, count: int = BLOCKS) -> Tensor:
    """The mean normed input of each feedforward over the tokens of the first `count` blocks of `shard`.

    float64 [layers, D]. `model` has one expert, that of the shard's domain: the text passes through its feedforwards in
    all layers below. Padding does not count.
    """
    length, device = model.architecture.context, model.token_embedding.device
    inputs, _, mask = blocks(shard, length, count * length)
    sums = torch.zeros(len(model.blocks), model.architecture.width, dtype=torch.float64)
    counted: Tensor

    def add(number: int, given: Tensor) -> None:
        sums[number] += given[0][counted].double().sum(0).cpu()

    batch = max(1, EXPERT_TOKENS_AT_ONCE // length)
    with seeing(dict(enumerate(block.get_submodule("feedforward") for block in model.blocks)), add):
        for first in range(0, len(inputs), batch):
            rows = slice(first, first + batch)
            counted = torch.from_numpy(mask[rows]).to(device)
            model(torch.from_numpy(inputs[rows])[None].to(device))
    return sums / int(mask.sum())


def _refuse_unmergeable(directory: Path, shards: Mapping[str, Path]) -> None:
    """Raise DemixError unless the experts of the model in `directory` own feedforwards alone, and are several."""
    refuse_routed(directory, "are routed already")
    refuse_masked(directory, "has no states of a text that goes on")
    cure = "merge a model of kind demix"
    if whole_models(directory):
        raise DemixError(directory, "has experts that are whole models, which share no layer to choose in", cure)
    if describe(directory)["domain_tokens"]:
        raise DemixError(directory, "is a domain-token model, which has one expert", cure)
    if len(shards) < 2 or expert_names(directory) == (DENSE_EXPERT,):
        raise DemixError(directory, "has one expert, and tokens choose among several", cure)
    for expert, path in shards.items():
        if not path.is_file():
            cause = f"is missing, and the mean state of this text is what routes to the expert {expert}"
            raise DemixError(path, cause, "name the folder of <domain>/dev.arrow of every expert with --tokens")


def _opened(directory: Path, expert: str, path: Path) -> TokenShard:
    shard = TokenShard.open(path, verify=True)
    refuse_other_tokenizer(directory, path, shard.tokenizer_sha256, shard.vocab_size)
    if not len(shard):
        raise DemixError(path, f"holds no token to route to the expert {expert} by", "give the domain more dev text")
    return shard
