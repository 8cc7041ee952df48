"""Averaging the parameters of experts into one dense model, as Branch-Train-Merge does instead of mixing outputs."""

import math
import shutil
from functools import reduce
from pathlib import Path

import torch
from safetensors import safe_open

from demix.errors import DemixError
from demix.files import read_parquet, refuse_used, replacing, sha256_file, write_json
from demix.model.checkpoint import (
    blueprint,
    check_weights,
    describe,
    expert_files,
    expert_lineage,
    save_tensors,
    shapes_of,
)


def merge_experts(directory: Path, weights: dict[str, float], output: Path) -> None:
    """Write a model to `output` whose one expert `dense` is the average of the experts of `directory` by `weights`.

    Averages are computed in float64 and cast to the type of the experts. The shared weights are copied. Raises
    DemixError for weights that are negative or do not sum to 1, for an unknown expert, and for an `output` that is not
    empty.
    """
    refuse_used(output)
    _check_weights(weights)
    description = describe(directory)
    # Zero times an infinite parameter would be NaN, so an expert with weight zero is left out.
    parents = {name: expert_lineage(directory, name) for name, weight in weights.items() if weight}
    files = {name: expert_files(directory, name)[1] for name in parents}
    of_shared, of_expert = shapes_of(blueprint(directory, ("any",)))
    for name, path in files.items():
        check_weights(path, parents[name]["sha256"], of_expert)
    check_weights(directory / "shared.safetensors", description["shared_sha256"], of_shared)

    def weighted(name: str, key: str) -> torch.Tensor:
        with safe_open(files[name], "pt") as file:
            tensor: torch.Tensor = file.get_tensor(key)
        return weights[name] * tensor.double()

    with safe_open(next(iter(files.values())), "pt") as first:
        types = {key: first.get_tensor(key).dtype for key in first.keys()}  # noqa: SIM118
    merged = {
        key: reduce(torch.Tensor.add_, (weighted(name, key) for name in files)).to(dtype)
        for key, dtype in types.items()
    }

    origins = {name: {"weight": weights[name], "sha256": lineage["sha256"]} for name, lineage in parents.items()}
    data = {domain: sha256 for lineage in parents.values() for domain, sha256 in lineage.get("data_sha256", {}).items()}
    with replacing(output.resolve(), directory=True) as temporary:
        shutil.copyfile(directory / "shared.safetensors", temporary / "shared.safetensors")
        write_json(temporary / "model.json", description | {"kind": "merged"}, at=output / "model.json")
        (temporary / "experts").mkdir()
        path = temporary / "experts" / "dense.safetensors"
        save_tensors(merged, path)
        lineage = {
            "name": "dense",
            "parent": None,
            "parents": origins,
            "steps": max(lineage.get("steps", 0) for lineage in parents.values()),
            "tokens": sum(lineage.get("tokens", 0) for lineage in parents.values()),
            "data_sha256": data,
            "tokenizer_sha256": description.get("tokenizer_sha256"),
            "shared_sha256": description["shared_sha256"],
            "sha256": sha256_file(path),
        }
        write_json(path.with_suffix(".json"), lineage, at=output / "experts" / "dense.json")


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
        listed = ", ".join(there[:6]) + (", …" if len(there) > 6 else "")
        raise DemixError(path, f"holds no prior of {model}/{experts} on {domain} ({kind})", f"it has {listed}")
    return found


def _check_weights(weights: dict[str, float]) -> None:
    for name, weight in weights.items():
        if not weight >= 0:
            raise DemixError(f"weight of {name}", f"is {weight}", "give 0 or more")
    total = math.fsum(weights.values())
    if not abs(total - 1) <= 1e-6:
        raise DemixError("weights", f"sum to {total:.9g}", "give weights that sum to 1")
