"""Modular model directories: `model.json`, `shared.safetensors` and one pair of files for each expert.

The folder is the list of the experts. Adding a domain adds a file, and removing a domain removes a file. An expert
exists when its description (`.json`) exists: the description is written last and removed first. `model.json`, the
manifest, is written after all of a training's files. It holds their digests, so that readers detect an exchanged file.
With `expert_scope: model` in `model.json` each expert is a whole model and the experts share no tensor. Otherwise an
expert owns only its feedforwards.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file

from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError, nearest
from demix.files import copy_checked, digest, opened, read_json, replacing, sha256_file, write_json
from demix.model.gpt import GPT
from demix.model.manifest import (
    NO_NAME,
    ExpertManifest,
    ModelManifest,
    is_expert_name,
    read_description,
    read_lineage,
    run_of,
)

# A training step changes a weight by at most about the learning rate, so no training reaches this value.
LARGEST_WEIGHT = 1e6
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Snakemake tracks a model only by its manifest.
TRAIN_AGAIN = "train the model again (`snakemake -f` with its model.json), or download the file again"
OWN_TOKENIZER = "use the tokenizer that the model was trained with, or train the model again"
CPU = torch.device("cpu")
SHARED = "shared.safetensors"
TOKENIZER = "tokenizer.json"

Tensors = dict[str, torch.Tensor]


def save_model(
    model: GPT,
    output: Path,
    description: dict[str, Any],
    lineage: dict[str, Any],
    tokenizer: Path | None,
    card: str | None = None,
) -> None:
    """Write a model with its tokenizer to `output`, completely or not at all. README.md holds `card`."""
    with replacing(output.resolve(), directory=True) as temporary:
        copy_tokenizer(tokenizer, temporary, description.get("tokenizer_sha256"))
        if card is not None:
            (temporary / "README.md").write_text(card, encoding="utf-8")
        save_files(model, temporary, description, lineage)


def save_files(model: GPT, directory: Path, description: dict[str, Any], lineage: dict[str, Any]) -> None:
    """Write the shared tensors of `model`, each expert with the same `lineage`, then the manifest."""
    belongs = {"shared_sha256": save_shared(model, directory)}
    for expert in model.experts:
        save_expert(model, expert, directory, lineage | belongs)
    save_manifest(model, directory, model.experts, description)


def save_shared(model: GPT, directory: Path) -> str:
    """Write `shared.safetensors` below `directory`, and return its sha256."""
    _save(model.parted()[0], directory / SHARED)
    return sha256_file(directory / SHARED)


def save_expert(model: GPT, expert: str, directory: Path, lineage: dict[str, Any], name: str | None = None) -> None:
    """Write expert `expert` of `model` as `experts/<name>.safetensors` below `directory`, with its lineage next to it.

    The `lineage` has the sha256 of the shared weights that the expert belongs to (`shared_sha256`).
    """
    name = name or expert
    description, path = expert_files(directory, name)
    _save(model.parted()[1][expert], path)
    write_json(description, lineage | {"name": name, "sha256": sha256_file(path)})


def save_manifest(model: GPT, directory: Path, experts: Iterable[str], description: dict[str, Any]) -> None:
    """Write `model.json` (architecture, `description`, digests) of a model whose other files are in `directory`."""
    write_json(
        directory / "model.json",
        description
        | {
            "architecture": model.architecture.described,
            "vocab_size": model.vocab_size,
            "domain_tokens": list(model.domain_tokens),
            "shared_sha256": sha256_file(directory / SHARED),
            "experts": {name: digest(read_json(expert_files(directory, name)[0])) for name in experts},
        }
        | ({} if model.expert_scope == "feedforward" else {"expert_scope": model.expert_scope}),
    )


def describe(directory: Path, *needed: str) -> ModelManifest:
    """The `model.json` of a model directory, which must have the keys `needed`.

    Raises DemixError if the file is missing or does not describe a model.
    """
    return read_description(Path(directory) / "model.json", *needed)


def expert_lineage(directory: Path, expert: str, *needed: str) -> ExpertManifest:
    """The description of an expert of the model in `directory`, which must have the keys `needed`.

    Raises DemixError if the expert is missing, if its digest is not the one in the model's manifest, and if its shared
    weights or its tokenizer are not the model's.
    """
    path, _ = expert_files(directory, expert)
    if not path.exists():
        raise unknown_expert(directory, expert)
    lineage, described = read_lineage(path, *needed), describe(directory)
    if lineage.name != expert and "name" in lineage.content:
        raise DemixError(path, f"describes the expert {lineage.name}, not {expert}", "rename the file")
    if lineage.shared_sha256 != described.shared_sha256:
        raise DemixError(path, "belongs to a model with other shared weights", "train or adapt it again")
    if described.experts.get(expert) not in (None, digest(lineage.content)):
        raise DemixError(path, "is not the expert that the model was written with", TRAIN_AGAIN)
    refuse_other_tokenizer(directory, path, lineage.tokenizer_sha256)
    return lineage


def unknown_expert(directory: Path, name: str) -> DemixError:
    """The error for an expert that the model in `directory` lacks."""
    cure = TRAIN_AGAIN if name in describe(directory).experts else "train the model first"
    found = nearest(name, expert_names(directory), cure)
    return DemixError(expert_files(directory, name)[0], "is missing, so the model has no such expert", found)


def refuse_routed(directory: Path, use: str) -> None:
    """Raise DemixError if the model in `directory` is token-routed, and therefore unsuitable for this `use`."""
    if describe(directory).architecture.routed:
        cause = f"is a token-routed model, which {use}"
        raise DemixError(directory, cause, "use another model")


def refuse_masked(directory: Path, use: str) -> None:
    """Raise DemixError if the model in `directory` is a masked language model, and so unsuitable for this `use`."""
    if describe(directory).architecture.objective == "mlm":
        raise DemixError(directory, f"is a masked language model, which {use}", "use a causal model")


def refuse_other_tokenizer(directory: Path, subject: Path, sha256: str | None, vocab_size: int | None = None) -> None:
    """Raise DemixError if `sha256`, the tokenizer of `subject`, is not the tokenizer of the model in `directory`.

    If `vocab_size` is given, it must also be the model's.
    """
    description = describe(directory)
    check_same_tokenizer(subject, sha256, f"the model {directory}", description.tokenizer_sha256)
    if vocab_size not in (None, description.vocab_size):
        cause = f"has {vocab_size:,} ids, but the model {directory} has {description.vocab_size:,}"
        raise DemixError(subject, cause, OWN_TOKENIZER)


def check_same_tokenizer(subject: Path, sha256: str | None, model: str, own: str | None) -> None:
    """Raise DemixError if `sha256`, the tokenizer of `subject`, is not the model's `own`."""
    if sha256 != own:
        cause = f"has another tokenizer ({str(sha256)[:12]}) than {model} ({str(own)[:12]})"
        raise DemixError(subject, cause, OWN_TOKENIZER)


