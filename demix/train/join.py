"""Experts that are whole models and were trained one by one, joined to one model with one file of metrics."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, harmonic_mean
from typing import Any

from demix.errors import DemixError
from demix.files import check_sha256, read_json_lines, replacing, write_json, write_json_lines
from demix.model.directory import describe, expert_files, expert_lineage, expert_names
from demix.model.tokenizer import copy_tokenizer, tokenizer_path

# What each branch counts for itself.
OWN = ("tokens", "tokens_branch", "data_sha256")


def join_branches(branches: Sequence[Path], output: Path) -> None:
    """Make one model directory `output` of the models in `branches`, each with one expert that is a whole model.

    The tokens of a seed phase count once. Raises DemixError if a branch is damaged, differs from the first in more than
    its data, or has an expert of its name.
    """
    first, *others = descriptions = [describe(branch).content for branch in branches]
    for branch, other in zip(branches[1:], others, strict=True):
        for key in sorted((first.keys() | other.keys()) - {*OWN}):
            if first.get(key) != other.get(key):
                cause = f"has {key} {other.get(key)} where {branches[0]} has {first.get(key)}"
                raise DemixError(branch / "model.json", cause, "train all experts with the same settings")
    seed = first.get("tokens_seed", 0)
    branched = sum(one["tokens"] - seed for one in descriptions)
    whole = first | {
        "tokens": seed + branched,
        "data_sha256": {name: sha256 for one in descriptions for name, sha256 in one["data_sha256"].items()},
    }
    with replacing(output, directory=True) as temporary:
        (temporary / "experts").mkdir()
        shutil.copyfile(branches[0] / "shared.safetensors", temporary / "shared.safetensors")
        model = whole | ({"tokens_branch": branched} if "tokens_branch" in first else {})
        write_json(temporary / "model.json", model, at=output / "model.json")
        copy_tokenizer(tokenizer_path(branches[0]), temporary)
        for branch in branches:
            for name in expert_names(branch):
                lineage = expert_lineage(branch, name)
                description, weights = (temporary / "experts" / f"{name}{end}" for end in (".json", ".safetensors"))
                if description.exists():
                    raise DemixError(branch, f"has an expert {name}, as a branch before it", "name each branch once")
                # No link: Snakemake touches outputs one by one, and with a link this input, which is then the newer.
                shutil.copyfile(expert_files(branch, name)[1], weights)
                check_sha256(weights, lineage.sha256)
                write_json(description, lineage.content, at=output / "experts" / description.name)


def join_metrics(metrics: Sequence[Path], output: Path) -> None:
    """Write the metrics of several trainings with the same steps as those of one, in `output`.

    Tokens are the sum over the trainings, those of a seed phase once. A loss is the mean over the trainings, and the
    tokens per second are those of one process that takes the trainings in turn. Norms of gradients stay with their
    trainings. Raises DemixError if the steps differ.
    """
    parts = [read_json_lines(path) for path in metrics]
    for path, rows in zip(metrics, parts, strict=True):
        if [row["step"] for row in rows] != [row["step"] for row in parts[0]]:
            raise DemixError(path, f"has other steps than {metrics[0]}", "train all experts with the same settings")
    begun = next((row["tokens"] for row in parts[0] if "branched_from" in row), 0)
    write_json_lines(output, [_joined(rows, begun) for rows in zip(*parts, strict=True)])


def _joined(rows: Sequence[Mapping[str, Any]], begun: int) -> dict[str, Any]:
    """One row of the rows that several trainings have for the same event, where `begun` is the seed's tokens."""
    joined = {key: value for row in rows for key, value in row.items() if key not in ("gradient_norm", "loss_scale")}
    joined["tokens"] = begun + sum(row["tokens"] - begun for row in rows)
    joined |= {key: fmean(row[key] for row in rows) for key in ("loss", "dev_loss") if key in joined}
    if "tokens_per_second" in joined:
        joined["tokens_per_second"] = harmonic_mean([row["tokens_per_second"] for row in rows])
    if "synced_bytes" in joined:
        joined["synced_bytes"] = sum(row["synced_bytes"] for row in rows)
    return joined
