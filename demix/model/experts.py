"""The experts of a model directory: listing them, finding faults, adding and removing one.

The experts among which the tokens of a merged model choose have no files of their own. Their feedforwards and their
rows of the routers are stacked in every layer: those of an expert leave, and all other rows stay. No router is solved
or trained again.
"""

import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from demix.config.architecture import Architecture
from demix.config.counts import parameters
from demix.config.models import DENSE_EXPERT
from demix.data.cluster import Clusterer
from demix.errors import DemixError, nearest
from demix.files import check_sha256, digest, exclusive, read_json, replacing, write_json
from demix.model import clusters
from demix.model.directory import (
    blueprint,
    describe,
    expert_files,
    expert_lineage,
    expert_names,
    load_expert,
    load_shared,
    refuse_other_tokenizer,
    save_expert,
    unknown_expert,
    whole_models,
)
from demix.model.gpt import GPT
from demix.model.manifest import (
    NO_NAME,
    PENDING,
    ExpertManifest,
    ModelManifest,
    RecordedChoice,
    finish_change,
    is_expert_name,
    read_lineage,
)
from demix.model.merge import learned_of, single
from demix.model.usual import usual_of, write_usual

# `tokens` is a file beside the columns of a score table, `dense` the one expert of a dense model.
RESERVED = ("tokens", "dense")
LOCK = ".lock"
# What a model directory may hold beside its weights.
BESIDE = ("tokenizer.json", "mixing.json", "usual.json", "README.md", "imported", clusters.NAME)
# Copying an expert takes seconds.
LOCK_SECONDS = 60.0


@dataclass(frozen=True)
class Expert:
    """An expert as its files describe it. A value is None where the files lack it.

    `parent` of a merged expert lists the weights of its parents, down to 0.01, or those among which tokens choose.
    `parameters` counts the parameters that the expert owns, `bytes` the bytes of both its files. `fault` is None for an
    expert without a fault.
    """

    name: str
    parent: str | None
    steps: int | None
    tokens: int | None
    parameters: int
    data: str | None
    bytes: int
    fault: DemixError | None


def read_experts(directory: Path) -> list[Expert]:
    """All experts of a model directory, with every byte checked. Raises DemixError if the directory is no model."""
    return [_read_expert(directory, name) for name in expert_names(directory)]


def _read_expert(directory: Path, name: str) -> Expert:
    files = [directory / "experts" / f"{name}{suffix}" for suffix in (".json", ".safetensors")]
    try:
        lineage = read_lineage(files[0])
    except DemixError:
        lineage = None
    data = list(lineage.data_sha256.values()) if lineage else []
    return Expert(
        name,
        _parents(lineage) if lineage else None,
        lineage.steps if lineage else None,
        lineage.tokens if lineage else None,
        describe(directory).expert_parameters,
        f"{len(data)} domains" if len(data) > 1 else data[0][:12] if data else None,
        sum(path.stat().st_size for path in files if path.exists()),
        expert_fault(directory, name),
    )


def _parents(lineage: ExpertManifest) -> str | None:
    """What an expert began with, in words."""
    if lineage.choices:
        return " or ".join(choice.expert for choice in lineage.choices)
    shares = sorted(((origin.weight, name) for name, origin in lineage.parents.items()), reverse=True)
    return " + ".join(f"{share:.2f} {name}" for share, name in shares if share >= 0.01) or lineage.parent


def find_faults(directory: Path) -> list[DemixError]:
    """All faults of a model directory, at most one per file. Every byte is read."""
    try:
        blueprint(directory, ("any",))
    except DemixError as error:
        return [error]
    faults = [_raised(lambda: load_shared(directory))]
    names = expert_names(directory)
    if not names:
        faults.append(DemixError(directory / "experts", "holds no expert", "add one, or train the model"))
    faults += [expert_fault(directory, name) for name in names]
    if (tokenizer := directory / "tokenizer.json").exists():
        faults.append(_raised(lambda: refuse_other_tokenizer(directory, tokenizer, digest(read_json(tokenizer)))))
    if (clusterer := directory / clusters.NAME).exists():
        faults.append(_raised(lambda: Clusterer.open(clusterer)))
    known = {directory / name for name in ("model.json", "shared.safetensors", "experts", LOCK, *BESIDE)}
    known |= {directory / "experts" / f"{name}{suffix}" for name in names for suffix in (".json", ".safetensors")}
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
    return _raised(lambda: load_expert(directory, name))


