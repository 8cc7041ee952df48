"""Every setting of a config, declared once; config/README.md and the JSON schema are made from here.

What a stage is given inherits from the section it comes from: `TrainingRecipe` is the part of the section `training`
that `demix.train.stage.Training` takes. What changes nothing but time and memory is `Execution`.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from demix.config.architecture import PRESETS
from demix.config.domains import DomainsSection, TokenizerSection
from demix.config.systems import KINDS
from demix.launch.job import Cluster, Site
from demix.settings import DistinctItems, Integer, Number, Positive, Switch, Text, names_of, partial, settings

# Lambda of the priors that are updated from block to block (Eq. 9).
DECAY = 0.3

Decay = Annotated[Number, Field(gt=0, le=1)]
Seed = Annotated[Integer, Field(ge=0, le=2**31 - 1)]
Threads = Annotated[
    Positive,
    Field(
        description="CPU threads of each training, adaptation and scoring job. Losses depend on it in the last bits, "
        "so it is set here and not by --cores, which says how many jobs run side by side."
    ),
]
LearningRate = Annotated[Number, Field(gt=0, description="Peak learning rate.")]


def _row_name(name: str) -> str:
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise ValueError("is not a usable name of a model", "use lower-case letters, digits and _, a letter first")
    return name


RowName = Annotated[Text, AfterValidator(_row_name)]


@settings()
class Execution:
    """How a training is computed and kept: nothing but time and memory depend on it, so no fingerprint holds it."""

    checkpoint_every: Positive = Field(
        default=100, description="Steps between checkpoints; a killed run resumes from the newest."
    )
    keep_checkpoints: Positive = Field(default=2, description="The newest so many checkpoints are kept.")
    micro_sequences: Positive | None = Field(
        default=None,
        description="Sequences of each expert that a rank sees at a time, gradients accumulate over them; null is all "
        "of a step's.",
    )
    compile: Switch = Field(default=False, description="Compile the transformer blocks (torch.compile).")
    checkpoint_activations: Switch = Field(
        default=False,
        description="Compute activations again in backward instead of keeping them: a third slower, far less memory.",
    )


@settings()
class Optimizer:
    """How parameters are updated (paper, Tables 9-12)."""

    warmup: Number = Field(
        default=0.08,
        ge=0,
        le=1,
        description="Share of the steps with a linear warm-up; the rest decays linearly to zero.",
    )
    clip: Number = Field(default=0.1, gt=0, description="Largest L2 norm of the gradient.")
    weight_decay: Number = Field(default=0.1, ge=0, description="Decoupled weight decay.")
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = Field(
        default="fp32",
        description="Type to compute in. Weights and optimizer state are fp32 (fp64: for exact comparisons); fp16 "
        "scales the loss.",
    )


def fingerprinted(given: Any) -> dict[str, Any]:
    """The settings of a training or an adaptation that tell it from others: all but `Execution`."""
    return {key: value for key, value in dataclasses.asdict(given).items() if key not in names_of(Execution)}


def taken(recipe: type, section: Mapping[str, Any]) -> dict[str, Any]:
    """What a stage takes of a section of a completed config, `Execution` aside: a change of it reruns the stage."""
    return {key: section[key] for key in names_of(recipe) if key not in names_of(Execution)}


@settings()
class Sweep:
    """Short trainings that choose the learning rate."""

    learning_rates: DistinctItems[LearningRate] = Field(
        min_length=1, description="Peak learning rates to try, a job each."
    )
    tokens: Positive = Field(description="Training tokens of each job, its schedule's too.")


@settings(kw_only=True)
class TrainingRecipe(Execution, Optimizer):
    """What a training from scratch takes of the section `training`."""

    tokens: Positive = Field(description="Training tokens of one model in total.")
    sequences: Positive = Field(description="Sequences of each domain in one optimizer step.")
    learning_rate: LearningRate = Field()
    dev_blocks: Integer = Field(
        default=0,
        ge=0,
        description="Blocks of each domain's dev split that are evaluated at every checkpoint; 0 is none.",
    )


@settings(kw_only=True)
class TrainingSection(TrainingRecipe):
    """How every model is trained; a model's own values come from `models`."""

    ranks: Positive = Field(
        default=1,
        description="Processes that train a model together: a multiple or a divisor of the number of training domains, "
        "or what `replicas` make. The result does not depend on it.",
    )
    sweep: Sweep | None = Field(
        default=None,
        description="Short trainings of every model that choose its learning rate - the largest of these that does not "
        "diverge - in the place of `learning_rate`. null is none.",
    )
    replicas: dict[Text, Positive] = Field(
        default_factory=dict,
        description="Ranks that train the expert of single domains, such as legal 2; the others have one each. Empty "
        "is as many for each.",
    )


