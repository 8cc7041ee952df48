"""Modular model directories: `model.json`, `shared.safetensors` and one pair of files for each expert.

No file lists the experts: the folder is the list. Adding a domain adds a file, and removing a domain removes a file. An
expert exists when its description (`.json`) exists: the description is written last and removed first. With
`expert_scope: model` in `model.json` each expert is a whole model and the experts share no tensor. Otherwise an expert
owns its feedforwards alone.
"""

import dataclasses
import hashlib
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file

from demix.config.architecture import Architecture
from demix.errors import DemixError
from demix.files import read_json, replacing, sha256_file, write_json
from demix.model.gpt import GPT

# Far above any weight that a training leaves, and far below what overflows in a product of two.
LARGEST = 1e6


def save_shared(model: GPT, directory: Path, description: dict[str, Any]) -> None:
    """Write `model.json` (architecture, `description`) and `shared.safetensors` below `directory`."""
    shared = directory / "shared.safetensors"
    _save({name: tensor.detach() for name, tensor in model.shared_tensors().items()}, shared)
    write_json(
        directory / "model.json",
        description
        | {
            "architecture": dataclasses.asdict(model.architecture),
            "vocab_size": model.vocab_size,
            "domain_tokens": list(model.domain_tokens),
            "shared_sha256": sha256_file(shared),
        }
        | ({} if model.expert_scope == "feedforward" else {"expert_scope": model.expert_scope}),
    )


def save_expert(
    model: GPT,
    expert: str,
    directory: Path,
    lineage: dict[str, Any],
    name: str | None = None,
    output: Path | None = None,
) -> None:
    """Write expert `expert` of `model` as `experts/<name>.safetensors` with its `lineage` beside it.

    Call `save_shared` first: the description of an expert records the sha256 of the shared weights in `directory`. The
    files go below `output`, by default `directory`.
    """
    name = name or expert
    path = (output or directory) / "experts" / f"{name}.safetensors"
    _, experts = model.parted({key: tensor.detach() for key, tensor in model.expert_tensors().items()})
    _save(experts[expert], path)
    belongs = {"name": name, "sha256": sha256_file(path), "shared_sha256": describe(directory)["shared_sha256"]}
    write_json(path.with_suffix(".json"), lineage | belongs)


def describe(directory: Path) -> dict[str, Any]:
    """The `model.json` of a model directory. Raises DemixError if the file is missing or does not describe a model."""
    path = Path(directory) / "model.json"
    description = read_json(path)
    needed = ("architecture", "vocab_size", "domain_tokens", "shared_sha256")
    if not isinstance(description, dict) or any(key not in description for key in needed):
        raise DemixError(path, "does not describe a model", "train the model again")
    return description


def expert_lineage(directory: Path, expert: str) -> dict[str, Any]:
    """The description of an expert of the model in `directory`.

    Raises DemixError if the expert is missing, and if its shared weights or its tokenizer are not those of the model.
    """
    path = Path(directory) / "experts" / f"{expert}.json"
    if not path.is_file():
        there = ", ".join(expert_names(directory)) or "none"
        raise DemixError(path, "is missing", f"choose one of the experts of this model: {there}")
    lineage = read_json(path)
    if not isinstance(lineage, dict) or not {"sha256", "shared_sha256"} <= lineage.keys():
        raise DemixError(path, "does not describe an expert", "train or adapt it again")
    if lineage.get("name", expert) != expert:
        raise DemixError(path, f"describes the expert {lineage['name']}", "give it its name back")
    description = describe(directory)
    if lineage["shared_sha256"] != description["shared_sha256"]:
        raise DemixError(path, "belongs to other shared weights than the model's", "train or adapt it again")
    refuse_other_tokenizer(directory, path, lineage.get("tokenizer_sha256"))
    return lineage


def refuse_other_tokenizer(directory: Path, subject: Path, sha256: str | None) -> None:
    """Raise DemixError unless `sha256`, the tokenizer of `subject`, is that of the model in `directory`."""
    own = describe(directory).get("tokenizer_sha256")
    if sha256 != own:
        raise DemixError(
            subject,
            f"is of another tokenizer ({str(sha256)[:12]}) than the model {directory} ({str(own)[:12]})",
            "use the tokenizer that the model was trained with, or train the model again",
        )


