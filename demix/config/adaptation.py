"""The sections `adaptation` and `removal`: experts for novel domains, and models without a domain."""

from typing import Annotated, Literal

from pydantic import Field

from demix.config.names import EntryName
from demix.config.training import Execution, OptimizerRecipe, Ranks, Sequences
from demix.settings import DistinctItems, Number, Positive, Settings, Text, absent, omitted

Factor = Annotated[Number, Field(gt=0)]
DenseTrained = Literal["all", "feedforwards"]
# The posterior over this many blocks of the novel domain's dev split (at most the scored ones) chooses the parent.
PARENT_BLOCKS = 100
# Up to four passes over a text teach about as much as new text does (Muennighoff et al. 2023, section 6).
PASSES = 4


class FactorSweep(Settings):
    """Adaptations with several learning rates; the best one is kept."""

    factors: DistinctItems[Factor] = Field(
        min_length=1, description="Learning-rate factors to try, one after the other in one job."
    )


class AdaptationLengths(Settings):
    """How much text one adaptation trains on, and when it stops."""

    tokens: Positive = Field(
        default_factory=absent,
        description="Maximum number of training tokens of one adaptation. Default: `training.tokens` divided by the "
        "number of training domains, which is the number of tokens per expert in training.",
    )
    passes: Positive | None = Field(
        default_factory=omitted,
        description="Maximum number of passes over the train split of the novel domain; with little text it lowers "
        f"`tokens`. null: no maximum. Default: {PASSES} if `tokens` is absent, too, else null.",
    )
    sequences: Sequences = Field(default=16, description="Sequences in one optimizer step.")
    sweep: FactorSweep | None = Field(
        default=None,
        description="Adapt to each domain with each factor of `sweep.factors`, and keep the adaptation with the "
        "lowest loss on the domain's dev split, separately for DEMix-DAPT and Dense-DAPT. The factors replace "
        "`learning_rate_factor`. null: no sweep.",
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


class AdaptationRecipe(AdaptationLengths, Execution, OptimizerRecipe):
    """The settings of one adaptation."""

    learning_rate_factor: Factor = Field(
        description="Peak learning rate, as a fraction of the peak learning rate that the adapted model was trained "
        "with.",
    )
    trained: DenseTrained = Field(
        default="all", description="Parameters that Dense-DAPT trains, as in `adaptation.dense_trained`."
    )


class RateFactors(Settings):
    """The learning-rate factor of each kind of adaptation."""

    # The paper's factor of 0.1 limits forgetting. docs/experiments/adaptation.md measures gain and cost of each factor.
    demix: Factor = Field(default=1.0, description="Factor of DEMix-DAPT, which does not change other experts.")
    dense: Factor = Field(default=0.1, description="Factor of Dense-DAPT.")


class AdaptationSection(AdaptationLengths):
    """DEMix-DAPT and Dense-DAPT on each novel domain, each with the optimizer of the model that is adapted."""

    learning_rate_factor: Factor | RateFactors = Field(
        default=RateFactors(),
        description="Peak learning rate, as a fraction of the peak learning rate that the adapted model was trained "
        "with: one number (the paper: 0.1), or one each for DEMix-DAPT and Dense-DAPT.",
    )
    dense: Literal["dense", "dense_unbalanced"] = Field(
        default="dense",
        description="The entry of `models` that Dense-DAPT starts from. The paper does not say which of its dense "
        "models it adapts; Table 13 may mean Dense (dense_unbalanced).",
    )
    dense_trained: DenseTrained = Field(
        default="all",
        description="What Dense-DAPT trains: all parameters, as in the paper, or only the feedforwards, as DEMix-DAPT "
        "does.",
    )
    model: EntryName = Field(
        default="demix", description="The entry of `models` to whose model the novel domains' experts are added."
    )
    ranks: Ranks = Field(default=1, description="Processes that adapt one model together; at most `sequences`.")


class RemovalSection(Settings):
    """Removal of domains from a trained model."""

    model: EntryName = Field(default="demix", description="The entry of `models` from whose model domains are removed.")
    retrain_without: DistinctItems[Text] = Field(
        default=(),
        description="Training domains to retrain without. For each of these domains, another DEMix model is trained "
        "for the same number of steps, with `replacement` in the place of the domain. Tables call this model -Domain.",
    )
    replacement: Text | None = Field(
        default=None,
        description="The novel domain that replaces a removed domain in the retraining.",
    )
    merged: DistinctItems[EntryName] = Field(
        default=(),
        description="Entries of kind anchored (FlexOlmo), or that train merged experts (BTX): their merged model is "
        "also scored on each training domain without the domain's expert, and without retraining.",
    )
