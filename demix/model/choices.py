"""The experts among which the tokens of a merged model choose: leaving one out, and adding that of another model.

A merged model keeps the sums by expert from which its routers are solved (`demix.model.merge_routed`). They add up, so
that routers are solved again for the experts that are left or join, without anybody's text, and with the penalty and
the factor that were chosen when the model was merged. Training moves states and routers, so that a trained model keeps
no sums, nor does a merge of FlexOlmo's experts, whose routers were learned: there the row of an expert leaves the
routers, or joins them as the other model has it, and all other rows stay.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from demix.config.architecture import Architecture
from demix.config.counts import parameters
from demix.config.models import DENSE_EXPERT
from demix.errors import DemixError, nearest
from demix.files import REMAKE, replacing, sha256_file, write_json
from demix.model.checkpoint import check_values, describe, expert_files, expert_lineage, load_model, save_tensors
from demix.model.gpt import GPT
from demix.model.merge import SUMS, learned_of
from demix.model.merge_routed import Moments, packed, read_sums, routers_of


class Choice(NamedTuple):
    """An expert among which tokens choose: what its model records of it, its rows of all stacked tensors, its sums."""

    recorded: dict[str, Any]
    rows: dict[str, Tensor]
    sums: Moments | None


def read_choices(directory: Path) -> dict[str, Choice]:
    """The experts among which the tokens of the model in `directory` choose, in the order of the router's rows.

    Raises DemixError for a damaged model, and for one that does not say whose experts these are.
    """
    description = describe(directory)
    routed = Architecture(**description["architecture"]).routed
    lineage = expert_lineage(directory, DENSE_EXPERT) if routed else {}
    recorded = {one["expert"]: one for one in lineage.get("choices", ())}
    if not routed or (len(recorded), 1) != (routed.experts, routed.every):
        cause = "is no model that was merged of experts among which its tokens choose"
        raise DemixError(directory, cause, "use one that `demix merge --routed` or a row of BTX made")
    if description["kind"] == "merged" and not all(one.get("learned") for one in recorded.values()):
        raise DemixError(directory, "does not say what each of its experts has learned from", "merge it again")
    stacked = {name: tensor.detach()[0] for name, tensor in load_model(directory).expert_tensors().items()}
    sums = read_sums(directory, tuple(recorded))
    return {
        expert: Choice(one, {name: tensor[number] for name, tensor in stacked.items()}, sums.get(expert))
        for number, (expert, one) in enumerate(recorded.items())
    }


def remove_choice(directory: Path, name: str) -> None:
    """Leave the expert `name` out of every layer of the merged model in `directory`.

    Where the model keeps sums, its routers are solved again from those of the other experts: they are the routers of a
    model that was merged without the expert, by the same penalty and factor. Otherwise the expert's rows leave the
    routers, and the softmax is over the rows that are left: sums of states before training say nothing of the trained
    ones. What shared weights have learned from the expert's domain stays, as do averages of branches.

    Raises DemixError if the model has no such expert, and if fewer than two experts would be left, or fewer than a
    token chooses.
    """
    _write(directory, _rest(directory, name))


def add_choice(directory: Path, other: Path, expert: str, name: str) -> None:
    """Add `expert` of the merged model in `other`, as `name`, to every layer of the merged model in `directory`.

    Both have the same shared weights. The new rows stand where those of `other` do among experts that both have, else
    behind all. Where both models keep sums, routers are solved again; where neither does, the rows of `other` join.

    Raises DemixError for an expert that `other` lacks, a name that is taken, and if one model alone keeps sums.
    """
    own, theirs = read_choices(directory), read_choices(other)
    new = _named(other, theirs, expert)
    if name in own:
        raise DemixError(f"expert {name}", f"is an expert of {directory} already", "give another name, or remove it")
    if (new.sums is None) != (next(iter(own.values())).sums is None):
        with_sums, without = (directory, other) if new.sums is None else (other, directory)
        cause = f"keeps no sums, and the routers of {with_sums} are solved from sums"
        raise DemixError(without / SUMS, cause, "add an expert of a model that was made in the same way")
    names = list(theirs)
    behind = names[names.index(expert) + 1 :]
    experts = list(own.items())
    place = next((number for number, (one, _) in enumerate(experts) if one in behind), len(experts))
    experts.insert(place, (name, new._replace(recorded=new.recorded | {"expert": name})))
    _write(directory, dict(experts))


def load_without(directory: Path, name: str) -> GPT:
    """The merged model in `directory` as `remove_choice` leaves it, whose files stay as they are.

    Raises DemixError as `remove_choice` does.
    """
    description, merge = describe(directory), _merge(directory, _rest(directory, name))
    shared = {key: tensor.detach() for key, tensor in load_model(directory).shared_tensors().items()}
    with torch.device("meta"):
        end = description.get("end_of_text")
        model = GPT(merge.architecture, description["vocab_size"], (DENSE_EXPERT,), end_of_text=end)
    model.load_state_dict(model.stacked(shared, {DENSE_EXPERT: merge.tensors}), assign=True)
    return model


def _rest(directory: Path, name: str) -> dict[str, Choice]:
    """The experts of the merged model in `directory` but `name`."""
    own = read_choices(directory)
    gone = _named(directory, own, name)
    top_k = describe(directory)["architecture"]["routed"]["top_k"]
    if len(own) - 1 < max(2, top_k):
        cause = f"is one of {len(own)} experts, among which each token chooses {top_k}"
        raise DemixError(f"expert {name}", cause, "keep it, or delete the model's folder")
    return {expert: one for expert, one in own.items() if one is not gone}


def _named(directory: Path, choices: Mapping[str, Choice], name: str) -> Choice:
    if name not in choices:
        cause = f"is none among which tokens of {directory} choose"
        raise DemixError(f"expert {name}", cause, nearest(name, choices, "give the name of one"))
    return choices[name]


class _Merge(NamedTuple):
    """The architecture and the stacked tensors of a merged model, and what its routers were solved from."""

    architecture: Architecture
    tensors: dict[str, Tensor]
    sums: dict[str, Moments]


def _merge(directory: Path, choices: Mapping[str, Choice]) -> _Merge:
    """The model in `directory` with `choices` in place of its experts."""
    description, lineage = describe(directory), expert_lineage(directory, DENSE_EXPERT)
    architecture = Architecture(**description["architecture"])
    stacked = {
        name: torch.stack([one.rows[name] for one in choices.values()]) for name in next(iter(choices.values())).rows
    }
    sums = {expert: one.sums for expert, one in choices.items() if one.sums}
    if sums:
        try:
            routers = routers_of(sums, **lineage["router"])
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            raise DemixError(directory / SUMS, "holds sums that no text has", REMAKE) from None
        check_values(directory / SUMS, [("the routers solved from its sums", routers)])
        for number, rows in enumerate(routers):
            name = f"blocks.{number}.feedforward.router"
            stacked[name] = rows.to(stacked[name].dtype)
    untrained = description["kind"] == "merged"
    routed = architecture.merged_routed(len(choices)).routed if untrained else architecture.routed
    assert routed is not None
    routed = dataclasses.replace(routed, experts=len(choices))
    return _Merge(dataclasses.replace(architecture, routed=routed), stacked, sums)


def _write(directory: Path, choices: Mapping[str, Choice]) -> None:
    """Make `choices` the experts of the merged model in `directory`; the caller holds its lock."""
    description, lineage = describe(directory), expert_lineage(directory, DENSE_EXPERT)
    merge = _merge(directory, choices)
    description |= {
        "architecture": merge.architecture.described,
        "expert_parameters": parameters(merge.architecture, description["vocab_size"])[1],
    }
    lineage["choices"] = [one.recorded for one in choices.values()]
    if description["kind"] == "merged":
        learned, seeds = learned_of([one.recorded["learned"] for one in choices.values()])
        lineage |= learned | {"seeds": seeds}
    beside, weights = expert_files(directory, DENSE_EXPERT)
    with replacing(weights) as temporary:
        save_tensors(merge.tensors, temporary)
        lineage["sha256"] = sha256_file(temporary)
        if merge.sums:
            with replacing(directory / SUMS) as of_sums:
                save_tensors(packed(merge.sums), of_sums)
                lineage["sums_sha256"] = sha256_file(of_sums)
    write_json(beside, lineage)
    write_json(directory / "model.json", description)
