"""The experts of a model directory: listing them, finding faults, adding and removing one."""

import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from demix.errors import DemixError
from demix.files import read_json, replacing, sha256_file, write_json
from demix.model.checkpoint import blueprint, check_sha256, describe, expert_lineage, expert_names, refuse_wild

NAME = re.compile(r"[a-z0-9_]+")
# `tokens` is a file beside the columns of a score table, `dense` the one expert of a dense model.
RESERVED = ("tokens", "dense")

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Expert:
    """An expert as its files describe it. A value is None where the files lack it.

    `parent` of a merged expert lists the weights of its parents, down to 0.01. `parameters` counts the parameters that
    the expert owns, `bytes` the bytes of both its files. `fault` is None for an expert without a fault.
    """

    name: str
    parent: str | None
    steps: int | None
    tokens: int | None
    parameters: int | None
    data: str | None
    bytes: int
    fault: DemixError | None


def read_experts(directory: Path) -> list[Expert]:
    """All experts of a model directory, with every byte checked. Raises DemixError if the directory is no model."""
    return [_read_expert(directory, name) for name in expert_names(directory)]


def _read_expert(directory: Path, name: str) -> Expert:
    description, weights = _files(directory, name)
    try:
        lineage = read_json(description)
    except DemixError:
        lineage = None
    lineage = lineage if isinstance(lineage, dict) else {}
    try:
        parameters = sum(math.prod(shape) for shape in tensor_shapes(weights).values())
    except DemixError:
        parameters = None
    parent, data = lineage.get("parent"), list(lineage.get("data_sha256", {}).values())
    if parents := lineage.get("parents"):
        shares = sorted(((origin["weight"], name) for name, origin in parents.items()), reverse=True)
        parent = " + ".join(f"{share:.2f} {name}" for share, name in shares if share >= 0.01)
    return Expert(
        name,
        parent,
        lineage.get("steps"),
        lineage.get("tokens"),
        parameters,
        f"{len(data)} domains" if len(data) > 1 else data[0][:12] if data else None,
        sum(path.stat().st_size for path in (description, weights) if path.exists()),
        expert_fault(directory, name),
    )


def find_faults(directory: Path) -> list[DemixError]:
    """All faults of a model directory, at most one per file. Every byte is read."""
    try:
        description, model = describe(directory), blueprint(directory, ("any",))
    except DemixError as error:
        return [error]
    shapes = {name: tuple(tensor.shape) for name, tensor in model.shared_tensors().items()}
    shared = directory / "shared.safetensors"
    faults = [_raised(lambda: _check_file(shared, description["shared_sha256"], shapes))]
    names = expert_names(directory)
    if not names:
        faults.append(DemixError(directory / "experts", "holds no expert", "add one, or train the model"))
    faults += [expert_fault(directory, name) for name in names]
    known = {directory / "model.json", shared, directory / "experts"}
    known |= {path for name in names for path in _files(directory, name)}
    faults += [
        _stray(path) for path in sorted([*directory.glob("*"), *directory.glob("experts/*")]) if path not in known
    ]
    return [fault for fault in faults if fault]


def _stray(path: Path) -> DemixError:
    if path.name.endswith(".partial"):
        return DemixError(path, "was never finished", "delete it, unless a job is writing it now")
    if path.parent.name == "experts" and path.suffix == ".safetensors":
        return DemixError(path, "has no description beside it", "add it again, or delete it")
    return DemixError(path, "is no part of a model", "move it elsewhere")


def expert_fault(directory: Path, name: str) -> DemixError | None:
    """The first fault of an expert of the model in `directory` (lineage, bytes, shapes, name), or None."""

    def check() -> None:
        description, weights = _files(directory, name)
        _check_file(weights, expert_lineage(directory, name)["sha256"], _expert_shapes(directory))
        _check_name(description, name)

    return _raised(check)


