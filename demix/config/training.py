"""The section `training`, and classes for the parts of sections that a stage uses.

A stage's settings inherit from these classes: `TrainingRecipe` is the part of the section `training` that
`demix.train.stage.Training` uses. `Execution` holds the settings that change only time and memory.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from demix.errors import DemixError
from demix.settings import DistinctItems, Integer, Number, Positive, Settings, Switch, absent, names_of, written

Threads = Annotated[
    Positive,
    Field(
        description="CPU threads of each training, adaptation and scoring job. The last bits of losses depend on it, "
        "so it is set here. Snakemake's --cores only limits how many jobs run at the same time."
    ),
]
# The largest published runs have about 16,000 sequences per step and as many GPUs. The placement lists every rank.
Sequences = Annotated[Positive, Field(le=1_000_000)]
Ranks = Annotated[Positive, Field(le=100_000)]
LearningRate = Annotated[Number, Field(gt=0, description="Peak learning rate.")]


# The number of newest checkpoints of a training that are kept.
KEPT_CHECKPOINTS = 2


class Execution(Settings):
    """Settings that change only the time and memory of a training. They are not part of fingerprints."""

    checkpoint_every: Positive = Field(
        default=100, description="Steps between checkpoints. A killed run resumes from the newest checkpoint."
    )
    micro_sequences: Positive | None = Field(
        default=None,
        description="Sequences per expert in one micro-batch of a rank; gradients are accumulated over micro-batches. "
        "null: all sequences of a step at once.",
    )
    compile: Switch = Field(default=False, description="Compile the transformer layers (torch.compile).")
    checkpoint_activations: Switch = Field(
        default=False,
        description="Recompute activations in the backward pass instead of storing them: a third slower, far less "
        "memory.",
    )
    shard_optimizer: Switch = Field(
        default=False,
        description="Keep a parameter's optimizer moments on only one of the ranks that have the parameter; that rank "
        "updates it and sends it to the others. On n ranks, AdamW's moments then need 8/n bytes per parameter, not 8. "
        "Muon's moments are always divided.",
    )


Ratio = Annotated[Number, Field(gt=0, le=1e4)]
Beta = Annotated[Number, Field(ge=0, lt=1)]


class OptimizerSettings(Settings):
    """How gradients become updates. Learning rates of parameter groups are multiples of `learning_rate`.

    `matrices` are the weights of linear maps in layers: attention's and the feedforwards', separately for each expert.
    """

    kind: Literal["adamw", "muon"] = Field(
        description="adamw (Loshchilov and Hutter 2019) or muon (Jordan et al. 2024): for the matrices of layers, "
        "momentum whose singular values are all brought near 1, and AdamW for all other parameters."
    )
    beta1: Beta = Field(default=0.9, description="Decay of AdamW's mean of gradients in an update.")
    beta2: Beta = Field(default=0.95, description="Decay of AdamW's mean of squared gradients in an update.")
    epsilon: Number = Field(default=1e-7, gt=0, le=1, description="Added to the root of AdamW's mean square.")
    decay: Literal["all", "matrices"] = Field(
        default="all",
        description="Parameters with weight decay: all, or only the matrices of layers (no norms, biases and "
        "embeddings).",
    )
    matrices: Ratio = Field(default=1.0, description="Learning rate of the matrices of layers.")
    embeddings: Ratio = Field(default=1.0, description="Learning rate of input embeddings, including a tied one.")
    head: Ratio = Field(default=1.0, description="Learning rate of the output embedding of an untied head.")
    bigrams: Ratio | None = Field(
        default_factory=absent, description="Learning rate of bigram embeddings. Default: `embeddings`."
    )
    value_embeddings: Ratio | None = Field(
        default_factory=absent, description="Learning rate of value embeddings. Default: `embeddings`."
    )


class RateSchedule(Settings):
    """How the learning rate falls after the warm-up."""

    kind: Literal["linear", "cosine", "wsd"] = Field(
        description="linear, cosine, or wsd (warm-up, stable, decay): the rate stays at its peak and falls linearly in "
        "the last `share` of the steps."
    )
    end: Annotated[Number, Field(ge=0, le=1)] = Field(
        default=0.0, description="Learning rate at the end, as a fraction of the peak."
    )
    share: Annotated[Number, Field(gt=0, le=1)] = Field(
        default=0.2, description="wsd: fraction of the steps in which the rate falls."
    )
    stretch: Annotated[Number, Field(ge=1, le=100)] | None = Field(
        default_factory=absent,
        description="linear and cosine: length of the schedule as a multiple of the training's. At 1.1 training ends "
        "before the rate has reached its final value (Hoffmann et al. 2022, Figure A1). Default: 1.",
    )

    def model_post_init(self, context: Any, /) -> None:
        if self.kind != "wsd" and self.share != 0.2:
            cause = f"is not a key of kind {self.kind}"
            raise DemixError("learning_rate_schedule.share", cause, "remove it, or use wsd")
        if self.kind == "wsd" and self.stretch is not None:
            cause = "is not a key of kind wsd"
            raise DemixError("learning_rate_schedule.stretch", cause, "remove it, or use linear or cosine")


class OptimizerRecipe(Settings):
    """The optimizer and its learning-rate schedule (paper, Tables 9-12)."""

    warmup: Number = Field(
        default=0.08,
        ge=0,
        le=1,
        description="Fraction of the steps in which the learning rate rises linearly to its peak. In the remaining "
        "steps it follows `learning_rate_schedule` (default: linearly to zero).",
    )
    clip: Number = Field(
        default=0.1, gt=0, description="Maximum L2 norm of the gradient; larger gradients are scaled down to it."
    )
    weight_decay: Number = Field(default=0.1, ge=0, description="Decoupled weight decay.")
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        default="fp32",
        description="Number format of the computation. Parameters and optimizer state are fp32; with fp64, which is "
        "for exact comparisons, they are fp64. fp16 uses loss scaling.",
    )
    optimizer: OptimizerSettings | None = Field(
        default_factory=absent,
        description="How gradients become updates. Default: AdamW with the paper's constants and one learning rate; "
        "weight decay applies to norms and biases, too (as in fairseq).",
    )
    learning_rate_schedule: RateSchedule | None = Field(
        default_factory=absent,
        description="How the learning rate falls after the warm-up. Default: linearly to zero.",
    )
    dropout: Annotated[Number, Field(ge=0, lt=1)] | None = Field(
        default_factory=absent,
        description="Dropout rate of the outputs of attention and feedforwards before they are added to the residual "
        "stream, as in OPT (c-BTM: 0.1). Scores and losses on dev use no dropout. Default: 0.",
    )


def fingerprinted(given: Any) -> dict[str, Any]:
    """The settings that identify a training or an adaptation: all except those of `Execution`."""
    return stated(given, names_of(Execution))


def stated(given: Any, without: Iterable[str] = ()) -> dict[str, Any]:
    """Settings as a mapping, without those named in `without` and without keys that are absent."""
    found: dict[str, Any] = given.model_dump(exclude_none=True, exclude=set(without), warnings=False)
    return found


def selected(recipe: type, section: Any) -> dict[str, Any]:
    """The values of a config's section, as written, that a stage with the settings class `recipe` uses.

    A change of a returned value reruns the stage, so the settings of `Execution` are left out, and so are absent keys.
    """
    names = {*names_of(recipe)} - {*names_of(Execution)}
    return {key: value for key, value in written(section).items() if key in names}


class Sweep(Settings):
    """Short trainings by which the peak learning rate is chosen."""

    learning_rates: DistinctItems[LearningRate] = Field(
        min_length=1, description="Peak learning rates to try, one job for each."
    )
    tokens: Positive = Field(description="Training tokens of each job, which has a full learning-rate schedule.")


class TrainingSettings(Execution, OptimizerRecipe):
    """How many tokens one training uses, and at which learning rate."""

    tokens: Positive = Field(description="Total training tokens of one model.")
    sequences: Sequences = Field(description="Sequences of each domain in one optimizer step.")
    learning_rate: LearningRate = Field()
    dev_blocks: Integer = Field(
        default=0,
        ge=0,
        description="Blocks of each domain's dev split on which the model is evaluated at every checkpoint; 0: none.",
    )


class RouterTraining(Settings):
    """Which parameters of a token-routed model are trained."""

    trained: Literal["routers"] | None = Field(
        default_factory=absent,
        description="For kind routed, if training starts from experts (a parent of kind demix, branched or anchored, "
        "or a folder of a token-routed model): `routers` trains only the routers. Default: all parameters are trained.",
    )


class TrainingRecipe(TrainingSettings, RouterTraining):
    """The settings of a model entry that its training uses."""


# How models are trained, except the learning rate and the numbers of tokens.
TRAINING_PRESETS: dict[str, dict[str, Any]] = {
    "modern": {
        "warmup": 0.04,
        # The updates of Muon and Adam do not grow with the gradient, so clipping is not needed.
        "clip": 1000.0,
        "weight_decay": 0.0,
        "optimizer": {
            "kind": "muon",
            "beta1": 0.8,
            "beta2": 0.95,
            "epsilon": 1e-10,
            "decay": "matrices",
            "matrices": 2.5,
            "embeddings": 25.0,
            "head": 1.0,
        },
        "learning_rate_schedule": {"kind": "wsd", "share": 0.5, "end": 0.0},
    },
}
TRAINING_PRESETS["compact"] = TRAINING_PRESETS["modern"] | {
    "optimizer": TRAINING_PRESETS["modern"]["optimizer"] | {"bigrams": 25.0, "value_embeddings": 5.0}
}
TRAINING_PRESETS["paper"] = {
    key: OptimizerRecipe.model_fields[key].get_default(call_default_factory=True) for key in TRAINING_PRESETS["modern"]
}
PRESET = (
    "Name for values of warmup, clip, weight_decay, optimizer and learning_rate_schedule; keys that are given replace "
    "them. null: no preset. modern: Muon for the matrices of layers, AdamW with a large rate for embeddings, no weight "
    "decay, no clipping, and a rate that falls in the second half of the steps (`demix config --values` prints all). "
    "compact: modern with rates for bigram and value embeddings. paper: the values without a preset."
)


def with_presets(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a file, with the presets of `training` and of the entries of `models` expanded to their values.

    Keys that are given next to a preset replace its values. An unknown preset stays as it is.
    """
    found, entries = dict(values), values.get("models")
    if "training" in values:
        found["training"] = _with_preset(values["training"])
    if isinstance(entries, dict):
        found["models"] = {name: _with_preset(entry) for name, entry in entries.items()}
    return found


def _with_preset(section: Any) -> Any:
    preset = section.get("preset") if isinstance(section, dict) else None
    if not isinstance(preset, str) or preset not in TRAINING_PRESETS:
        return section
    return TRAINING_PRESETS[preset] | {key: value for key, value in section.items() if key != "preset"}


class TrainingSection(TrainingSettings):
    """Training settings of all models. An entry of `models` overrides them for one model."""

    preset: Literal["modern", "compact", "paper"] | None = Field(default_factory=absent, description=PRESET)

    ranks: Ranks = Field(
        default=1,
        description="Processes that train one model together: a multiple or a divisor of the number of training "
        "domains. Results do not depend on it, except for rounding.",
    )
    sweep: Sweep | None = Field(
        default=None,
        description="Short trainings of every model to choose its learning rate: the largest of `learning_rates` that "
        "does not diverge. The chosen rate replaces `learning_rate`. null: no sweep.",
    )
