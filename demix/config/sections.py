"""The declarations of all settings of a config, from which config/README.md and the JSON schema are generated.

A stage inherits the settings that it takes: `TrainingRecipe` is the part of the section `training` that
`demix.train.stage.Training` takes. `Execution` holds the settings that change nothing but time and memory.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from demix.config.architecture import PRESETS, Decoder, RowArchitecture
from demix.config.branching import BRANCHING
from demix.config.clustering import Clustering
from demix.config.domains import DomainsSection, TokenizerSection
from demix.config.evaluation import DECAY, Decay, EvaluationSection, absent
from demix.config.names import refuse_name
from demix.config.routed import ROUTED
from demix.config.rows import KINDS
from demix.config.run import NAME, NAMED
from demix.config.tasks import Task, TaskName
from demix.launch.job import Cluster, Site
from demix.settings import (
    DistinctItems,
    Integer,
    Number,
    Positive,
    Seed,
    Switch,
    Text,
    TriedItems,
    names_of,
    partial,
    settings,
)

Threads = Annotated[
    Positive,
    Field(
        description="CPU threads of each training, adaptation and scoring job. The last bits of losses depend on this "
        "number, so the config sets it. Snakemake's --cores only limits how many jobs run side by side."
    ),
]
Factor = Annotated[Number, Field(gt=0)]
# The largest published runs have steps of some 16,000 sequences, on as many GPUs. The placement of ranks lists each.
Sequences = Annotated[Positive, Field(le=1_000_000)]
Ranks = Annotated[Positive, Field(le=100_000)]
# Up to four passes over a text teach about as much as new text does (Muennighoff et al. 2023, section 6).
PASSES = 4
LearningRate = Annotated[Number, Field(gt=0, description="Peak learning rate.")]


def _row_name(name: str) -> str:
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise ValueError(
            "is not a usable name of a model", "use lower-case letters, digits and _, and begin with a letter"
        )
    refuse_name(name)
    return name


RowName = Annotated[Text, AfterValidator(_row_name)]


@settings()
class Execution:
    """Settings that change only the time and memory of a training. Fingerprints leave these settings out."""

    checkpoint_every: Positive = Field(
        default=100, description="Steps between checkpoints. A killed run resumes from the newest checkpoint."
    )
    keep_checkpoints: Positive = Field(default=2, description="Number of newest checkpoints that are kept.")
    micro_sequences: Positive | None = Field(
        default=None,
        description="Sequences of each expert in one micro-batch of a rank; gradients accumulate over "
        "micro-batches. null takes all sequences of a step at once.",
    )
    compile: Switch = Field(default=False, description="Compile the transformer blocks (torch.compile).")
    checkpoint_activations: Switch = Field(
        default=False,
        description="Recompute activations in the backward pass instead of storing them: a third slower, far less "
        "memory.",
    )


@settings()
class Optimizer:
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
        description="Number format of the computation. Weights and optimizer state are fp32, except with fp64, "
        "which serves exact comparisons. fp16 scales the loss.",
    )


def fingerprinted(given: Any) -> dict[str, Any]:
    """The settings that identify a training or an adaptation: all but those of `Execution`."""
    return {key: value for key, value in stated(given).items() if key not in names_of(Execution)}


def stated(given: Any) -> dict[str, Any]:
    """Settings as a mapping, without `passes` where it bounds nothing: as they were before there was such a key."""
    return {key: value for key, value in dataclasses.asdict(given).items() if (key, value) != ("passes", None)}


def taken(recipe: type, section: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the stage with the settings `recipe` takes of a completed config's section.

    The settings of `Execution` are left out, because a change of any value that is returned reruns the stage. So are
    keys that the section is without.
    """
    return {key: section[key] for key in names_of(recipe) if key in section and key not in names_of(Execution)}