ModelRow = partial(
    "ModelRow",
    TrainingSection,
    kind=Annotated[
        Literal[tuple(KINDS)], Field(description="What the model is; by default what a row's name says, if it does.")
    ],
)


@settings(kw_only=True)
class AdaptationRecipe(Execution, Optimizer):
    """What an adaptation takes of the section `adaptation`."""

    tokens: Positive = Field(default=10_000_000, description="Most training tokens of one adaptation.")
    sequences: Positive = Field(default=16, description="Sequences in one optimizer step.")
    learning_rate_factor: Number = Field(
        default=0.1, gt=0, description="Peak learning rate as a share of the adapted model's own."
    )
    evaluate_every: Positive = Field(default=50, description="Steps between evaluations on dev.")
    patience: Positive = Field(default=3, description="Evaluations without a lower dev loss before training stops.")
    dev_blocks: Positive = Field(
        default=100, description="Blocks of the novel domain's dev split that decide on stopping."
    )
    forgetting_blocks: Positive = Field(
        default=10, description="Blocks of each training domain's dev split on which forgetting is watched."
    )
    parent_blocks: Positive = Field(
        default=100,
        description="Dev blocks that make the posterior which chooses the parent expert; no more than "
        "evaluation.dev_blocks are scored.",
    )
    parent_decay: Decay = Field(default=DECAY, description="Lambda of that posterior.")


@settings(kw_only=True)
class AdaptationSection(AdaptationRecipe):
    """DEMix-DAPT and Dense-DAPT on each novel domain."""

    model: RowName = Field(
        default="demix", description="The row of `models` whose model gets the novel domains' experts."
    )
    ranks: Positive = Field(default=1, description="Processes that adapt a model together; at most `sequences`.")


@settings()
class DevBlocks:
    """Shared by scoring and mixing."""

    dev_blocks: Positive = Field(
        default=100, description="Blocks of each dev split that are scored and that make the cached prior."
    )


@settings()
class ScoringRecipe(DevBlocks):
    """What scoring takes of the section `evaluation`."""

    test_tokens: Positive | None = Field(
        default=None, description="Tokens of each test split that are scored; null is all."
    )
    precision: Literal["fp32", "bf16"] = Field(default="fp32", description="Type to compute scores in.")


@settings(kw_only=True)
class MixingRecipe(DevBlocks):
    """What mixing takes of the section `evaluation`."""

    decay: Decay = Field(default=DECAY, description="Lambda of the updating and cached priors (Eq. 9).")
    decays: DistinctItems[Decay] = Field(
        default=(0.1, 0.3, 0.5, 1.0), description="Lambdas to try beside `decay`, whose rows are those of the tables."
    )
    prior_blocks: DistinctItems[Positive] = Field(
        default=(1, 5, 10, 50, 100),
        description="Numbers of dev blocks to try for the cached prior beside `dev_blocks`, at most so many. The "
        "released scorer, evaluated beside ours, takes 202 where 100 are asked for; score as many to compare with the "
        "paper's numbers.",
    )
    weights: DistinctItems[Literal["history", "released"] | Positive] = Field(
        default=("history", "released"),
        min_length=1,
        description="Which tokens of the block so far weight the experts - history (all, Eq. 7-8), released (the last "
        "one, as the paper's published code), or a number of last tokens.",
    )
    top_k: DistinctItems[Positive] = Field(
        default=(), description="Mix once more with only the k likeliest experts at each token, for each k named here."
    )


@settings(kw_only=True)
class EvaluationSection(ScoringRecipe, MixingRecipe):
    """What is scored and how experts are mixed."""


@settings()
class AuditRecipe:
    """How much of a removed domain's documents can still be recovered: with its expert, without it, never trained."""

    prompts: Positive = Field(
        default=20,
        description="Documents of train, and of test to compare with, that are continued from 50 tokens of theirs.",
    )