def add_expert(directory: Path, source: Path, name: str | None = None) -> str:
    """Copy OTHER_MODEL/experts/NAME.safetensors to the model in `directory`; returns the name of the expert.

    Raises DemixError if the two models differ in more than their experts (shared weights, architecture, tokenizer), if
    the file is damaged, and if the name is taken, reserved or invalid. The description is written last, so that an
    interrupted copy leaves no expert. One process at a time changes the experts of a model.
    """
    if source.suffix != ".safetensors" or source.parent.name != "experts":
        raise DemixError(source, "is no expert of a model", "give OTHER_MODEL/experts/NAME.safetensors")
    other, name = source.parent.parent, name or source.stem
    refuse_name(directory, name)
    if _is_merged(directory):
        cure = "add the expert to the model that was merged, and merge that"
        raise DemixError(directory, "has stacked its experts in every layer", cure)
    lineage = expert_lineage(other, source.stem)
    refuse_other_shared(directory, other, source)
    load_expert(other, source.stem)
    usual = usual_of(other).get(source.stem)
    description, weights = expert_files(directory, name)
    with changing(directory):
        refuse_name(directory, name)
        with replacing(weights) as temporary:
            shutil.copyfile(source, temporary)
            # The file may have changed since the checks above.
            check_sha256(temporary, lineage.sha256)
        content, manifest = lineage.content | {"name": name}, describe(directory).content
        if manifest.get("experts", {}).pop(name, digest(content)) != digest(content):
            # The model was written with another expert of this name, which has been removed.
            write_json(directory / "model.json", manifest)
        write_json(description, content)
        _forget(directory, name)
        if usual is not None:
            write_usual(directory, usual_of(directory) | {name: usual})
    return name


def refuse_other_shared(directory: Path, other: Path, source: Path) -> None:
    """Raise DemixError, about `source`, if the models in `directory` and `other` differ in more than their experts."""
    ours, theirs = describe(directory).content, describe(other).content
    for key in ("architecture", "vocab_size", "domain_tokens", "tokenizer_sha256", "shared_sha256"):
        if ours.get(key) != theirs.get(key):
            cause = f"belongs to a model with another {key} than {directory}"
            raise DemixError(source, cause, "an expert fits the model that it was trained or adapted with")


def refuse_name(directory: Path, name: str) -> None:
    """Raise DemixError unless a new expert of the model in `directory` can have the name."""
    if not is_expert_name(name):
        raise DemixError(f"expert {name}", *NO_NAME)
    if name in RESERVED:
        raise DemixError(f"expert {name}", "is reserved", "give another name")
    if expert_files(directory, name)[0].exists():
        raise DemixError(f"expert {name}", f"is an expert of {directory} already", "give another name, or remove it")


def remove_expert(directory: Path, name: str) -> None:
    """Remove an expert from the model in `directory`.

    Raises DemixError if the model has no such expert, and if the expert is the last one. The description is removed
    first, so that a listed expert never lacks its weights. Of a merged model whose tokens choose their experts an
    expert is left out (`_remove_choice`).
    """
    if _is_merged(directory):
        with changing(directory):
            _remove_choice(directory, name)
            _forget(directory, DENSE_EXPERT)
        return
    description, weights = expert_files(directory, name)
    with changing(directory):
        names = expert_names(directory)
        if name not in names and not weights.exists():
            raise unknown_expert(directory, name)
        if names == (name,):
            raise DemixError(description, "is the last expert of its model", "delete the model's folder instead")
        description.unlink(missing_ok=True)
        weights.unlink(missing_ok=True)
        _forget(directory, name)


def _is_merged(directory: Path) -> bool:
    """Whether tokens of the model in `directory` choose among experts that have no files of their own."""
    return bool(describe(directory).architecture.routed) and not whole_models(directory)


def _forget(directory: Path, name: str) -> None:
    """Remove what is no longer true of a model whose expert `name` changes: its card, and the expert's figures."""
    (directory / "README.md").unlink(missing_ok=True)
    figures = usual_of(directory)
    if figures.pop(name, None):
        write_usual(directory, figures)


def changing(directory: Path) -> AbstractContextManager[None]:
    """Hold the lock of the experts of the model in `directory`: one process at a time adds or removes one."""
    return exclusive(directory / LOCK, "changes the experts of this model", LOCK_SECONDS)


def _raised(check: Callable[[], object]) -> DemixError | None:
    try:
        check()
    except DemixError as error:
        return error
    return None