def expert_files(directory: Path, name: str) -> tuple[Path, Path]:
    """The paths of an expert's description and weights. Raises DemixError for an invalid name."""
    path = Path(directory) / "experts" / f"{name}.json"
    if not is_expert_name(name):
        raise DemixError(path, *NO_NAME)
    return path, path.with_suffix(".safetensors")


def expert_names(directory: Path) -> tuple[str, ...]:
    """The names of the experts in a model directory, sorted."""
    return tuple(sorted(path.stem for path in (Path(directory) / "experts").glob("[!.]*.json")))


def assembled(described: ModelManifest, shared: Tensors, own: Mapping[str, Tensors]) -> GPT:
    """The model described by a manifest, made of the tensors `shared` and the experts' tensors `own`.

    An expert's own tensors have no axis of experts.
    """
    model = _empty(described, tuple(own))
    model.load_state_dict(model.stacked(shared, own), assign=True)
    return model


def _empty(described: ModelManifest, experts: tuple[str, ...]) -> GPT:
    """A model on the meta device: it has shapes but no values."""
    about = described.architecture, described.vocab_size, experts, described.domain_tokens, described.expert_scope
    with torch.device("meta"):
        return GPT(*about)


def load_experts(
    directory: str | Path, experts: tuple[str, ...] | None = None, device: torch.device = CPU
) -> list[GPT]:
    """The trunks of the model in `directory` on `device`: GPTs that together have `experts` in order (default: all).

    There is one trunk with all experts stacked, or, with `expert_scope: model` in `model.json`, one trunk per expert.
    Raises DemixError as `load_model` does.
    """
    directory = Path(directory)
    names = expert_names(directory) if experts is None else tuple(experts)
    trunks = [(name,) for name in names] if names and whole_models(directory) else [names]
    return [load_model(directory, trunk).to(device) for trunk in trunks]


def whole_models(directory: Path) -> bool:
    """Whether each expert of the model in `directory` is a whole model."""
    return describe(directory).expert_scope == "model"


def load_model(directory: str | Path, experts: tuple[str, ...] | None = None) -> GPT:
    """The model in `directory` with `experts` stacked in that order (by default all experts of the directory).

    The sha256 of every file is checked before the file is read, and then the shapes and values of its tensors. Raises
    DemixError, which names the file.
    """
    directory = Path(directory)
    described = describe(directory)
    experts = expert_names(directory) if experts is None else tuple(experts)
    if not experts:
        raise DemixError(directory / "experts", "holds no expert", "train the model first")
    own = {expert: load_expert(directory, expert) for expert in experts}
    return assembled(described, load_shared(directory), own)


def load_shared(directory: Path) -> Tensors:
    """The tensors that the experts of the model in `directory` share. Raises DemixError as `load_weights` does."""
    sha256 = describe(directory).shared_sha256
    return load_weights(directory / SHARED, sha256, wanted_tensors(directory)[0])


def load_expert(directory: Path, expert: str) -> Tensors:
    """The tensors that an expert of the model in `directory` owns. Raises DemixError as `load_weights` does."""
    lineage = expert_lineage(directory, expert)
    return load_weights(expert_files(directory, expert)[1], lineage.sha256, wanted_tensors(directory)[1])


