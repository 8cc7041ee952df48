"""The section `evaluation` of a config: what is scored and how experts are mixed."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from demix.config.domains import DomainName, DomainSection
from demix.config.mixing import DEFAULTS, FAMILIES, parsed_weights
from demix.settings import DistinctItems, Integer, Items, Number, Positive, Settings, Switch, Text, absent

# The member of a combined system that is a cache of the text so far.
CACHE = "cache"
# Default lambda of the updating and cached priors (Eq. 7).
DECAY = 0.3

Decay = Annotated[Number, Field(gt=0, le=1)]
NGramOrder = Annotated[Integer, Field(ge=1, le=8)]
# N-gram models that are counted on all train text of the run.
AllText = Annotated[Text, Field(pattern="^[1-8]_all$")]
# The text whose distance to the cluster centres weights experts; `demix.data.cluster` defines each choice.
Context = Literal["document", "block", "document_half"]
_LEAST, _MOST = FAMILIES["cluster"].parameters["temperature"]
Temperature = Annotated[Number, Field(ge=_LEAST, le=_MOST)]


def rule_name(weights: str) -> str:
    """`weights`, if it names a mixing rule. Raises ValueError(cause, cure) otherwise."""
    parsed_weights(weights)
    return weights


WeightsName = Annotated[Text, AfterValidator(rule_name)]


class DevBlocks(Settings):
    """The setting that both scoring and mixing use."""

    dev_blocks: Positive = Field(
        default=100, description="Blocks of each dev split that are scored and from which the cached prior is computed."
    )


class ScoredTokens(DevBlocks):
    """The settings that say which tokens are scored: the first ones of each dev and test split."""

    test_tokens: Positive | None = Field(
        default=None, description="Number of tokens of each test split to score; null scores all."
    )

    def limit(self, split: str, length: int) -> int | None:
        """The maximum number of tokens of `split` to score, with blocks of `length` tokens; None means all."""
        return self.dev_blocks * length if split == "dev" else self.test_tokens


class ScoringRecipe(ScoredTokens):
    """The settings of the section `evaluation` that scoring uses."""

    precision: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="Number format of the forward pass in scoring. Logits and later steps use fp32 or more.",
    )


class MixingRecipe(DevBlocks):
    """The settings of the section `evaluation` that mixing uses."""

    decay: Decay = Field(default=DECAY, description="Lambda of the updating and cached priors (Eq. 7).")
    decays: DistinctItems[Decay] = Field(
        default=(0.1, 0.3, 0.5, 0.7, 1.0),
        description="Values of lambda to compare; the paper's tables use `decay`. The released code's running mean "
        "has a decay of 0.7.",
    )
    prior_blocks: DistinctItems[Positive] = Field(
        default=(1, 5, 10, 50, 100),
        description="Numbers of dev blocks to compare as the basis of the cached prior, at most `dev_blocks`. If 100 "
        "blocks are requested, the scorer released with the paper uses 202. To compare with the paper's numbers, "
        "score 202 blocks.",
    )
    weights: DistinctItems[WeightsName] = Field(
        default=("history", "released", "tempered", "switching"),
        min_length=1,
        description="Mixing rules: how the experts' weights follow from the text so far. The list must have history. "
        "Rules that use the current block: history (all its tokens so far, Eq. 5-6) and released (only the last "
        "token, as in the code published with the paper). Rules that use all text so far: tempered and switching, "
        "which are not in the paper; their parameters are chosen on dev, or given as in `tempered(0.2,0.98)` (beta, "
        "gamma) and `switching(0.2)` (alpha). Rules that use the distance of the text so far to each expert's cluster "
        "(section `clusterings`): cluster, and cluster+history, which adds the evidence of history; `cluster(0.3)` "
        "has a temperature of its own.",
    )
    temperature: Temperature = Field(
        default=DEFAULTS["cluster"][0],
        description="Temperature of the rules cluster and cluster+history; the squared distance is divided by it.",
    )
    temperatures: DistinctItems[Temperature] = Field(
        default=(),
        description="Further temperatures to evaluate, each with every top_k; the tables use `temperature`. For each "
        "domain, the best combination is chosen on dev and shown as a row of its own.",
    )
    routing_context: DistinctItems[Context] = Field(
        default=("document",),
        min_length=1,
        description="The text whose distance is used: document (from its beginning, across blocks), block (only the "
        "current block) or document_half (like document in the first half of the document; in the second half always "
        "the distance of the whole first half, so that the weights stay fixed, as in an evaluation of c-BTM). The "
        "tables use the first value of this list; further values are also evaluated.",
    )
    top_k: DistinctItems[Positive] = Field(
        default=(),
        description="Numbers k of experts. For each k, also mix with only the k likeliest experts at each token.",
    )


class CombinedSystem(Settings):
    """A system that mixes probabilities of several models, from their score tables.

    Either `columns` (models in fixed proportions, such as a cheap rival of DEMix) or `pairs` (of experts) is given.
    """

    columns: dict[Text, WeightsName | None] = Field(
        default_factory=dict,
        description="Models, each with the rule that mixes its experts, or null if it has no experts, such as {dense: "
        "null, ngram5: null}. A model is an entry of `models`, its model of a further seed (dense-seed2), n-grams "
        "(ngram5, ngram5_domains) or `cache` (decayed unigrams of the text so far).",
    )
    reset: Switch = Field(
        default=False,
        description="Whether the rules of `columns` and the cache start again at each block, so that they remember no "
        "more of a text than a dense model does. The parameters of `tempered` and `switching` are then chosen with the "
        "same resets.",
    )
    pairs: Items[Text] = Field(
        default=(),
        description="Two models with experts of the same names, such as [demix, ngram5_domains]. Each pair of experts "
        "is mixed into one, and `weights` mixes these.",
    )
    weights: WeightsName = Field(default="tempered", description="The rule that mixes the paired experts of `pairs`.")
    label: Text = Field(default="", description="Name in tables.")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        mixes = len(self.columns) > 1 or any(self.columns.values())
        if not ((mixes and not self.pairs) or (len(self.pairs) == 2 and not self.columns)):
            raise ValueError("mixes nothing", "give two columns, one column with a rule, or two models as pairs")
        if self.pairs and self.reset:
            raise ValueError("has pairs and reset", "remove one of them: reset is for columns")
        return self

    @property
    def models(self) -> tuple[str, ...]:
        """The models whose score tables the system reads."""
        return tuple(name for name in (*self.columns, *self.pairs) if name != CACHE)


class EvaluationSection(ScoringRecipe, MixingRecipe):
    """What is scored and how experts are mixed."""

    contexts: DistinctItems[Annotated[Integer, Field(ge=2, le=131_072)]] = Field(
        default_factory=absent,
        min_length=1,
        description="Context lengths (T) at which the test splits are scored and evaluated by position, such as "
        "[256, 512, 1024]. Models with learned positions are left out at lengths beyond "
        "architecture.context.",
    )
    experts_top_k: DistinctItems[Positive | Literal["all"]] = Field(
        default_factory=absent,
        min_length=1,
        description="Numbers k of experts per token, such as [1, 2, all]. Token-routed models (entries of kind routed, "
        "and the merged model of an entry of kind anchored) are also scored with each k that differs from their own, "
        "without training. Gates sum to 1 if they do in training. The report's table `ablations` has a line per k.",
    )
    ngrams: DistinctItems[NGramOrder | AllText] = Field(
        default_factory=absent,
        description="Orders n of n-gram baselines (modified Kneser-Ney), such as [3, 5]; default: none. For each order "
        "there is one model of all training text, and one per training domain, mixed like experts. N-grams are counted "
        "on the first tokens of each domain, as many as `dense` is trained on; 5_all is counted on all of train.",
    )
    systems: dict[DomainName, CombinedSystem | None] = Field(
        default_factory=dict,
        description="Combined systems: each mixes probabilities of several models in fixed proportions, chosen on the "
        "dev splits of the training domains. Reports show systems like models. null leaves out a system of the `base` "
        "config.",
    )
    suites: dict[DomainName, dict[DomainName, DomainSection]] = Field(
        default_factory=absent,
        description="Suites of further texts that are only scored, such as `{paloma: {c4: {source: …}}}`. No training, "
        "no choice and no mean uses them. All text of a source is its test split, up to `words.test`; the other "
        "budgets have no effect. The report has a table of suites.",
    )

    @property
    def mixed(self) -> dict[str, CombinedSystem]:
        """The combined systems, without those that are null."""
        return {name: one for name, one in self.systems.items() if one}


# For these, as for `demix lm-eval`, mixing by only the prior is called `average`.
HarnessWeights = Literal["average"] | Annotated[Text, AfterValidator(rule_name)]


class HarnessTasks(Settings):
    """The tasks of the harness, the same for every model."""

    tasks: DistinctItems[Text] = Field(
        min_length=1, description="Tasks, groups or tags of the harness, or patterns of names: [arc_easy, mmlu_*]."
    )
    include_path: Text | None = Field(
        default=None, description="Folder with YAML files of further tasks. If a file in it changes, the tasks rerun."
    )
    shots: Annotated[Integer, Field(ge=0)] | None = Field(
        default=None, description="Few-shot examples before each document; null means the task's own number."
    )
    limit: Annotated[Number, Field(gt=0)] | None = Field(
        default=None, description="Documents per task; a number below 1 is a fraction of them; null means all."
    )


class HarnessSection(HarnessTasks):
    """Tasks of EleutherAI's lm-evaluation-harness on which the trained models are evaluated."""

    models: DistinctItems[Text] = Field(
        default=(),
        description="Entries of `models` to evaluate. Empty: all but domain-token and masked models (not supported).",
    )
    weights: DistinctItems[HarnessWeights] = Field(
        default=("tempered",),
        min_length=1,
        description="Rules that mix the experts, one row of the table each: any rule that `evaluation.weights` "
        "accepts, or average (the weights stay at the prior).",
    )
    offline: Switch = Field(
        default=True,
        description="Read the tasks' data only from local files and the cache of Hugging Face's datasets. With false, "
        "one job fetches missing data into the cache, where `cluster.downloads` says. Changing it reruns nothing.",
    )