@settings()
class RemovalSection:
    """Taking domains out of the trained model."""

    model: RowName = Field(default="demix", description="The row of `models` out of whose model domains are taken.")
    retrain_without: DistinctItems[Text] = Field(
        default=(),
        description="Training domains for which a DEMix model is trained without them (-Domain), for as many steps.",
    )
    replacement: Text | None = Field(
        default=None, description="The novel domain that takes a removed one's place in that training."
    )
    audit: AuditRecipe = Field(
        default_factory=AuditRecipe,
        description="How much of a removed domain's documents can still be recovered, with its expert, without it, and "
        "from the model trained without the domain.",
    )


@settings()
class Sizes:
    """The sizes of a model; `demix.config.architecture.architecture_from` fills a preset's in."""

    preset: Literal[tuple(PRESETS)] = Field(  # type: ignore[valid-type]
        description="The paper's four sizes (125M, 350M, 760M, 1.3B)."
    )
    layers: Positive = Field(description="Transformer blocks.")
    width: Positive = Field(description="Units of the residual stream; the feedforward has 4 times as many.")
    heads: Positive = Field(description="Attention heads; must divide the width.")
    context: Integer = Field(ge=2, description="Tokens of a block (T), the most that a model sees at once.")


ArchitectureSection = partial("ArchitectureSection", Sizes)


@settings()
class TrackingSection:
    """Where results are recorded."""

    uri: Text = Field(
        default="sqlite:///results/mlflow.db",
        description="MLflow tracking store - a SQLite or PostgreSQL URI or a server's address.",
    )
    experiment: Text | None = Field(default=None, description="MLflow experiment; null is demix-<run>.")


StageSite = partial("StageSite", Site)


@settings()
class ClusterSection(Cluster):
    """The site. Every setting of a cluster stands here; none changes a result, and changing one reruns nothing."""

    stages: dict[Literal["download", "anonymize", "corpus", "train", "adapt", "score", "evaluate"], StageSite] = Field(  # type: ignore[valid-type]
        default_factory=dict,
        description="Other values of partition, account, qos, constraint, minutes, memory_mb and gpus for single "
        "stages, such as {train - {minutes - 2880}}: download, anonymize, corpus (the rules deduplicate, split, "
        "tokenizer and tokenize), train (the trials of a sweep too), adapt, score, evaluate.",
    )


@settings(kw_only=True)
class Config:
    """Every key of a demix config, with its meaning, unit and default."""

    base: Text | None = Field(
        default=None,
        description="A config file into which this one is merged, keys within keys; what stands here wins. Relative to "
        "this file.",
    )
    run: Text = Field(
        pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run; everything it makes lies below results/<run>/.",
    )
    seed: Seed = Field(default=1, description="Seed of splits, initialisation and data order.")
    seeds: DistinctItems[Seed] = Field(
        default=(),
        description="Seeds with which the models are trained once more; `seed` may stand among them. Initialisation "
        "and order of data differ, splits and tokenizer do not. Tables show the spread; adaptation and removal are of "
        "`seed` alone.",
    )
    threads: Threads = Field(default=1)
    domains: DomainsSection = Field(
        description="The text domains by name, in the order that tables and figures show them."
    )
    tokenizer: TokenizerSection = Field(default_factory=TokenizerSection, description="How text becomes tokens.")
    architecture: ArchitectureSection = Field(  # type: ignore[valid-type]
        description="Size of the models, by a preset or by the four sizes (which override a preset's)."
    )
    training: TrainingSection = Field(
        description="How every model is trained; a model's own values come from `models`."
    )
    models: dict[RowName, ModelRow | None] = Field(  # type: ignore[valid-type]
        default_factory=dict,
        description="The models by name: values of `training` for one model alone. demix (and those trained without a "
        "domain), dense (balanced: every step holds the same tokens of each domain), dense_unbalanced (the paper's "
        "Dense: data in proportion to the domains' sizes) and domain_token (dense and balanced, with a domain token "
        "before each sequence) are always there; null leaves one out. A row of another name is one more model of the "
        "`kind` that it names.",
    )
    evaluation: EvaluationSection = Field(
        default_factory=EvaluationSection, description="What is scored and how experts are mixed."
    )
    adaptation: AdaptationSection = Field(
        default_factory=AdaptationSection, description="DEMix-DAPT and Dense-DAPT on each novel domain."
    )
    removal: RemovalSection = Field(
        default_factory=RemovalSection, description="Taking domains out of the trained model."
    )
    tracking: TrackingSection = Field(default_factory=TrackingSection, description="Where results are recorded.")
    cluster: ClusterSection = Field(
        default_factory=ClusterSection,
        description="The site. Every setting of a cluster stands here; none of them changes a result, and changing one "
        "reruns nothing.",
    )
