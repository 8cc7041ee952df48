"""The manifests of a model directory, with types and bounds: `model.json`, and `experts/<name>.json` of each expert.

A model directory may come from anybody. Names are used in paths, tables and cards, and sizes in allocations, so each
value has a form and a bound. A description may have further keys that are not declared here.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from demix.config.architecture import Architecture
from demix.config.evaluation import Context, Temperature
from demix.config.mixing import DEFAULTS
from demix.errors import DemixError, nearest
from demix.files import read_json
from demix.settings import Integer, Items, Number, OpenSettings, Settings, Text, settings_from

T = TypeVar("T", bound=Settings)

# A description has a few lines for each domain.
MAX_BYTES = 4 << 20

NO_NAME = ("is not a usable name of an expert", "use lower-case letters, digits and _, at most 200")


def _expert_name(name: str) -> str:
    if not is_expert_name(name):
        raise ValueError(*NO_NAME)
    return name


def is_expert_name(name: str) -> bool:
    """Whether `name` can name an expert, its files, and its row in tables."""
    return re.fullmatch("[a-z0-9_]{1,200}", name) is not None


ExpertName = Annotated[Text, AfterValidator(_expert_name)]
ModelName = Annotated[Text, Field(pattern="^[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}$")]
Digest = Annotated[Text, Field(pattern="^[0-9a-z]{1,64}$")]
Count = Annotated[Integer, Field(ge=0, le=10**18)]
Share = Annotated[Number, Field(ge=0, le=1)]
Values = dict[Text, Any]


class Trained(OpenSettings):
    """The settings of a training that later stages need."""

    learning_rate: Annotated[Number, Field(gt=0, le=1e6)]
    seed: Count


class Manifest(OpenSettings):
    """The common part of the descriptions of a model and an expert. The file may have further keys.

    `seeds` are the tokens of the states from which the training started, by sha256; `tokens` includes them. Steps and
    tokens are None if they are unknown, as for an imported model.
    """

    steps: Count | None = None
    tokens: Count | None = None
    data_sha256: dict[ExpertName, Digest] = Field(default_factory=dict)
    seeds: dict[Digest, Count] = Field(default_factory=dict)
    shared_sha256: Digest
    tokenizer_sha256: Digest | None = None
    parent_sha256: Digest | None = None
    adaptation: Values = Field(default_factory=dict)
    _file: Values = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _remember(cls, values: Any, make: ModelWrapValidatorHandler[Self]) -> Self:
        made = make(values)
        made._file.update(values)
        return made

    @property
    def content(self) -> Values:
        """The file as it is written, a copy."""
        return {**self._file}


class Branched(OpenSettings):
    """The state of another model from which a training started (`demix.train.branch`).

    `schedule` says whether the training continued the schedule of that model. `step` is 0 for a model in a folder; its
    `tokens` are not included in the training's tokens.
    """

    model: ModelName
    step: Count
    tokens: Count | None = None
    state_sha256: Digest
    schedule: Literal["continue", "restart"] = "continue"


class SeedManifest(OpenSettings):
    """The content of `seeds/<model>/step-<n>/manifest.json`: the state of a training after `step` updates.

    `training` are the settings that identify the training. `data_sha256` has, by domain, the hash of the tokens that
    the training read, and `sha256` the hashes of the state's files. `loss_scale` is the factor of the loss in the next
    update in fp16. If the training started from merged experts, `choices` are these experts, as in their lineage.
    """

    step: Count
    tokens: Count | None
    training: Values
    tokenizer_sha256: Digest
    data_sha256: dict[ExpertName, Digest]
    sha256: dict[Text, Digest]
    loss_scale: Number | None = None
    choices: list[Values] = Field(default_factory=list)


class ModelManifest(Manifest):
    """The content of `model.json`.

    `parent` is the name of the model that was adapted, or the state of the model from which a branch started. `tokens`
    includes those of the dense warm start (`tokens_seed`). `experts` are the digests of the descriptions of the experts
    with which the model was written; others may be added or replace them.
    """

    parent: ModelName | Branched | None = None
    tokens_seed: Count = 0
    architecture: Architecture
    vocab_size: Annotated[Integer, Field(ge=1, le=1 << 24)]
    domain_tokens: Annotated[Items[ExpertName], Field(max_length=10_000)]
    expert_scope: Literal["feedforward", "model"] = "feedforward"
    kind: ModelName = "dense"
    shared_parameters: Count = 0
    expert_parameters: Count = 0
    training: Trained | None = None
    experts: dict[ExpertName, Digest] = Field(default_factory=dict)


class Origin(OpenSettings):
    """The part of one parent in a merged expert."""

    weight: Share
    sha256: Digest


class RecordedChoice(OpenSettings):
    """An expert of a merged token-routed model. An anchor has the name of a dense model's expert."""

    expert: ExpertName
    sha256: Digest