def wanted_tensors(directory: Path) -> tuple[Tensors, Tensors]:
    """The tensors, without values, that the experts of a model share, and the tensors that each expert owns.

    Raises DemixError if model.json does not describe a model.
    """
    described = describe(directory)
    try:
        model = _empty(described, ("any",))
    except RuntimeError as error:
        path = Path(directory) / "model.json"
        raise DemixError(path, f"does not describe a model ({error})", "train the model again") from None
    shared, experts = model.parted()
    return shared, experts["any"]


def copy_expert(source: Path, expert: str, directory: Path, name: str | None = None) -> str:
    """Copy an expert of the model `source` to the model in `directory`; returns the digest of its description.

    The description is written last. Raises DemixError as `load_expert` does.
    """
    lineage = expert_lineage(source, expert)
    load_expert(source, expert)
    description, weights = expert_files(directory, name or expert)
    copy_checked(expert_files(source, expert)[1], weights, lineage.sha256)
    content = lineage.content | {"name": name or expert}
    write_json(description, content)
    return digest(content)


def check_values(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise DemixError if `tensors` of the file `path` have types other than FLOATS or values above LARGEST_WEIGHT."""
    for name, tensor in tensors:
        if tensor.dtype not in FLOATS:
            raise DemixError(path, f"holds {name} of type {tensor.dtype}", f"use {', '.join(map(str, FLOATS))}")
        low, high = (float(bound) for bound in tensor.aminmax()) if tensor.numel() else (0.0, 0.0)
        # A comparison with NaN is false.
        if not -LARGEST_WEIGHT <= low <= high <= LARGEST_WEIGHT:
            cause = f"holds numbers from {low:g} to {high:g} in {name}, which training cannot produce"
            raise DemixError(path, cause, "train it again, or download it again")


def load_weights(path: Path, sha256: str, wanted: Tensors) -> Tensors:
    """The tensors of a safetensors file.

    Raises DemixError if the file has another sha256, other names or shapes than `wanted`, or unusable values.
    """
    tensors = load_verified(path, sha256)
    for name in sorted(tensors.keys() | wanted.keys()):
        found, made = ((*part[name].shape,) if name in part else None for part in (tensors, wanted))
        if found != made:
            cause = f"holds {name} as {found}, but in the architecture it is {made}"
            raise DemixError(path, cause, TRAIN_AGAIN)
    check_values(path, tensors.items())
    return tensors


def load_verified(path: Path, sha256: str) -> Tensors:
    """The tensors of a safetensors file whose bytes have the given sha256. The file is read once.

    Raises DemixError if the file is missing, has another sha256 or is not a safetensors file.
    """
    try:
        with opened(path) as stream:
            content = stream.read()
    except FileNotFoundError:
        raise DemixError(path, "is missing", TRAIN_AGAIN) from None
    except MemoryError:
        raise DemixError(path, "does not fit into memory", "use a machine with more memory") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DemixError(path, "differs from its recorded sha256", TRAIN_AGAIN)
    try:
        return load_tensors(content)
    except SafetensorError as error:
        raise DemixError(path, f"is not a safetensors file ({error})", TRAIN_AGAIN) from None


def save_tensors(tensors: Tensors, path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write contiguous copies of `tensors` to `path`. The write is not atomic: give a temporary name."""
    # safetensors writes a new file with the mode 0600; a file opened by Python has that of the umask.
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata)
        path.chmod(mode)
    except SafetensorError as error:
        # safetensors reports a full disk as text that ends in "(os error 28)".
        if found := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from None
        raise


def _save(tensors: Tensors, path: Path) -> None:
    with replacing(path) as temporary:
        save_tensors(tensors, temporary)


def tokenizer_of(directory: Path, given: Path | None = None) -> tuple[Path, Tokenizer]:
    """The tokenizer of the model in `directory`, and its file: `given`, or the one in the folder, or the run's.

    Raises DemixError if there is none, or if it is not the tokenizer that `model.json` records.
    """
    describe(directory)
    path = given or tokenizer_path(directory)
    if path is None or not path.is_file():
        at_fault = path or Path(directory) / TOKENIZER
        raise DemixError(at_fault, "is missing", "name the tokenizer.json of the model's run with --tokenizer")
    encoder = Tokenizer.load(path)
    refuse_other_tokenizer(directory, path, encoder.sha256, encoder.vocab_size)
    return path, encoder


def copy_tokenizer(source: Path | None, directory: Path, sha256: str | None) -> None:
    """Copy the tokenizer `source` into the model directory `directory`, which can then be used without its run.

    Raises DemixError if it is not the model's tokenizer (`sha256`). Without such a file nothing is copied.
    """
    if source is not None and source.is_file():
        check_same_tokenizer(source, digest(read_json(source)), "the model to be written", sha256)
        with replacing(directory / TOKENIZER) as temporary:
            shutil.copyfile(source, temporary)


def tokenizer_path(directory: Path) -> Path | None:
    """The tokenizer.json in the folder of a model, or its run's; None without either."""
    places = (Path(directory) / TOKENIZER, run_of(directory) / TOKENIZER)
    return next((place for place in places if place.is_file()), None)
