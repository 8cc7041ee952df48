"""Averaging the parameters of experts into one dense model, as Branch-Train-Merge does instead of mixing outputs."""

import math
import shutil
from collections.abc import Collection, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from demix.errors import DemixError, nearest
from demix.files import read_parquet, refuse_used, replacing, sha256_file, write_json
from demix.model.directory import (
    describe,
    expert_files,
    expert_lineage,
    load_weights,
    model_shapes,
    refuse_routed,
    save_tensors,
    whole_models,
)
from demix.model.manifest import ExpertManifest, Learned
from demix.model.tokenizer import copy_tokenizer, tokenizer_path


def merge_experts(
    directory: Path, weights: dict[str, float], output: Path, card: str | None = None, *, again: bool = False
) -> None:
    """Write a model to `output` whose one expert `dense` is the average of the experts of `directory` by `weights`.

    Averages are computed in float64 and cast to the type of the experts. The shared weights and the tokenizer are
    copied. The tokens are those of `learned_of`. README.md holds `card` (`demix.report.card.merged_card`). Raises
    DemixError for weights that are negative or do not sum to 1, for an unknown expert, and for an `output` that is not
    empty, unless it may be made `again`.
    """
    if not again:
        refuse_used(output)
    described = describe(directory)
    load_weights(directory / "shared.safetensors", described.shared_sha256, model_shapes(directory)[0])
    merged, parents = averaged(directory, weights)
    origins = origins_of(weights, parents)
    learned, seeds = learned_of(parents.values())
    description = described.content | {"kind": "merged"}
    if whole_models(directory):
        # They share nothing, so nothing is left of the experts without a weight.
        description |= learned_by(learned, seeds)
    write_merged(directory, description, merged, {"parents": origins, "seeds": seeds} | learned, output, card)


