"""The experts of a model directory: listing them, finding faults, adding and removing one.

The experts of a merged token-routed model have no files of their own: their feedforwards and their router rows are
stacked in every layer.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from demix.config.models import DENSE_EXPERT
from demix.data.cluster import Clusterer
from demix.errors import DemixError, nearest
from demix.files import digest, exclusive, read_json, read_parquet, write_json
from demix.model import clusters
from demix.model.directory import (
    assembled,
    copy_expert,
    describe,
    expert_files,
    expert_lineage,
    expert_names,
    load_expert,
    load_shared,
    refuse_other_tokenizer,
    unknown_expert,
    wanted_tensors,
    whole_models,
)
from demix.model.gpt import GPT
from demix.model.manifest import NO_NAME, ExpertManifest, Usual, is_expert_name, read_lineage, read_usual, run_of
from demix.run.run import Run

# `tokens` is a file next to the columns of a score table, `dense` the only expert of a dense model.
RESERVED = ("tokens", "dense")
LOCK = ".lock"
# Copying an expert needs seconds.
LOCK_SECONDS = 60.0


def read_experts(directory: Path) -> dict[str, ExpertManifest | None]:
    """The descriptions of the experts of a model directory by name; None for one that cannot be read."""
    found: dict[str, ExpertManifest | None] = {}
    for name in expert_names(directory):
        try:
            found[name] = read_lineage(expert_files(directory, name)[0])
        except DemixError:
            found[name] = None
    return found


def began_with(lineage: ExpertManifest) -> str | None:
    """The origin of an expert: its parent, the experts that were merged, or parents with weights of at least 0.01."""
    if lineage.choices:
        return " or ".join(choice.expert for choice in lineage.choices)
    shares = sorted(((origin.weight, name) for name, origin in lineage.parents.items()), reverse=True)
    return " + ".join(f"{share:.2f} {name}" for share, name in shares if share >= 0.01) or lineage.parent


def find_faults(directory: Path) -> list[DemixError]:
    """All faults of the recorded files of a model directory, at most one per file. Every byte is read."""
    try:
        wanted_tensors(directory)
    except DemixError as error:
        return [error]
    faults = [_raised(lambda: load_shared(directory))]
    names = expert_names(directory)
    if not names:
        faults.append(DemixError(directory / "experts", "holds no expert", "add one, or train the model"))
    stems = {path.stem for path in directory.glob("experts/[!.]*.safetensors")}
    faults += [_raised(partial(load_expert, directory, name)) for name in sorted({*names} | stems)]
    if (tokenizer := directory / "tokenizer.json").exists():
        faults.append(_raised(lambda: refuse_other_tokenizer(directory, tokenizer, digest(read_json(tokenizer)))))
    if (clusterer := directory / clusters.NAME).exists():
        faults.append(_raised(lambda: Clusterer.open(clusterer)))
    return [fault for fault in faults if fault]


def add_expert(directory: Path, source: Path, name: str | None = None) -> str:
    """Copy OTHER_MODEL/experts/NAME.safetensors to the model in `directory`; returns the name of the expert.

    Raises DemixError if the two models differ in more than their experts (shared weights, architecture, tokenizer), if
    the file is damaged, and if the name is in use, reserved or invalid. The description is written last, so that an
    interrupted copy leaves no expert. One process at a time changes the experts of a model.
    """
    if source.suffix != ".safetensors" or source.parent.name != "experts":
        raise DemixError(source, "is not an expert of a model", "give OTHER_MODEL/experts/NAME.safetensors")
    other, name = source.parent.parent, name or source.stem
    refuse_name(directory, name)
    refuse_merged(directory)
    own = digest(expert_lineage(other, source.stem).content | {"name": name})
    ours, theirs = describe(directory).content, describe(other).content
    for key in ("architecture", "vocab_size", "domain_tokens", "tokenizer_sha256", "shared_sha256"):
        if ours.get(key) != theirs.get(key):
            cause = f"belongs to a model with another {key} than {directory}"
            raise DemixError(source, cause, "add it to the model that it was trained or adapted with")
    load_expert(other, source.stem)
    usual = usual_of(other).get(source.stem)
    with changing(directory):
        refuse_name(directory, name)
        manifest = describe(directory).content
        if manifest.get("experts", {}).pop(name, own) != own:
            # The model was written with another expert of this name, which has been removed.
            write_json(directory / "model.json", manifest)
        copy_expert(other, source.stem, directory, name)
        _forget(directory, name)
        if usual is not None:
            write_usual(directory, usual_of(directory) | {name: usual})
    return name


def refuse_name(directory: Path, name: str) -> None:
    """Raise DemixError if a new expert of the model in `directory` cannot have the name."""
    if not is_expert_name(name):
        raise DemixError(f"expert {name}", *NO_NAME)
    if name in RESERVED:
        raise DemixError(f"expert {name}", "is reserved", "give another name")
    if expert_files(directory, name)[0].exists():
        raise DemixError(f"expert {name}", f"is an expert of {directory} already", "give another name, or remove it")


def remove_expert(directory: Path, name: str) -> None:
    """Remove an expert from the model in `directory`.

    Raises DemixError if the model has no such expert, and if the expert is the last one. The description is removed
    first, so that a listed expert never lacks its weights.
    """
    refuse_merged(directory)
    description, weights = expert_files(directory, name)
    with changing(directory):
        names = expert_names(directory)
        if name not in names and not weights.exists():
            raise unknown_expert(directory, name)
        if names == (name,):
            raise DemixError(description, "is the only expert of its model", "delete the model's folder instead")
        description.unlink(missing_ok=True)
        weights.unlink(missing_ok=True)
        _forget(directory, name)


def refuse_merged(directory: Path) -> None:
    """Raise DemixError if the model in `directory` has merged experts, which have no files of their own."""
    if describe(directory).architecture.routed and not whole_models(directory):
        cure = "change the experts of the model before merging, and merge it again"
        raise DemixError(directory, "has merged experts, which it stores together in every layer", cure)


def _forget(directory: Path, name: str) -> None:
    """Remove files that are outdated if the expert `name` of a model changes: its card, and the expert's results."""
    (directory / "README.md").unlink(missing_ok=True)
    figures = usual_of(directory)
    if figures.pop(name, None):
        write_usual(directory, figures)