def expert_names(directory: Path) -> tuple[str, ...]:
    """The names of the experts in a model directory, sorted."""
    return tuple(sorted(path.stem for path in (Path(directory) / "experts").glob("[!.]*.json")))


def blueprint(directory: Path, experts: tuple[str, ...]) -> GPT:
    """The model that `model.json` describes, with `experts`, on the meta device: it has shapes but no values."""
    description = describe(directory)
    try:
        with torch.device("meta"):
            return GPT(
                Architecture(**description["architecture"]),
                description["vocab_size"],
                experts,
                tuple(description["domain_tokens"]),
                description.get("expert_scope", "feedforward"),
            )
    except (TypeError, RuntimeError) as error:
        path = Path(directory) / "model.json"
        raise DemixError(path, f"does not describe a model ({error})", "train the model again") from None


def load_experts(directory: str | Path, experts: tuple[str, ...] | None = None) -> list[GPT]:
    """The trunks of the model in `directory`. Together the trunks have `experts` (by default all), in that order.

    The list holds one model with all experts stacked. With `expert_scope: model` in `model.json` it holds one model per
    expert. Raises DemixError as `load_model` does.
    """
    experts = expert_names(Path(directory)) if experts is None else tuple(experts)
    if describe(Path(directory)).get("expert_scope", "feedforward") == "feedforward" or not experts:
        return [load_model(directory, experts)]
    return [load_model(directory, (expert,)) for expert in experts]


def load_model(directory: str | Path, experts: tuple[str, ...] | None = None) -> GPT:
    """The model in `directory` with `experts` stacked in that order (by default all experts of the directory).

    The sha256 and the values of every file are checked before the file is used. Raises DemixError that names the file.
    """
    directory = Path(directory)
    description = describe(directory)
    experts = expert_names(directory) if experts is None else tuple(experts)
    if not experts:
        raise DemixError(directory / "experts", "holds no expert", "train the model first")
    model = blueprint(directory, experts)
    shared = _load_weights(directory / "shared.safetensors", description["shared_sha256"])
    own = {
        expert: _load_weights(
            directory / "experts" / f"{expert}.safetensors", expert_lineage(directory, expert)["sha256"]
        )
        for expert in experts
    }
    try:
        model.load_state_dict(model.stacked(shared, own), assign=True)
    except (RuntimeError, KeyError) as error:
        raise DemixError(directory, f"does not fit its model.json ({error})", "train the model again") from None
    return model


def _load_weights(path: Path, sha256: str) -> dict[str, torch.Tensor]:
    tensors = load_verified(path, sha256)
    for name, tensor in tensors.items():
        refuse_wild(path, name, tensor)
    return tensors


def refuse_wild(path: Path, name: str, tensor: torch.Tensor) -> None:
    """Raise DemixError if a tensor of the file `path` holds a value that is not finite or is beyond `LARGEST`."""
    if tensor.numel() and not (tensor.min() >= -LARGEST and tensor.max() <= LARGEST):
        value = tensor.flatten()[~(tensor.flatten().abs() <= LARGEST)][0].item()
        raise DemixError(path, f"holds {value:g} in the tensor {name}, which is no trained weight", "train it again")


def load_verified(path: Path, sha256: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file whose bytes have the given sha256. The file is read once.

    Raises DemixError if the file is missing, has another sha256 or is no safetensors file.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DemixError(path, "is missing", "run the stage that makes it") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DemixError(path, "differs from its recorded sha256", "delete it and rerun the stage that makes it")
    try:
        return load_tensors(content)
    except SafetensorError as error:
        raise DemixError(
            path, f"is not a safetensors file ({error})", "delete it and rerun the stage that makes it"
        ) from None


def check_sha256(path: Path, sha256: str) -> None:
    """Raise DemixError unless the file `path` has the given sha256. The file is never in memory as a whole."""
    if not path.is_file():
        raise DemixError(path, "is missing", "run the stage that makes it")
    if sha256_file(path) != sha256:
        raise DemixError(path, "differs from its recorded sha256", "delete it and rerun the stage that makes it")


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write contiguous copies of `tensors` to `path`. The write is not atomic: give a temporary name."""
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        # safetensors reports a full disk as text that ends in "(os error 28)".
        if found := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from None
        raise


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with replacing(path) as temporary:
        save_tensors(tensors, temporary)