@settings()
class Sweep:
    """Short trainings that choose the peak learning rate."""

    learning_rates: TriedItems[LearningRate] = Field(
        min_length=1, description="Peak learning rates to try, one job for each."
    )
    tokens: Positive = Field(description="Training tokens of each job; the learning-rate schedule has the same length.")


@settings(kw_only=True)
class TrainingRecipe(Execution, Optimizer):
    """The settings of the section `training` that one training from scratch takes."""

    tokens: Positive = Field(description="Total training tokens of one model.")
    sequences: Sequences = Field(description="Sequences of each domain in one optimizer step.")
    learning_rate: LearningRate = Field()
    dev_blocks: Integer = Field(
        default=0,
        ge=0,
        description="Blocks of each domain's dev split to evaluate at every checkpoint; 0 evaluates none.",
    )


@settings(kw_only=True)
class TrainingSection(TrainingRecipe):
    """Settings of the training of all models. A row of `models` overrides them for one model."""

    ranks: Ranks = Field(
        default=1,
        description="Processes that train one model together: a multiple or a divisor of the number of training "
        "domains, or the sum of the domains' ranks where `replicas` is given. The result does not "
        "depend on this number.",
    )
    sweep: Sweep | None = Field(
        default=None,
        description="Short trainings of every model that choose its learning rate: the largest of `learning_rates` "
        "that does not diverge. The chosen rate replaces `learning_rate`. null runs no sweep.",
    )
    replicas: dict[Text, Ranks] = Field(
        default_factory=dict,
        description="Number of ranks by domain, such as `{legal: 2}`; a domain that is not named has one rank. When "
        "`replicas` is empty, all domains have the same number of ranks.",
    )


ModelRow = partial(
    "ModelRow",
    TrainingSection,
    kind=Annotated[
        Literal[tuple(KINDS)],
        Field(description="Kind of the model. A row that is named like a kind may omit this key."),
    ],
    architecture=Annotated[
        RowArchitecture,
        Field(
            description="Options of the section `architecture` that this row has instead. A row with a `parent` has "
            "those of its parent."
        ),
    ],
    **BRANCHING,
    **ROUTED,
)


@settings()
class FactorSweep:
    """Adaptations with several learning rates, of which one is kept."""

    factors: TriedItems[Factor] = Field(
        min_length=1, description="Learning-rate factors to try, one after the other in one job."
    )


@settings(kw_only=True)
class AdaptationRecipe(Execution, Optimizer):
    """The settings of the section `adaptation` that one adaptation takes."""

    tokens: Positive = Field(
        default_factory=absent,
        description="Largest number of training tokens of one adaptation. Without this key `training.tokens` by the "
        "number of training domains, which is what an expert learns from in training.",
    )
    passes: Positive | None = Field(
        default_factory=absent,
        description="Most passes over the train split of the novel domain, which lower `tokens` where there is little "
        f"text; null sets no bound. Without this key {PASSES} where `tokens` is absent, too, and else null.",
    )
    sequences: Sequences = Field(default=16, description="Sequences in one optimizer step.")
    learning_rate_factor: Factor = Field(
        default=0.1,
        description="Peak learning rate, as a fraction of the peak learning rate that the adapted model was trained "
        "with.",
    )
    sweep: FactorSweep | None = Field(
        default=None,
        description="Adapt to each domain with each of these factors, and keep the adaptation of the lowest loss on "
        "the domain's dev split, for DEMix-DAPT and Dense-DAPT each on its own. The factors replace "
        "`learning_rate_factor`. null tries none.",
    )
    evaluate_every: Positive = Field(
        default=50, description="Steps between evaluations on the novel domain's dev split."
    )
    patience: Positive = Field(
        default=3, description="Training stops after this many evaluations in a row without a new lowest dev loss."
    )
    dev_blocks: Positive = Field(
        default=100, description="Blocks of the novel domain's dev split on which early stopping is decided."
    )
    forgetting_blocks: Positive = Field(
        default=10, description="Blocks of each training domain's dev split on which forgetting is measured."
    )
    parent_blocks: Positive = Field(
        default=100,
        description="Dev blocks of the novel domain from which the posterior that chooses the parent expert is "
        "computed. At most evaluation.dev_blocks, because no more blocks are scored.",
    )
    parent_decay: Decay = Field(
        default=DECAY, description="Lambda of the posterior that chooses the parent expert (Eq. 7)."
    )