def add_expert(directory: Path, source: Path, name: str | None = None) -> str:
    """Copy OTHER_MODEL/experts/NAME.safetensors to the model in `directory`; returns the name of the expert.

    Raises DemixError if the two models differ in their trunk (shared weights, architecture, tokenizer), if the file is
    damaged, and if the name is taken, reserved or invalid. The description is written last, so that an interrupted copy
    leaves no expert.
    """
    if source.suffix != ".safetensors" or source.parent.name != "experts":
        raise DemixError(source, "is no expert of a model", "give OTHER_MODEL/experts/NAME.safetensors")
    other, name = source.parent.parent, name or source.stem
    _check_name(f"--name {name}", name)
    if name in RESERVED:
        raise DemixError(f"--name {name}", "is reserved", "give another --name")
    if name in expert_names(directory):
        raise DemixError(f"--name {name}", f"is an expert of {directory} already", "give another --name, or remove it")
    lineage, ours, theirs = expert_lineage(other, source.stem), describe(directory), describe(other)
    parts = {
        "architecture": "architecture",
        "vocab_size": "vocabulary",
        "domain_tokens": "domain tokens",
        "tokenizer_sha256": "tokenizer",
        "shared_sha256": "shared weights",
    }
    for key, part in parts.items():
        if ours.get(key) != theirs.get(key):
            cause = f"belongs to a model of other {part} than {directory}"
            raise DemixError(source, cause, "an expert fits the model that it was trained or adapted with")
    description, weights = _files(directory, name)
    with replacing(weights) as temporary:
        try:
            shutil.copyfile(source, temporary)
        except FileNotFoundError:
            raise DemixError(source, "is missing", "name an expert that is there") from None
        if sha256_file(temporary) != lineage["sha256"]:
            raise DemixError(source, "differs from its recorded sha256", "get the file again")
        _check_shapes(source, tensor_shapes(temporary), _expert_shapes(directory))
        _check_values(source, temporary)
    write_json(description, lineage | {"name": name})
    return name


def remove_expert(directory: Path, name: str) -> None:
    """Remove an expert from the model in `directory`.

    Raises DemixError if the model has no such expert, and if the expert is the last one. The description is removed
    first, so that a listed expert never lacks its weights.
    """
    describe(directory)
    description, weights = _files(directory, name)
    names = expert_names(directory)
    if name not in names and not weights.exists():
        raise DemixError(description, "is missing", f"choose among {', '.join(names) or 'none'}")
    if names == (name,):
        raise DemixError(description, "is the last expert of its model", "delete the model's folder instead")
    description.unlink(missing_ok=True)
    weights.unlink(missing_ok=True)


def tensor_shapes(path: Path) -> Shapes:
    """The shapes of the tensors in a safetensors file by name, read from the header alone."""
    try:
        with safe_open(path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise DemixError(path, "is missing", "run the stage that makes it") from None
    except SafetensorError as error:
        cure = "delete it and rerun the stage that makes it"
        raise DemixError(path, f"is not a safetensors file ({error})", cure) from None


def _files(directory: Path, name: str) -> tuple[Path, Path]:
    """The paths of an expert's description and weights."""
    return directory / "experts" / f"{name}.json", directory / "experts" / f"{name}.safetensors"


def _expert_shapes(directory: Path) -> Shapes:
    model = blueprint(directory, ("any",))
    _, experts = model.parted(dict(model.named_parameters()))
    return {name: tuple(tensor.shape) for name, tensor in experts["any"].items()}


def _check_file(path: Path, sha256: str, shapes: Shapes) -> None:
    check_sha256(path, sha256)
    _check_shapes(path, tensor_shapes(path), shapes)
    _check_values(path, path)


def _check_values(subject: Path, path: Path) -> None:
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            refuse_wild(subject, name, file.get_tensor(name))


def _check_shapes(path: Path, found: Shapes, wanted: Shapes) -> None:
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            cause = f"holds {name} as {found.get(name)}, of which the architecture makes {wanted.get(name)}"
            raise DemixError(path, cause, "delete it and rerun the stage that makes it")


def _check_name(subject: str | Path, name: str) -> None:
    if not NAME.fullmatch(name):
        raise DemixError(subject, "is no usable name of an expert", "use lower-case letters, digits and _")


def _raised(check: Callable[[], None]) -> DemixError | None:
    try:
        check()
    except DemixError as error:
        return error
    return None
