"""The start of a training: the state of a dense training after some of its tokens (a seed), or a model."""

import dataclasses
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from demix.config.architecture import Routed, architecture_from
from demix.config.models import DENSE_EXPERT
from demix.data.shards import TokenShard, blocks
from demix.errors import DemixError
from demix.files import digest, fingerprint, linked, read_json, replacing, write_json
from demix.model.directory import SHARED, describe, expert_lineage, load_model, load_verified, refuse_other_tokenizer
from demix.model.gpt import GPT
from demix.model.manifest import SeedManifest, read_seed_manifest, tokens_learned
from demix.model.scoring import EXPERT_TOKENS_AT_ONCE
from demix.train.state import State, expert_file, load_state, step_folder

MANIFEST, EXPERT = "manifest.json", expert_file(DENSE_EXPERT)
# Settings that may differ from the parent: a branch may measure its dev loss more or less often.
FREE = {"dev_blocks"}

# Prefixes of the names of gradient moments in a state. For experts that are copied into one model they are divided.
MOMENTS = ("optimizer/exp_avg", "optimizer/momentum")

# The number of blocks of text over which the initial router state of an anchored expert is averaged.
BLOCKS = 40
# An anchored expert's router row is the mean state times this factor, divided by the square root of the width.
ROW = 10.0


