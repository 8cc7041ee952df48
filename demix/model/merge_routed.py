"""Merging domain experts, without training, into one model whose tokens choose among them in every layer."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from demix.config.counts import parameters
from demix.config.models import DENSE_EXPERT
from demix.data.shards import TokenShard, blocks
from demix.errors import DemixError
from demix.files import read_json
from demix.model.device import own_device, set_threads
from demix.model.directory import (
    Tensors,
    assembled,
    describe,
    expert_files,
    expert_lineage,
    expert_names,
    load_expert,
    load_model,
    refuse_masked,
    refuse_other_tokenizer,
    refuse_routed,
    save_model,
    tokenizer_path,
    whole_models,
)
from demix.model.gpt import GPT, seeing
from demix.model.manifest import Branched, run_of
from demix.model.merge import averaged, learned_by, learned_of
from demix.model.scoring import EXPERT_TOKENS_AT_ONCE, log_probabilities

# Blocks of each domain's dev split from which routers are solved, and those behind them, which choose the factor of the
# logits.
BLOCKS = 40
TO_CHOOSE = 10
# Of the ridge, in shares of the mean diagonal of XᵀX.
PENALTY = 1e-4
FACTORS = (1.0, 3.0, 5.0, 10.0, 20.0)
# Σxxᵀ [layers, D, D] and Σx [layers, D] of the states x of one expert's text.
Moments = tuple[Tensor, Tensor]


def dev_shards(directory: Path, tokens: Path | None = None) -> dict[str, Path]:
    """The dev tokens `tokens`/<domain>/dev.arrow of each expert's domain; `tokens` is by default the folder of the run.

    Nobody has looked whether the files are there.
    """
    folder = run_of(directory) / "tokens" if tokens is None else tokens
    return {expert: folder / expert / "dev.arrow" for expert in expert_names(directory)}


def merge_routed(directory: Path, shards: Mapping[str, Path], output: Path, card: str | None = None) -> None:
    """Write a model to `output` in every layer of which each token chooses two of the experts in `directory`.

    `shards` are the dev tokens by expert, in the order that the merged layers have. A layer's feedforwards are those of
    the experts as they are, and all other weights those of `joint`. Its router tells the domain of a token from the
    layer's normed input by ridge regression (`solved`), over the first `BLOCKS` blocks of each domain, which pass
    through the domain's own expert. The factor of the logits is that with the least mean loss of the merged model on
    `TO_CHOOSE` blocks behind them. The tokenizer is copied. README.md holds `card`. Experts that learned next to an
    anchor are merged with it, and no text is read (`_anchored`).

    Raises DemixError unless the experts are several ones, and for tokens that are missing, empty or of another
    tokenizer.
    """
    _refuse_unmergeable(directory, shards)
    anchored, described = learned_anchored(directory), describe(directory)
    model, lineage = (_anchored if anchored else _by_ridge)(directory, shards)
    parents = {expert: expert_lineage(directory, expert) for expert in shards}
    learned = learned_of(parents.values())
    shared_parameters, expert_parameters = parameters(model.architecture, model.vocab_size)
    description = described.content | {
        "kind": "merged",
        "shared_parameters": shared_parameters,
        "expert_parameters": expert_parameters,
    }
    if whole_models(directory):
        description |= {"expert_scope": "feedforward", **learned_by(learned)}
    lineage |= learned | {"parent": None, "tokenizer_sha256": described.tokenizer_sha256}
    lineage["choices"] += [
        {
            "expert": expert,
            "sha256": parents[expert].sha256,
            "data_sha256": None if anchored else read_json(path.with_suffix(".json"))["sha256"],
        }
        for expert, path in shards.items()
    ]
    save_model(model, output, description, lineage, tokenizer_path(directory), card)


def _by_ridge(directory: Path, shards: Mapping[str, Path]) -> tuple[GPT, dict[str, Any]]:
    """The merge of experts whose routers are solved from their text, and how they were."""
    texts = {expert: _opened(directory, expert, path) for expert, path in shards.items()}
    model = joint(directory, tuple(shards)).to(own_device()).requires_grad_(False)
    kept = {
        name: moments(model.only(name), text, _parted(text, model.architecture.context)[0])
        for name, text in texts.items()
    }
    routers, own = solved(kept), dict[str, Tensor](model.expert_tensors())
    for number, router in enumerate(routers):
        own[f"blocks.{number}.feedforward.router"] = router.to(model.token_embedding)
    routed = model.architecture.merged_routed(len(shards))
    merged = assembled(routed, model, dict(model.shared_tensors()), {DENSE_EXPERT: own}).requires_grad_(False)
    factor = _least_loss(merged, routers, texts)
    _set_routers(merged, factor * routers)
    return merged, {"choices": [], "router": {"factor": factor}}


def _anchored(directory: Path, experts: Iterable[str]) -> tuple[GPT, dict[str, Any]]:
    """The merge of experts with their anchor: feedforwards and rows of routers as they are, the anchor's first.

    Nothing is trained jointly (FlexOlmo, Shi et al. 2025, arXiv 2507.07024). With it comes what the lineage says of the
    anchor. Raises DemixError where two experts have other shared weights, or another anchor.
    """
    shared: Tensors = {}
    stacks: dict[str, list[Tensor]] = {}
    for expert in experts:
        model = load_model(directory, (expert,))
        for name, parameter in model.named_parameters():
            tensor = parameter.detach()
            if ".feedforward." in name:
                anchor, own = torch.split(tensor[0], 1)
                stacks.setdefault(name, [anchor]).append(own)
                same = torch.equal(anchor, stacks[name][0])
            else:
                same = torch.equal(tensor, shared.setdefault(name, tensor))
            if not same:
                cause = f"has another {name} than the experts before it, which training does not change"
                raise DemixError(expert_files(directory, expert)[1], cause, "merge experts of one parent")
    described = describe(directory)
    stacked = {name: torch.cat(stack) for name, stack in stacks.items()}
    choices = len(next(iter(stacked.values())))
    merged = assembled(described.architecture.merged_routed(choices), described, shared, {DENSE_EXPERT: stacked})
    parent = described.parent.state_sha256 if isinstance(described.parent, Branched) else None
    return merged, {"choices": [{"expert": DENSE_EXPERT, "sha256": parent, "data_sha256": None}]}


def learned_anchored(directory: Path) -> bool:
    """Whether the experts in `directory` are whole models, each with an anchor next to its own feedforwards."""
    return whole_models(directory) and bool(describe(directory).architecture.routed)


def joint(directory: Path, experts: tuple[str, ...]) -> GPT:
    """The model in `directory` with the feedforwards of `experts`, stacked in that order, and weights that they share.

    Experts that are whole models share none: all tensors but those of feedforwards are their average by equal weights
    (Branch-Train-MiX, Sukhbaatar et al. 2024, section 3.2). Raises DemixError as `load_model` and `averaged` do.
    """
    if not whole_models(directory):
        return load_model(directory, experts)
    average, described = averaged(directory, dict.fromkeys(experts, 1 / len(experts))), describe(directory)
    parts = {expert: load_expert(directory, expert).items() for expert in experts}
    own = {expert: {name: part for name, part in parts[expert] if ".feedforward." in name} for expert in experts}
    shared = {name: part.detach() for name, part in average.named_parameters() if ".feedforward." not in name}
    return assembled(described.architecture, described, shared, own)


@torch.no_grad()
def moments(model: GPT, shard: TokenShard, count: int) -> Moments:
    """Σxxᵀ and Σx of the normed inputs x of each feedforward over the tokens of the first `count` blocks of `shard`.

    float64 [layers, D, D] and [layers, D]. `model` has one expert, that of the shard's domain: the text passes through
    its feedforwards in all layers below. Padding does not count.
    """
    length, device = model.architecture.context, model.token_embedding.device
    inputs, _, mask = blocks(shard, length, count * length)
    layers, width = len(model.blocks), model.architecture.width
    squares = torch.zeros(layers, width, width, dtype=torch.float64)
    sums = torch.zeros(layers, width, dtype=torch.float64)
    counted: Tensor

    def add(number: int, given: Tensor) -> None:
        states = given[0][counted].double()
        squares[number] += (states.T @ states).cpu()
        sums[number] += states.sum(0).cpu()

    batch = max(1, EXPERT_TOKENS_AT_ONCE // length)
    with seeing(dict(enumerate(block.get_submodule("feedforward") for block in model.blocks)), add):
        for first in range(0, len(inputs), batch):
            rows = slice(first, first + batch)
            counted = torch.from_numpy(mask[rows]).to(device)
            model(torch.from_numpy(inputs[rows])[None].to(device))
    return squares.triu() + squares.triu(1).mT, sums


def solved(kept: Mapping[str, Moments]) -> Tensor:
    """The routers [layers, E, D] that tell the domain of a token best: ((XᵀX + λI)⁻¹XᵀY)ᵀ of each layer.

    `kept` has the sums of each expert, in the order of the rows; no other bit depends on that order. X are the states
    of all domains, and Y is 1 where a state is of the domain. λ is `PENALTY` times the mean of XᵀX's diagonal (DUME,
    arXiv 2603.29765).
    """
    names = sorted(kept)
    squares, sums = (torch.stack(each) for each in zip(*(kept[name] for name in names), strict=True))
    total = squares.sum(0)
    diagonal = total.diagonal(dim1=-2, dim2=-1)
    damped = total + torch.diag_embed((PENALTY * diagonal.mean(-1, keepdim=True)).expand_as(diagonal))
    solution: Tensor = torch.linalg.solve(damped, sums.permute(1, 2, 0))
    return solution.mT[:, [names.index(name) for name in kept]]


def _parted(shard: TokenShard, length: int) -> tuple[int, int]:
    """The numbers of the block behind those that routers are solved from and behind those that choose among them.

    A fifth of the blocks of a short text chooses, and at least one.
    """
    end = min(-(-len(shard) // length), BLOCKS + TO_CHOOSE)
    return max(1, end * BLOCKS // (BLOCKS + TO_CHOOSE)), end


def _least_loss(model: GPT, routers: Tensor, texts: Mapping[str, TokenShard]) -> float:
    """The factor of `routers` by which the merged `model` has the least mean loss, each domain counting once."""
    length = model.architecture.context
    parts = {name: _parted(shard, length) for name, shard in texts.items()}
    cuts = [
        blocks(texts[name], length, end * length, min(start, end - 1) * length) for name, (start, end) in parts.items()
    ]
    losses = {}
    for factor in FACTORS:
        _set_routers(model, factor * routers)
        losses[factor] = -math.fsum(float(log_probabilities(model, *cut).mean()) for cut in cuts) / len(cuts)
    # A comparison with NaN is false.
    finite = {factor: loss for factor, loss in losses.items() if math.isfinite(loss)}
    if not finite:
        raise DemixError("model", "gives tokens no finite log-probability by any router", "train its experts again")
    return min(finite, key=finite.__getitem__)


def _set_routers(model: GPT, routers: Tensor) -> None:
    """Give `model` the `routers` [layers, E, D]."""
    for number, router in enumerate(routers):
        model.get_parameter(f"blocks.{number}.feedforward.router").copy_(router)


def _refuse_unmergeable(directory: Path, shards: Mapping[str, Path]) -> None:
    """Raise DemixError unless the experts of the model in `directory` are several causal ones."""
    if not learned_anchored(directory):
        refuse_routed(directory, "are routed already")
    refuse_masked(directory, "has no states of a text that goes on")
    if len(shards) < 2 or expert_names(directory) == (DENSE_EXPERT,):
        cure = "merge a model of kind demix, branched or anchored"
        raise DemixError(directory, "has one expert, and tokens choose among several", cure)


def _opened(directory: Path, expert: str, path: Path) -> TokenShard:
    if not path.is_file():
        cause = f"is missing, and routers are solved from this text for the expert {expert}"
        raise DemixError(path, cause, "name the folder of <domain>/dev.arrow of every expert with --tokens")
    shard = TokenShard.open(path, verify=True)
    refuse_other_tokenizer(directory, path, shard.tokenizer_sha256, shard.vocab_size)
    if not len(shard):
        raise DemixError(path, f"holds no token to route to the expert {expert} by", "give the domain more dev text")
    return shard


def merge_shards(model: Path, shards: list[Path], output: Path, threads: int = 1) -> None:
    """Merge domain experts, without training, into a model whose tokens choose two of them in every layer.

    `shards` are the tokens/<domain>/dev.arrow of each expert to merge, in order.
    """
    set_threads(threads)
    merge_routed(model, {path.parent.name: path for path in shards}, output)