class Choice(NamedTuple):
    """An expert among which tokens choose: what its model records of it, and its rows of all stacked tensors."""

    recorded: RecordedChoice
    rows: dict[str, Tensor]


def read_choices(directory: Path) -> dict[str, Choice]:
    """The experts among which the tokens of the model in `directory` choose, in the order of the router's rows.

    Raises DemixError for a damaged model, and for one that does not say whose experts these are.
    """
    described = describe(directory)
    routed = described.architecture.routed
    recorded = {one.expert: one for one in expert_lineage(directory, DENSE_EXPERT).choices} if routed else {}
    if not routed or (len(recorded), 1) != (routed.experts, routed.every):
        cause = "is no model that was merged of experts among which its tokens choose"
        raise DemixError(directory, cause, "use one that `demix merge --routed` or a row of BTX made")
    if described.kind == "merged" and not all(one.learned.content for one in recorded.values()):
        raise DemixError(directory, "does not say what each of its experts has learned from", "merge it again")
    stacked = load_expert(directory, DENSE_EXPERT)
    return {
        expert: Choice(one, {name: tensor[number] for name, tensor in stacked.items()})
        for number, (expert, one) in enumerate(recorded.items())
    }


def _remove_choice(directory: Path, name: str) -> None:
    """Leave the expert `name` out of every layer of the merged model in `directory`.

    The expert's rows leave the routers, and the softmax is over the rows that are left. What shared weights have
    learned from the expert's domain stays, as do averages of branches.

    Raises DemixError if the model has no such expert, and if fewer than two experts would be left, or fewer than a
    token chooses.
    """
    _write(directory, _rest(directory, name))


def load_without(directory: Path, name: str) -> GPT:
    """The merged model in `directory` as `_remove_choice` leaves it, whose files stay as they are.

    Raises DemixError as `_remove_choice` does.
    """
    return _with_choices(directory, _rest(directory, name))


def _rest(directory: Path, name: str) -> dict[str, Choice]:
    """The experts of the merged model in `directory` but `name`."""
    own = read_choices(directory)
    gone = _named(directory, own, name)
    routed = describe(directory).architecture.routed
    top_k = routed.top_k if routed else 0
    if len(own) - 1 < max(2, top_k):
        cause = f"is one of {len(own)} experts, among which each token chooses {top_k}"
        raise DemixError(f"expert {name}", cause, "keep it, or delete the model's folder")
    return {expert: one for expert, one in own.items() if one is not gone}


def _named(directory: Path, choices: Mapping[str, Choice], name: str) -> Choice:
    if name not in choices:
        cause = f"is none among which tokens of {directory} choose"
        raise DemixError(f"expert {name}", cause, nearest(name, choices, "give the name of one"))
    return choices[name]


def _with_choices(directory: Path, choices: Mapping[str, Choice]) -> GPT:
    """The merged model in `directory` with the experts `choices`."""
    described, rows = describe(directory), [one.rows for one in choices.values()]
    own = {name: torch.stack([of_expert[name] for of_expert in rows]) for name in rows[0]}
    return single(_architecture(described, len(rows)), described, load_shared(directory), own)


def _architecture(described: ModelManifest, experts: int) -> Architecture:
    """The architecture of the merged model that is so `described`, with so many experts."""
    architecture = described.architecture
    routed = architecture.merged_routed(experts).routed if described.kind == "merged" else architecture.routed
    assert routed is not None
    return architecture.replace(routed=routed.replace(experts=experts))


def _write(directory: Path, choices: Mapping[str, Choice]) -> None:
    """Make `choices` the experts of the merged model in `directory`; the caller holds its lock."""
    described, lineage = describe(directory), expert_lineage(directory, DENSE_EXPERT).content
    model = _with_choices(directory, choices)
    own = parameters(model.architecture, model.vocab_size)[1]
    manifest = described.content | {"architecture": model.architecture.described, "expert_parameters": own}
    lineage["choices"] = [one.recorded.content | {"expert": name} for name, one in choices.items()]
    if described.kind == "merged":
        lineage |= learned_of([one.recorded.learned for one in choices.values()])
    # A kill before the folder has its name leaves the model as it was; after that `finish_change` ends the change.
    with replacing(directory / PENDING, directory=True) as folder:
        save_expert(model, DENSE_EXPERT, folder, lineage)
        manifest["experts"] = {DENSE_EXPERT: digest(read_json(expert_files(folder, DENSE_EXPERT)[0]))}
        write_json(folder / "model.json", manifest)
    finish_change(directory)