@dataclass(frozen=True)
class SeedState:
    """A kept state of a dense training: the folder seeds/<model>/step-<n> and its manifest.

    With `restart` the training that starts from the state has its own schedule, and does not use the moments.
    """

    directory: Path
    manifest: SeedManifest
    restart: bool = False

    @property
    def model(self) -> str:
        """The name of the parent."""
        return self.directory.resolve().parent.name

    @property
    def origin(self) -> dict[str, Any]:
        """The record of the state in a model that starts from it: the content of `Branched`."""
        about = self.manifest
        origin = {"model": self.model, "step": about.step, "tokens": about.tokens, "state_sha256": digest(about.sha256)}
        return origin | ({"schedule": "restart"} if self.restart else {})

    def first_step(self, step_tokens: int) -> int:
        """The first update (from 0) of a training that starts from the state, with `step_tokens` tokens per step.

        A training that restarts may have another step size than its parent. It starts after at least as many tokens.
        """
        return -(-(self.manifest.tokens or 0) // step_tokens) if self.restart else self.manifest.step

    def load(self, step_tokens: int) -> State:
        """The state for a training with `step_tokens` tokens per step. Its metrics are one row.

        Raises DemixError if a file is missing or damaged.
        """
        about, first = self.manifest, self.first_step(step_tokens)
        files = (load_verified(self.directory / name, about.sha256.get(name, "")) for name in (SHARED, EXPERT))
        kept = "parameter/" if self.restart else ""
        shared, own = ({name: one for name, one in file.items() if name.startswith(kept)} for file in files)
        row: dict[str, Any] = {"step": first, "tokens": about.tokens, "branched_from": self.model}
        row |= {} if about.loss_scale is None or self.restart else {"loss_scale": about.loss_scale}
        return State(first, shared, {DENSE_EXPERT: own}, [row])


class InitialModel(SeedState):
    """The folder of a model of one expert, whose parameters are a state before the first update."""

    @property
    def model(self) -> str:
        """The name of the folder, with _ for characters that a model's name cannot have."""
        return re.sub(r"^[^A-Za-z0-9_]|[^A-Za-z0-9_.-]", "_", self.directory.resolve().name)[:200]

    def load(self, step_tokens: int) -> State:
        """The parameters, without moments. Raises DemixError if a file is missing or damaged."""
        model = load_model(self.directory, (DENSE_EXPERT,))
        shared, own = model.parted({f"parameter/{name}": p.detach() for name, p in model.named_parameters()})
        return State(0, shared, own, [])


def keep_seed(checkpoint: Path, output: Path, identity: Mapping[str, Any]) -> None:
    """Make the folder `output` from the training state `checkpoint` of a dense model, by hard links to its files.

    `identity` is the identity of the training (`demix.train.stage.ModelTraining`). If the state is missing or damaged,
    raises DemixError without making the folder.
    """
    state = load_state(checkpoint, (DENSE_EXPERT,))
    sha256 = {name: read_json(checkpoint / MANIFEST)["sha256"][name] for name in (SHARED, EXPERT)}
    scales = [row["loss_scale"] for row in state.metrics if "loss_scale" in row]
    manifest = {
        "step": state.step,
        "tokens": state.metrics[-1]["tokens"],
        "training": identity["training"],
        "tokenizer_sha256": identity["tokenizer_sha256"],
        "data_sha256": identity["data"],
        "sha256": sha256,
        "loss_scale": scales[-1] if scales else None,
    }
    with replacing(output, directory=True) as temporary:
        for name in sha256:
            linked(checkpoint / name, temporary / name)
        write_json(temporary / MANIFEST, manifest)


def move_seed(identity: Mapping[str, Any], step: int, kept: Path, output: Path) -> bool:
    """Move the state after `step` updates that the training of this `identity` kept below `kept` to `output`.

    Returns whether there was one.
    """
    checkpoint = kept / fingerprint(identity) / step_folder(step)
    try:
        keep_seed(checkpoint, output, identity)
    except DemixError as error:
        again = f"{kept.name}: training it again to step {step}, after which it kept no state ({error.cause})"
        print(again, flush=True)
        return False
    shutil.rmtree(checkpoint)
    if not any(checkpoint.parent.glob("step-*")):
        # Only the lock of the training is left, which has ended.
        shutil.rmtree(checkpoint.parent, ignore_errors=True)
    return True


# Settings that a model with routed experts shares with a model that starts from them.
_EXPERTS = ("experts", "every", "renormalise")


def read_seed(directory: Path, identity: Mapping[str, Any], restart: bool = False) -> SeedState:
    """The seed in the folder seeds/<model>/step-<n>, for a training of this `identity` that continues from it.

    `directory` may also be the folder of a dense or token-routed model, from which an independent training starts.
    Otherwise learning rates and data order are the parent's, unless the training uses only its parameters (`restart`).
    Raises DemixError if the manifest is missing or damaged, or if the parent was trained with another tokenizer or
    architecture or, if its schedule goes on, with other settings.
    """
    if (directory / "model.json").is_file():
        return _initial_model(directory, identity)
    architecture = {key: value for key, value in identity["training"]["architecture"].items() if key != "routed"}
    seed = SeedState(directory, read_seed_manifest(directory / MANIFEST), restart)
    own = {**identity["training"], "tokenizer": identity["tokenizer_sha256"], "architecture": architecture}
    parents = {**seed.manifest.training, "tokenizer": seed.manifest.tokenizer_sha256}
    # Experts of clusters have other numbers of sequences than experts of domains, but the same total per step.
    own["sequences of a step"] = own.pop("sequences") * len(identity["data"]) * identity.get("share", 1)
    parents["sequences of a step"] = parents.pop("sequences") * len(seed.manifest.data_sha256)
    if restart and (seed.manifest.tokens or 0) >= own["tokens"]:
        cause = f"was trained on {seed.manifest.tokens} tokens, but this training ends after {own['tokens']}"
        raise DemixError(directory, cause, "raise tokens, which include those of the warm start")
    compared = {"architecture", "tokenizer"} if restart else (own.keys() | parents.keys()) - FREE
    for key in sorted(compared):
        if own.get(key) != parents.get(key):
            cause = f"is from a training with {key} {parents.get(key)}, but this one has {own.get(key)}"
            raise DemixError(directory, cause, "train both with the same settings")
    return seed


def _initial_model(directory: Path, identity: Mapping[str, Any]) -> InitialModel:
    described, lineage = describe(directory), expert_lineage(directory, DENSE_EXPERT)
    own, parents = architecture_from(identity["training"]["architecture"]), described.content["architecture"]
    begun, given = own.unrouted, parents.get("routed")
    if given and own.routed:
        # The number of existing routed experts cannot change; how a token chooses among them may.
        begun = own.replace(routed=Routed(**given | {key: getattr(own.routed, key) for key in _EXPERTS}))
    # A model without a table of positions can use blocks of any length.
    architecture = begun.described | ({} if own.position == "learned" else {"context": parents["context"]})
    if parents != architecture:
        cause = f"has the architecture {parents}, but this training has {architecture}"
        raise DemixError(directory, cause, "give the section architecture the model's values")
    refuse_other_tokenizer(directory, Path("tokens"), identity["tokenizer_sha256"])
    manifest = SeedManifest(
        step=0,
        tokens=tokens_learned(described.content),
        training={},
        tokenizer_sha256=identity["tokenizer_sha256"],
        data_sha256=described.data_sha256,
        sha256={SHARED: described.shared_sha256, EXPERT: lineage.sha256},
        choices=lineage.content.get("choices", []),
    )
    return InitialModel(directory, manifest)


def branched(state: State, experts: Sequence[str], scope: str = "feedforward") -> State:
    """The state of a dense model, converted to a model with `experts`, each a copy of the tensors it owns by `scope`.

    With scope `model` an expert is a copy of the whole model with unchanged moments, because its loss is the mean over
    only its own domain. With scope `feedforward` an expert is a copy of the dense feedforwards, and shared tensors do
    not change. The moments of such an expert, Adam's and Muon's, are divided by E, the number of experts, because the
    loss is the mean over all domains (docs/explanation/warm-start.md, Moments).
    """
    (dense,) = state.experts.values()
    if scope == "model":
        # Adam's counts of updates stay with the shared tensors.
        counts = {name: tensor for name, tensor in state.shared.items() if name.startswith("optimizer/step/")}
        whole = {name: tensor for name, tensor in state.shared.items() if name not in counts} | dense
        return State(state.step, counts, dict.fromkeys(experts, whole), state.metrics)
    own = {name: tensor / len(experts) if name.startswith(MOMENTS) else tensor for name, tensor in dense.items()}
    return State(state.step, state.shared, dict.fromkeys(experts, own), state.metrics)


def upcycled(state: State, model: GPT) -> State:
    """The state of a dense model, converted to `model`: in token-routed layers each expert copies the feedforward.

    Routers stay as in the initialised `model`. Existing routed experts and their routers do not change. The state has
    no moments (Komatsuzaki et al. 2023, "Sparse Upcycling", keep the optimizer's state).
    """
    ((expert, dense),) = state.experts.items()
    _, own = model.parted({f"parameter/{name}": tensor.detach() for name, tensor in model.named_parameters()})
    (begun,) = own.values()
    copies = {name: tensor for name, tensor in begun.items() if name.endswith(".router")}
    for name, tensor in dense.items():
        copies[name] = tensor.expand(begun[name].shape)
    return State(state.step, state.shared, {expert: copies}, state.metrics)


def freeze_except(model: GPT, first: State, learns: Callable[[str], bool]) -> None:
    """Freeze the parameters of `model` whose names `learns` does not accept; all start as in the state `first`."""
    begun = model.stacked(first.shared, first.experts)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(begun[f"parameter/{name}"])
            parameter.requires_grad_(learns(name))


def anchored(model: GPT, first: State, public: Mapping[str, TokenShard]) -> State:
    """Freeze `model` except the second feedforward of each layer and its router row.

    `model` has one expert of a domain, and two feedforwards in every layer, both copies of the parent's in the state
    `first` (FlexOlmo, Shi et al. 2025, arXiv 2507.07024). The first one, the anchor, does not change if there is no
    weight decay. Router rows start as mean states: for the expert on its domain's text, for the anchor on the text of
    all domains in `public`. The anchor's row is subtracted from both rows, which does not change any gate; the anchor's
    row is then 0 for every expert. Returns `first` with these rows.
    """
    (domain,) = model.experts
    freeze_except(model, first, lambda name: ".feedforward." in name)
    means = {name: _mean_states(model, shard) for name, shard in public.items()}
    rows = ROW / math.sqrt(model.architecture.width) * (means[domain] - torch.stack([*means.values()]).mean(0))
    own = dict(first.experts[domain])
    for number, row in enumerate(rows):
        own[f"parameter/blocks.{number}.feedforward.router"] = torch.stack([torch.zeros_like(row), row]).float()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(_of_second)  # type: ignore[no-untyped-call]
    return dataclasses.replace(first, experts={domain: own})


@torch.no_grad()
def _mean_states(model: GPT, shard: TokenShard) -> Tensor:
    """The mean normalised input of each feedforward over the first blocks of `shard`: float64 [layers, D].

    Padding is not counted.
    """
    length, device = model.architecture.context, model.token_embedding.device
    inputs, _, mask = blocks(shard, length, BLOCKS * length)
    sums = torch.zeros(len(model.blocks), model.architecture.width, dtype=torch.float64)
    counted: Tensor

    def add(number: int, _: nn.Module, given: tuple[Tensor, ...]) -> None:
        sums[number] += given[0][0][counted].double().sum(0).cpu()

    layers = enumerate(block.get_submodule("feedforward") for block in model.blocks)
    hooks = [layer.register_forward_pre_hook(partial(add, number)) for number, layer in layers]
    batch = max(1, EXPERT_TOKENS_AT_ONCE // length)
    for first in range(0, len(inputs), batch):
        rows = slice(first, first + batch)
        counted = torch.from_numpy(mask[rows]).to(device)
        model(torch.from_numpy(inputs[rows])[None].to(device))
    for hook in hooks:
        hook.remove()
    return sums / int(mask.sum())


def _of_second(gradient: Tensor) -> Tensor:
    """The gradient [1, 2, ...] of two experts, with zeros for the first."""
    return torch.stack([torch.zeros_like(gradient[:, 0]), gradient[:, 1]], dim=1)