def usual_of(directory: Path) -> dict[str, Usual]:
    """How well each expert of a model predicts the test split of its own domain: the reference for any other text.

    A finished run has these results in `results.parquet`. `demix card` writes them to `usual.json` in the model's
    folder, so that a copied folder keeps them. Experts without results are left out. Raises DemixError if a file with
    results is damaged.
    """
    path, run, place = directory / "usual.json", run_of(directory), directory.resolve()
    found = read_usual(path) if path.exists() else {}
    if place.parent.name != "models" or not (run / "results.parquet").exists():
        return found
    row, seed = Run.read(run).row_of(place.name)
    wanted = {"model": row, "seed": seed, "method": "expert", "split": "test", "variant": ""}
    columns = [*wanted, "expert", "domain", "perplexity", "bits_per_byte"]
    return found | {
        one["expert"]: Usual(perplexity=one["perplexity"], bits_per_byte=one["bits_per_byte"])
        for one in read_parquet(run / "results.parquet").select(columns).to_pylist()
        if wanted.items() <= one.items() and one["expert"] == one["domain"] and one["bits_per_byte"] is not None
    }


def write_usual(directory: Path, figures: Mapping[str, Usual]) -> None:
    """Write the results of experts to `usual.json` of the model in `directory`; without results there is no file."""
    if figures:
        content = {"experts": {name: one.as_dict() for name, one in figures.items()}}
        write_json(directory / "usual.json", content)
    else:
        (directory / "usual.json").unlink(missing_ok=True)


def changing(directory: Path) -> AbstractContextManager[None]:
    """Hold the lock of the experts of the model in `directory`: one process at a time adds or removes one."""
    return exclusive(directory / LOCK, "changes the experts of this model", LOCK_SECONDS)


def _raised(check: Callable[[], object]) -> DemixError | None:
    try:
        check()
    except DemixError as error:
        return error
    return None


def load_without(directory: Path, name: str) -> GPT:
    """The merged model in `directory` without the expert `name` in its layers; its files do not change.

    The expert's rows are removed from the routers, and the softmax is over the remaining rows; routers are not trained
    again. Shared weights, and averages of branches, still contain what was learned from the expert's domain. Raises
    DemixError if the model does not record its merged experts, if it has no such expert, and if fewer than two experts,
    or fewer than a token uses, would be left.
    """
    described = describe(directory)
    routed = described.architecture.routed
    names = [one.expert for one in expert_lineage(directory, DENSE_EXPERT).choices] if routed else []
    if not routed or (len({*names}), 1) != (routed.experts, routed.every):
        cause = "is not a merged token-routed model"
        raise DemixError(directory, cause, "use one from `demix merge --routed` or BTX")
    if name not in names:
        cause = f"is not an expert of {directory}"
        raise DemixError(f"expert {name}", cause, nearest(name, names, "name one of its experts"))
    if len(names) - 1 < max(2, routed.top_k):
        cause = f"cannot be left out: each token uses {max(2, routed.top_k)} of {len(names)} experts"
        raise DemixError(f"expert {name}", cause, "keep it")
    rows = [number for number, one in enumerate(names) if one != name]
    own = {key: tensor[rows] for key, tensor in load_expert(directory, DENSE_EXPERT).items()}
    fewer = described.architecture.replace(routed=routed.replace(experts=len(rows)))
    return assembled(described.replace(architecture=fewer), load_shared(directory), {DENSE_EXPERT: own})