class ExpertManifest(Manifest):
    """The description of an expert.

    `choices` are the experts that were merged into a token-routed one, in the order of the router's rows.
    """

    sha256: Digest
    name: ExpertName = "dense"
    parent: ModelName | None = None
    parents: dict[ExpertName, Origin] = Field(default_factory=dict)
    parent_prior: Share | None = None
    choices: Annotated[Items[RecordedChoice], Field(max_length=4096)] = ()


class Mixing(OpenSettings):
    """The content of `mixing.json`: the parameters of the rule `tempered`, chosen for a model."""

    beta: Annotated[Number, Field(ge=0, le=10)]
    gamma: Share


class Usual(OpenSettings):
    """The perplexity and the bits per byte of an expert on the test split of its own domain."""

    perplexity: Annotated[Number, Field(gt=0)]
    bits_per_byte: Annotated[Number, Field(gt=0)]


class Usuals(OpenSettings):
    """The content of `usual.json`: the results of a model's experts on their own domains."""

    experts: dict[ExpertName, Usual]


class Routed(OpenSettings):
    """The content of `clusterer/routing.json`: the name of a clustering, and how its distances weight experts."""

    clustering: ModelName
    context: Context
    temperature: Temperature


def read_routed(path: Path) -> Routed:
    """The content of `clusterer/routing.json`. Raises DemixError if the file is missing or damaged."""
    return _stated(path, Routed, "weights by distance", "get the model again")


def read_usual(path: Path) -> dict[str, Usual]:
    """The results in `usual.json` by expert. Raises DemixError if the file is damaged or has other content."""
    return _stated(path, Usuals, "the usual figures of experts", "remove it, or run `demix card` again").experts


def tempered_of(directory: Path) -> tuple[float, ...]:
    """β and γ of the rule `tempered`: from the model's `mixing.json`, or the defaults without this file.

    Raises DemixError if the file is damaged or has other content.
    """
    path = Path(directory) / "mixing.json"
    if not path.exists():
        return DEFAULTS["tempered"]
    found = _stated(path, Mixing, "a mixture", "run `demix choose-mixing` again, or remove the file")
    return float(found.beta), float(found.gamma)


def read_description(path: Path, *needed: str) -> ModelManifest:
    """The content of `model.json`, which must have the keys `needed` and those without a default.

    Raises DemixError if the file is missing or damaged, or does not describe a model.
    """
    if not os.path.lexists(path):
        models = [*path.parent.parent.glob("*/model.json"), *path.parent.glob("models/*/model.json")]
        cure = nearest(path.parent, sorted(model.parent for model in models), "train the model first")
        if (path.parent / "config.json").exists() and (path.parent / "model.safetensors").exists():
            cure = f"import a Hugging Face folder: demix import {path.parent} --output FOLDER"
        raise DemixError(path, "is missing, so its folder is not a model", cure)
    return _stated(path, ModelManifest, "a model", "train the model again, or get it again", needed)


def read_lineage(path: Path, *needed: str) -> ExpertManifest:
    """The content of `experts/<name>.json`, as `read_description` reads `model.json`."""
    return _stated(path, ExpertManifest, "an expert", "train or adapt it again, or get it again", needed)


def parent_of(lineage: Mapping[str, Any]) -> str | None:
    """The origin of an expert: its parent's name, or several names (averaged or merged); None if from scratch."""
    several = next((name for key, name in (("parents", "average"), ("choices", "choices")) if lineage.get(key)), None)
    return several or lineage.get("parent")


def tokens_learned(description: Mapping[str, Any]) -> int | None:
    """The tokens on which a model was trained, including those of a model in a folder from which it started.

    None if they are not known, as for an imported model and models that started from one.
    """
    tokens, parent = description.get("tokens"), description.get("parent")
    # An adapted model counts only the tokens of its adaptation.
    if tokens is None or isinstance(parent, str):
        return None
    before = parent.get("tokens") if parent and not parent["step"] else 0
    return None if before is None else tokens + before


def read_seed_manifest(path: Path) -> SeedManifest:
    """The manifest of a seed (a kept training state). Raises DemixError if the file is missing or damaged."""
    return _stated(path, SeedManifest, "a seed", "delete its folder, then rerun")


def _stated(path: Path, form: type[T], what: str, cure: str, needed: tuple[str, ...] = ()) -> T:
    content = read_json(path, MAX_BYTES)
    try:
        stated = settings_from(form, content, "")
        for key in needed:
            if content.get(key) is None:
                raise DemixError(key, "is missing", "but this command needs it")
    except DemixError as error:
        fault = f"{error.subject.strip('.')} {error.cause}, {error.cure}"
        raise DemixError(path, f"does not describe {what} ({fault})", cure) from None
    return stated


def run_of(directory: Path) -> Path:
    """The folder results/<run> of the model results/<run>/models/<model>."""
    return Path(directory).resolve().parent.parent