@settings()
class RateFactors:
    """The learning-rate factor of each kind of adaptation."""

    demix: Factor = Field(default=0.1, description="Factor of DEMix-DAPT, which cannot change what other experts do.")
    dense: Factor = Field(default=0.1, description="Factor of Dense-DAPT.")


@settings(kw_only=True)
class AdaptationSection(AdaptationRecipe):
    """DEMix-DAPT and Dense-DAPT on each novel domain."""

    learning_rate_factor: Factor | RateFactors = Field(  # type: ignore[assignment]
        default=0.1,
        description="Peak learning rate, as a fraction of the peak learning rate that the adapted model was trained "
        "with: one number (the paper: 0.1), or one for each kind of adaptation, such as `{demix: 1.0, dense: 0.1}`.",
    )
    dense: Literal["dense", "dense_unbalanced"] = Field(
        default="dense",
        description="The row of `models` that Dense-DAPT starts from. The paper does not say which; its Table 13 may "
        "mean Dense (dense_unbalanced).",
    )
    model: RowName = Field(
        default="demix", description="The row of `models` whose model gets the novel domains' experts."
    )
    ranks: Ranks = Field(default=1, description="Processes that adapt one model together; at most `sequences`.")


@settings()
class AuditRecipe:
    """Audit of memorization: how much of a removed domain's documents the models can still continue."""

    prompts: Positive = Field(
        default=20,
        description="Number of documents of the train split to continue from a prompt of 50 tokens, and as many of "
        "the test split for comparison.",
    )


@settings()
class RemovalSection:
    """Removal of domains from a trained model."""

    model: RowName = Field(default="demix", description="The row of `models` from whose model domains are removed.")
    retrain_without: DistinctItems[Text] = Field(
        default=(),
        description="Training domains to retrain without. For each of these domains, one more DEMix model is "
        "trained for as many steps without the domain (-Domain).",
    )
    replacement: Text | None = Field(
        default=None, description="The novel domain that takes the removed domain's place in the retraining."
    )
    audit: AuditRecipe = Field(
        default_factory=AuditRecipe,
        description="Audit of memorization: how much of a removed domain's documents can still be continued with "
        "the domain's expert, without that expert, and by the model that was trained without the "
        "domain.",
    )


# `demix.config.architecture.architecture_from` fills in the sizes of a preset.
ArchitectureSection = partial(
    "ArchitectureSection",
    Decoder,
    preset=Annotated[
        Literal[tuple(PRESETS)],
        Field(description="One of the paper's four sizes (125M, 350M, 760M, 1.3B)."),
    ],
)


# MLflow takes no other, and says so when a run is over.
Experiment = Annotated[
    Text,
    Field(pattern=r"^[\s\S]{1,500}$", json_schema_extra={"patternErrorMessage": "of 1 to 500 characters"}),
]


@settings()
class TrackingSection:
    """Where results are recorded."""

    uri: Text = Field(
        default="sqlite:///results/mlflow.db",
        description="MLflow tracking store: a SQLite or PostgreSQL URI, or the address of a server.",
    )
    experiment: Experiment | None = Field(default=None, description="MLflow experiment; null means demix-<run>.")


StageSite = partial("StageSite", Site)


