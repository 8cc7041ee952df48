"""Adding the expert of a release to a model whose tokens choose their experts (FlexOlmo, arXiv 2507.07024)."""

import dataclasses
from pathlib import Path

import torch

from demix.config.counts import parameters
from demix.config.models import DENSE_EXPERT
from demix.errors import DemixError
from demix.files import refuse_used
from demix.model.checkpoint import describe, expert_lineage, load_model
from demix.model.experts import refuse_other_trunk
from demix.model.merge import write_merged


def add_released(directory: Path, release: Path, output: Path) -> int:
    """Write the token-routed model in `directory` with one more expert, that of `release`; returns how many it has.

    A release has two experts in every layer: the public one, which is the first of both models, and its own. The own
    one's feedforwards and row of each router become the last ones of the model. Raises DemixError unless all other
    tensors of the two models are equal to the bit, and for an expert that the model has.
    """
    refuse_used(output)
    for place in (directory, release):
        if not describe(place)["architecture"].get("routed"):
            cause = "is no model whose tokens choose their experts"
            raise DemixError(place, cause, "add experts/NAME.safetensors of a model with the same shared weights")
    refuse_other_trunk(directory, release, release)
    model, other = load_model(directory), load_model(release)
    ours, theirs = model.architecture, other.architecture
    if ours.routed is None or theirs.routed is None or theirs.routed.experts != 2:
        raise DemixError(release, "has not two experts in a layer, a public one and its own", "give a release")
    old = {name: tensor[0].detach() for name, tensor in model.expert_tensors().items()}
    new = {name: tensor[0].detach() for name, tensor in other.expert_tensors().items()}
    for name, tensor in new.items():
        if not torch.equal(tensor[0], old[name][0]):
            cause = f"has another {name} of the public expert, the first, than {directory}"
            raise DemixError(release, cause, "an expert fits the public expert that it was trained beside")
    if any(all(torch.equal(new[name][1], old[name][n]) for name in new) for n in range(ours.routed.experts)):
        raise DemixError(release, f"holds an expert that {directory} has", "add another")
    count, room = ours.routed.experts + 1, ours.routed.capacity
    capacity = float(count) if room == ours.routed.experts else room
    routed = dataclasses.replace(ours.routed, experts=count, capacity=capacity)
    architecture = dataclasses.replace(ours, routed=routed)
    description = describe(directory) | {
        "architecture": architecture.described,
        "expert_parameters": parameters(architecture, model.vocab_size)[1],
    }
    lineage, of_release = expert_lineage(directory, DENSE_EXPERT), expert_lineage(release, DENSE_EXPERT)
    released = [*lineage.get("released", []), {"model": release.resolve().name, "sha256": of_release["sha256"]}]
    merged = {name: torch.cat([tensor, new[name][1:]]) for name, tensor in old.items()}
    write_merged(directory, description, merged, lineage | {"released": released}, output, None)
    return count
