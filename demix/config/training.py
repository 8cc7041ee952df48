"""The section `training`, and the settings that a stage uses of it and of other sections.

A stage inherits the settings that it uses: `TrainingRecipe` is the part of the section `training` that
`demix.train.stage.Training` uses. `Execution` holds the settings that change nothing but time and memory.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from demix.errors import DemixError
from demix.settings import DistinctItems, Integer, Number, Positive, Settings, Switch, absent, names_of, written

Threads = Annotated[
    Positive,
    Field(
        description="CPU threads of each training, adaptation and scoring job. The last bits of losses depend on this "
        "number, so the config sets it. Snakemake's --cores only limits how many jobs run side by side."
    ),
]
# The largest published runs have steps of some 16,000 sequences, on as many GPUs. The placement of ranks lists each.
Sequences = Annotated[Positive, Field(le=1_000_000)]
Ranks = Annotated[Positive, Field(le=100_000)]
LearningRate = Annotated[Number, Field(gt=0, description="Peak learning rate.")]


# The newest checkpoints of a training, which stay.
KEPT_CHECKPOINTS = 2


class Execution(Settings):
    """Settings that change only the time and memory of a training. Fingerprints leave these settings out."""

    checkpoint_every: Positive = Field(
        default=100, description="Steps between checkpoints. A killed run resumes from the newest checkpoint."
    )
    micro_sequences: Positive | None = Field(
        default=None,
        description="Sequences of each expert in one micro-batch of a rank; gradients accumulate over micro-batches. "
        "null means all sequences of a step at once.",
    )
    compile: Switch = Field(default=False, description="Compile the transformer blocks (torch.compile).")
    checkpoint_activations: Switch = Field(
        default=False,
        description="Recompute activations in the backward pass instead of storing them: a third slower, far less "
        "memory.",
    )
    shard_optimizer: Switch = Field(
        default=False,
        description="Keep the optimizer's moments of each parameter on one of the ranks that have the parameter, which "
        "updates it and sends it to the others: a rank of n has 8/n bytes of moments a parameter instead of 8.",
    )


Ratio = Annotated[Number, Field(gt=0, le=1e4)]
Beta = Annotated[Number, Field(ge=0, lt=1)]


class OptimizerSettings(Settings):
    """How gradients become updates, with the learning rates of groups of parameters as multiples of `learning_rate`.

    `matrices` are the weights of linear maps in blocks, each expert's by itself: attention's and the feedforwards'.
    """

    kind: Literal["adamw", "muon"] = Field(
        description="adamw (Loshchilov and Hutter 2019) or muon (Jordan et al. 2024): momentum whose singular values "
        "are all brought near 1, for the matrices of blocks, and AdamW for all else."
    )
    beta1: Beta = Field(default=0.9, description="Decay of AdamW's mean of gradients in an update.")
    beta2: Beta = Field(default=0.95, description="Decay of AdamW's mean of squared gradients in an update.")
    epsilon: Number = Field(default=1e-7, gt=0, le=1, description="What AdamW adds to the root of the mean square.")
    decay: Literal["all", "matrices"] = Field(
        default="all",
        description="What weight decay reaches: all parameters, or only the matrices of blocks (no norms, biases and "
        "embeddings).",
    )
    matrices: Ratio = Field(default=1.0, description="Learning rate of the matrices of blocks.")
    embeddings: Ratio = Field(default=1.0, description="Learning rate of embeddings that are inputs, a tied one too.")
    head: Ratio = Field(default=1.0, description="Learning rate of the output embedding of a head of its own.")
    bigrams: Ratio | None = Field(
        default_factory=absent, description="Learning rate of tables of bigrams. Without the key that of embeddings."
    )
    value_embeddings: Ratio | None = Field(
        default_factory=absent, description="Learning rate of value embeddings. Without the key that of embeddings."
    )


class RateSchedule(Settings):
    """How the learning rate falls after the warm-up."""

    kind: Literal["linear", "cosine", "wsd"] = Field(
        description="linear, cosine, or wsd (warm-up, stable, decay): the peak until the last `share` of the steps, in "
        "which the rate falls linearly."
    )
    end: Annotated[Number, Field(ge=0, le=1)] = Field(
        default=0.0, description="Learning rate at the end, as a fraction of the peak."
    )
    share: Annotated[Number, Field(gt=0, le=1)] = Field(
        default=0.2, description="Fraction of the steps in which the rate of wsd falls."
    )
    stretch: Annotated[Number, Field(ge=1, le=100)] | None = Field(
        default_factory=absent,
        description="How many times longer than the training linear and cosine are: at 1.1 the training ends before "
        "the rate has fallen to its end (Hoffmann et al. 2022, Figure A1). Without the key 1.",
    )

    def model_post_init(self, context: Any, /) -> None:
        if self.kind != "wsd" and self.share != 0.2:
            cause = f"is given to the kind {self.kind}"
            raise DemixError("learning_rate_schedule.share", cause, "leave it out, or use wsd")
        if self.kind == "wsd" and self.stretch is not None:
            cause = "is given to the kind wsd"
            raise DemixError("learning_rate_schedule.stretch", cause, "leave it out, or use linear or cosine")


class OptimizerRecipe(Settings):
    """The optimizer and its learning-rate schedule (paper, Tables 9-12)."""

    warmup: Number = Field(
        default=0.08,
        ge=0,
        le=1,
        description="Fraction of the steps in which the learning rate rises linearly to its peak. In the remaining "
        "steps the learning rate falls linearly to zero.",
    )
    clip: Number = Field(
        default=0.1, gt=0, description="Largest L2 norm of the gradient; larger gradients are scaled down to this norm."
    )
    weight_decay: Number = Field(default=0.1, ge=0, description="Decoupled weight decay.")
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        default="fp32",
        description="Number format of the computation. Weights and optimizer state are fp32, except with fp64, which "
        "serves exact comparisons. fp16 scales the loss.",
    )
    optimizer: OptimizerSettings | None = Field(
        default_factory=absent,
        description="How gradients become updates. Without the key AdamW with the paper's constants, at one learning "
        "rate, whose weight decay reaches norms and biases too (as in fairseq).",
    )
    learning_rate_schedule: RateSchedule | None = Field(
        default_factory=absent,
        description="How the learning rate falls after the warm-up. Without the key linearly to zero.",
    )
    dropout: Annotated[Number, Field(ge=0, lt=1)] | None = Field(
        default_factory=absent,
        description="Share of the units that attention and feedforwards add to the residual stream which training "
        "drops, as in OPT (c-BTM: 0.1). Scores and losses on dev drop none. Without the key 0.",
    )


def fingerprinted(given: Any) -> dict[str, Any]:
    """The settings that identify a training or an adaptation: all but those of `Execution`."""
    return stated(given, names_of(Execution))


def stated(given: Any, without: Iterable[str] = ()) -> dict[str, Any]:
    """Settings as a mapping, but for those named in `without`, and without keys that say nothing."""
    found: dict[str, Any] = given.model_dump(exclude_none=True, exclude=set(without), warnings=False)
    return found


def selected(recipe: type, section: Any) -> dict[str, Any]:
    """The values, as written, that the stage with the settings `recipe` uses of a config's section.

    The settings of `Execution` are left out, because a change of any value that is returned reruns the stage. So are
    keys that the section is without.
    """
    names = {*names_of(recipe)} - {*names_of(Execution)}
    return {key: value for key, value in written(section).items() if key in names}


class Sweep(Settings):
    """Short trainings that choose the peak learning rate."""

    learning_rates: DistinctItems[LearningRate] = Field(
        min_length=1, description="Peak learning rates to try, one job for each."
    )
    tokens: Positive = Field(description="Training tokens of each job; the learning-rate schedule has the same length.")


class TrainingSettings(Execution, OptimizerRecipe):
    """How much one training learns from, and how fast."""

    tokens: Positive = Field(description="Total training tokens of one model.")
    sequences: Sequences = Field(description="Sequences of each domain in one optimizer step.")
    learning_rate: LearningRate = Field()
    dev_blocks: Integer = Field(
        default=0,
        ge=0,
        description="Blocks of each domain's dev split to evaluate at every checkpoint; 0 evaluates none.",
    )


class RouterTraining(Settings):
    """What is trained of a model whose tokens choose their experts."""

    trained: Literal["routers"] | None = Field(
        default_factory=absent,
        description="In an entry of kind routed that begins with routed experts (a parent of kind demix, branched or "
        "anchored, or a folder): `routers` trains only the routers. Without the key everything is trained.",
    )


class TrainingRecipe(TrainingSettings, RouterTraining):
    """The settings of a model that its training uses."""


# How models are trained, but for the learning rate and the lengths.
TRAINING_PRESETS: dict[str, dict[str, Any]] = {
    "modern": {
        "warmup": 0.04,
        # Neither Muon's updates nor Adam's grow with the gradient.
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
    "Values of warmup, clip, weight_decay, optimizer and learning_rate_schedule under one name, which "
    "other keys replace; null means no preset. modern: Muon for the matrices of blocks, AdamW with a large rate for "
    "embeddings, no weight decay, no clipping, and a rate that falls in the second half of the steps (`demix config "
    "--values` prints all). compact: modern, for the decoder of this name. paper: what these keys are without a preset."
)


def with_presets(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a file whose `training` and entries of `models` have the values of their presets.

    Other keys replace those of a preset. A preset that is not known stays.
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
    """Settings of the training of all models. An entry of `models` overrides them for one model."""

    preset: Literal["modern", "compact", "paper"] | None = Field(default_factory=absent, description=PRESET)

    ranks: Ranks = Field(
        default=1,
        description="Processes that train one model together: a multiple or a divisor of the number of training "
        "domains. The result does not depend on this number.",
    )
    sweep: Sweep | None = Field(
        default=None,
        description="Short trainings of every model that choose its learning rate: the largest of `learning_rates` "
        "that does not diverge. The chosen rate replaces `learning_rate`. null runs no sweep.",
    )