@settings()
class ClusterSection(Cluster):
    """All settings of the cluster. No setting here changes a result, and changing one reruns nothing."""

    stages: dict[Literal["download", "anonymize", "corpus", "train", "adapt", "score", "evaluate"], StageSite] = Field(  # type: ignore[valid-type]
        default_factory=dict,
        description="Values of partition, account, qos, constraint, minutes, memory_mb and gpus for single stages, "
        "such as `{train: {minutes: 2880}}`. The stages are download, anonymize, corpus (the rules "
        "deduplicate, split, tokenizer and tokenize), train (with the trials of a sweep), adapt, score "
        "and evaluate.",
    )


@settings(kw_only=True)
class Config:
    """Every key of a demix config, with its meaning, unit and default."""

    base: Text | None = Field(
        default=None,
        description="Path of another config file, relative to this one. This file is merged into the other one, "
        "nested keys included; where both set a key, this file wins.",
    )
    run: Text = Field(
        pattern=NAME,
        json_schema_extra={"patternErrorMessage": NAMED},
        description="Name of the run. All files of the run are below results/<run>/.",
    )
    overwrite: Switch = Field(
        default_factory=absent,
        description="Let the run take the place of one with none of its domains, whose folder has the same name. "
        "Without this key (or with false) the workflow stops before it changes a file there.",
    )
    seed: Seed = Field(default=1, description="Seed of splits, initialisation and data order.")
    seeds: TriedItems[Seed] = Field(
        default=(),
        description="Further seeds with which the models are trained again; `seed` may be among them. A further "
        "seed changes initialisation and data order, but neither splits nor tokenizer. Tables show the "
        "spread over seeds. Adaptation and removal use `seed` alone.",
    )
    threads: Threads = Field(default=1)
    allow_branches: Switch = Field(
        default=False,
        description="Accept sources of kind hub whose revision is no commit. Branches and tags can move, and the text "
        "of the run with them. `demix pin CONFIG` prints the commits.",
    )
    domains: DomainsSection = Field(
        description="The text domains by name, in the order in which tables and figures show them."
    )
    tokenizer: TokenizerSection = Field(default_factory=TokenizerSection, description="How text becomes tokens.")
    architecture: ArchitectureSection = Field(  # type: ignore[valid-type]
        description="Sizes of the models: a preset, or the four sizes, which override those of a preset."
    )
    training: TrainingSection = Field(
        description="Settings of the training of all models. A row of `models` overrides them for one model."
    )
    models: dict[RowName, ModelRow | None] = Field(  # type: ignore[valid-type]
        default_factory=dict,
        description="The models by name. A row overrides values of `training` for one model. Four rows are there by "
        "default: demix (which also applies to the models trained without a domain), dense (balanced: "
        "every step holds the same number of tokens of each domain), dense_unbalanced (the paper's "
        "Dense: data in proportion to the domains' sizes) and domain_token (dense and balanced, with a "
        "domain token before each sequence). null leaves out dense_unbalanced or domain_token. A row of "
        "another name adds a model of the `kind` that the row names.",
    )
    clusterings: dict[RowName, Clustering] = Field(
        default_factory=dict,
        description="Ways to divide the training domains' documents into clusters, by name (c-BTM).",
    )
    evaluation: EvaluationSection = Field(
        default_factory=EvaluationSection, description="What is scored and how experts are mixed."
    )
    tasks: dict[TaskName, Task] = Field(
        default_factory=dict,
        description="Tasks of classification by name: texts with labels, on which the accuracy of mixtures is taken. A "
        "run has none by default.",
    )
    adaptation: AdaptationSection = Field(
        default_factory=AdaptationSection, description="DEMix-DAPT and Dense-DAPT on each novel domain."
    )
    removal: RemovalSection = Field(
        default_factory=RemovalSection, description="Removal of domains from a trained model."
    )
    tracking: TrackingSection = Field(default_factory=TrackingSection, description="Where results are recorded.")
    cluster: ClusterSection = Field(
        default_factory=ClusterSection,
        description="All settings of the cluster. No setting here changes a result, and changing one reruns nothing.",
    )
