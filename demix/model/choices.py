"""The experts among which the tokens of a merged model choose: leaving one out, and adding that of another model.

Their feedforwards and their rows of the routers are stacked in every layer: those of an expert leave, or join as the
other model has them, and all other rows stay. No router is solved or trained again.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from demix.config.architecture import Architecture
from demix.config.counts import parameters
from demix.config.models import DENSE_EXPERT
from demix.errors import DemixError, nearest
from demix.files import replacing, sha256_file, write_json
from demix.model.directory import describe, expert_files, expert_lineage, load_model, save_tensors
from demix.model.gpt import GPT
from demix.model.manifest import PENDING, ModelManifest, RecordedChoice, finish_change
from demix.model.merge import learned_of


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
    stacked = {name: tensor.detach()[0] for name, tensor in load_model(directory).expert_tensors().items()}
    return {
        expert: Choice(one, {name: tensor[number] for name, tensor in stacked.items()})
        for number, (expert, one) in enumerate(recorded.items())
    }


def remove_choice(directory: Path, name: str) -> None:
    """Leave the expert `name` out of every layer of the merged model in `directory`.

    The expert's rows leave the routers, and the softmax is over the rows that are left. What shared weights have
    learned from the expert's domain stays, as do averages of branches.

    Raises DemixError if the model has no such expert, and if fewer than two experts would be left, or fewer than a
    token chooses.
    """
    _write(directory, _rest(directory, name))


def add_choice(directory: Path, other: Path, expert: str, name: str) -> None:
    """Add `expert` of the merged model in `other`, as `name`, to every layer of the merged model in `directory`.

    Both have the same shared weights. The new rows stand where those of `other` do among experts that both have, else
    behind all.

    Raises DemixError for an expert that `other` lacks, a name that is taken, and if the routers of one model were
    solved and those of the other trained.
    """
    own, theirs = read_choices(directory), read_choices(other)
    new = _named(other, theirs, expert)
    if name in own:
        raise DemixError(f"expert {name}", f"is an expert of {directory} already", "give another name, or remove it")
    if _solved(directory) != _solved(other):
        solved, trained = (directory, other) if _solved(directory) else (other, directory)
        cause = f"has trained routers, and those of {solved} were solved"
        raise DemixError(trained, cause, "add an expert of a model that was made in the same way")
    names = list(theirs)
    behind = names[names.index(expert) + 1 :]
    experts = list(own.items())
    place = next((number for number, (one, _) in enumerate(experts) if one in behind), len(experts))
    experts.insert(place, (name, new))
    _write(directory, dict(experts))


def load_without(directory: Path, name: str) -> GPT:
    """The merged model in `directory` as `remove_choice` leaves it, whose files stay as they are.

    Raises DemixError as `remove_choice` does.
    """
    described, rest = describe(directory), _rest(directory, name)
    architecture, stacked = _architecture(described, len(rest)), _stacked(rest)
    shared = {key: tensor.detach() for key, tensor in load_model(directory).shared_tensors().items()}
    with torch.device("meta"):
        model = GPT(architecture, described.vocab_size, (DENSE_EXPERT,), end_of_text=described.end_of_text)
    model.load_state_dict(model.stacked(shared, {DENSE_EXPERT: stacked}), assign=True)
    return model


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


def _solved(directory: Path) -> bool:
    """Whether the routers of the merged model in `directory` were solved from text, and not trained since."""
    return expert_lineage(directory, DENSE_EXPERT).router is not None


def _stacked(choices: Mapping[str, Choice]) -> dict[str, Tensor]:
    """The stacked tensors of a merged model with these experts."""
    rows = [one.rows for one in choices.values()]
    return {name: torch.stack([of_expert[name] for of_expert in rows]) for name in rows[0]}


def _architecture(described: ModelManifest, experts: int) -> Architecture:
    """The architecture of the merged model that is so `described`, with so many experts."""
    architecture = described.architecture
    routed = architecture.merged_routed(experts).routed if described.kind == "merged" else architecture.routed
    assert routed is not None
    return dataclasses.replace(architecture, routed=dataclasses.replace(routed, experts=experts))


def _write(directory: Path, choices: Mapping[str, Choice]) -> None:
    """Make `choices` the experts of the merged model in `directory`; the caller holds its lock."""
    described, lineage = describe(directory), expert_lineage(directory, DENSE_EXPERT).content
    architecture = _architecture(described, len(choices))
    own = parameters(architecture, described.vocab_size)[1]
    manifest = described.content | {"architecture": architecture.described, "expert_parameters": own}
    lineage["choices"] = [one.recorded.content | {"expert": name} for name, one in choices.items()]
    if described.kind == "merged":
        learned, seeds = learned_of([one.recorded.learned for one in choices.values()])
        lineage |= learned | {"seeds": seeds}
    # A kill before the folder has its name leaves the model as it was; after that `finish_change` ends the change.
    with replacing(directory / PENDING, directory=True) as folder:
        beside, weights = expert_files(folder, DENSE_EXPERT)
        beside.parent.mkdir()
        save_tensors(_stacked(choices), weights)
        lineage["sha256"] = sha256_file(weights)
        write_json(beside, lineage, at=expert_files(directory, DENSE_EXPERT)[0])
        write_json(folder / "model.json", manifest, at=directory / "model.json")
    finish_change(directory)