def write_merged(
    directory: Path,
    description: Mapping[str, Any],
    merged: dict[str, torch.Tensor],
    lineage: Mapping[str, Any],
    output: Path,
    card: str | None,
    shared: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write the model of one expert `dense`, with the tensors `merged`, that was made of the model in `directory`.

    The tokenizer is copied, and so are the shared weights, unless there are others, `shared`. `lineage` says what the
    expert was made of.
    """
    tokenizer = tokenizer_path(directory)
    with replacing(output.resolve(), directory=True) as temporary:
        beside = temporary / "shared.safetensors"
        if shared is None:
            shutil.copyfile(directory / beside.name, beside)
        else:
            save_tensors(shared, beside)
            description = {**description, "shared_sha256": sha256_file(beside)}
        write_json(temporary / "model.json", dict(description), at=output / "model.json")
        copy_tokenizer(tokenizer, temporary)
        if card is not None:
            (temporary / "README.md").write_text(card, encoding="utf-8")
        (temporary / "experts").mkdir()
        path = temporary / "experts" / "dense.safetensors"
        save_tensors(merged, path)
        belongs = {
            "name": "dense",
            "parent": None,
            "tokenizer_sha256": description.get("tokenizer_sha256"),
            "shared_sha256": description["shared_sha256"],
            "sha256": sha256_file(path),
        }
        write_json(path.with_suffix(".json"), {**lineage, **belongs}, at=output / "experts" / "dense.json")


def averaged(
    directory: Path, weights: Mapping[str, float]
) -> tuple[dict[str, torch.Tensor], dict[str, ExpertManifest]]:
    """The average of what the experts of `directory` own, by `weights`, and the descriptions of these experts.

    Averages are computed in float64 and cast to the type of the experts; one tensor of each expert is in memory at a
    time. Raises DemixError for weights that are negative or do not sum to 1, and for an unknown or damaged expert.
    """
    refuse_routed(directory, "have no average")
    refuse_weights(weights)
    # Zero times an infinite parameter would be NaN, so an expert with weight zero is left out.
    parents = {name: expert_lineage(directory, name) for name, weight in weights.items() if weight}
    files = {name: expert_files(directory, name)[1] for name in parents}
    shapes = model_shapes(directory)[1]
    for name, path in files.items():
        load_weights(path, parents[name].sha256, shapes)

    def weighted(name: str, key: str) -> torch.Tensor:
        with safe_open(files[name], "pt") as file:
            tensor: torch.Tensor = file.get_tensor(key)
        return weights[name] * tensor.double()

    with safe_open(next(iter(files.values())), "pt") as first:
        types = {key: first.get_tensor(key).dtype for key in first.keys()}  # noqa: SIM118
    # Neither the order of the experts nor their names change a bit.
    order = sorted(files, key=lambda name: (parents[name].sha256, weights[name]))
    tensors = {
        key: reduce(torch.Tensor.add_, (weighted(name, key) for name in order)).to(dtype)
        for key, dtype in types.items()
    }
    return tensors, parents


def learned_of(experts: Collection[Learned]) -> tuple[dict[str, Any], dict[str, int]]:
    """The steps, tokens and data of several `experts` together, and the tokens of their seeds by sha256.

    A seed that several of them began with counts once.
    """
    seeds = {sha256: tokens for one in experts for sha256, tokens in one.seeds.items()}
    own = sum((one.tokens or 0) - sum(one.seeds.values()) for one in experts)
    return {
        "steps": max(one.steps or 0 for one in experts),
        "tokens": sum(seeds.values()) + own,
        "data_sha256": {domain: sha256 for one in experts for domain, sha256 in one.data_sha256.items()},
    }, seeds


def learned_by(learned: Mapping[str, Any], seeds: Mapping[str, int]) -> dict[str, Any]:
    """What `learned_of` says of whole models, as the description of a model that was made of these alone."""
    seeded = sum(seeds.values())
    return {**learned, "tokens_seed": seeded, "tokens_branch": learned["tokens"] - seeded}


def origins_of(weights: Mapping[str, float], parents: Mapping[str, ExpertManifest]) -> dict[str, dict[str, Any]]:
    """What an average of experts records of its `parents`: the weight and the sha256 of each."""
    return {name: {"weight": weights[name], "sha256": lineage.sha256} for name, lineage in parents.items()}


def parse_weights(text: str, option: str = "--weights") -> dict[str, float]:
    """The value of `option`, such as `parliament=0.5,novels=0.5`, as weights by expert."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = part.strip().partition("=")
        try:
            if not equals or name in weights:
                raise ValueError
            weights[name] = float(number)
        except ValueError:
            cure = "give each expert once, as in parliament=0.5,novels=0.5"
            raise DemixError(f"{option} {text}", f"{part.strip()!r} is no weight", cure) from None
    return weights


def prior_weights(path: Path, model: str, domain: str, experts: str, kind: str = "history") -> dict[str, float]:
    """The prior of a domain over the experts of a model, from a table of priors.

    `kind` is the column weights: `history` of the cached prior with these weights, or `fitted`.

    `path` is evaluations/<domain>.priors.parquet or a run's priors.parquet. `experts` is the label of the set of
    experts: training, all or minus-<domain>. Raises DemixError if the table has no such prior.
    """
    rows = read_parquet(path).to_pylist()
    wanted = {"model": model, "domain": domain, "experts": experts, "weights": kind}
    found = {row["expert"]: row["prior"] for row in rows if wanted.items() <= row.items()}
    if not found:
        there = sorted({f"{row['model']}/{row['experts']} on {row['domain']}" for row in rows})
        wanted_name = f"{model}/{experts} on {domain}"
        raise DemixError(
            path, f"holds no prior of {wanted_name} ({kind})", nearest(wanted_name, there, "evaluate first")
        )
    return found


def refuse_weights(weights: Mapping[str, float]) -> None:
    """Raise DemixError for weights that are negative or do not sum to 1."""
    for name, weight in weights.items():
        if not weight >= 0:
            raise DemixError(f"weight of {name}", f"is {weight}", "give 0 or more")
    total = sum_of(weights)
    if not abs(total - 1) <= 1e-6:
        raise DemixError("weights", f"sum to {total:.9g}", "give weights that sum to 1")


def sum_of(weights: Mapping[str, float]) -> float:
    """The sum of `weights`, infinite where it is more than a float holds."""
    try:
        return math.fsum(weights.values())
    except OverflowError:
        return math.inf
