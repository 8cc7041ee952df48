"""The section `evaluation` of a config: what is scored and how experts are mixed."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from demix.config.domains import DomainName, DomainSection
from demix.config.mixing import DEFAULTS, FAMILIES, parsed_weights
from demix.settings import DistinctItems, Integer, Items, Number, Positive, Settings, Switch, Text, absent

# The member of a system that is a cache of the text.
CACHE = "cache"
# Default lambda of the updating and cached priors (Eq. 7).
DECAY = 0.3

Decay = Annotated[Number, Field(gt=0, le=1)]
NGramOrder = Annotated[Integer, Field(ge=1, le=8)]
# N-grams that count all text of the run.
AllText = Annotated[Text, Field(pattern="^[1-8]_all$")]
# The text whose distance to the centres of clusters weights experts; `demix.data.cluster` defines each.
Context = Literal["document", "block", "document_half"]
_LEAST, _MOST = FAMILIES["cluster"].parameters["temperature"]
Temperature = Annotated[Number, Field(ge=_LEAST, le=_MOST)]


def rule_name(weights: str) -> str:
    """The name of a rule of weights. Raises ValueError of a cause and a cure for another one."""
    parsed_weights(weights)
    return weights


WeightsName = Annotated[Text, AfterValidator(rule_name)]


class DevBlocks(Settings):
    """The setting that scoring and mixing share."""

    dev_blocks: Positive = Field(
        default=100, description="Blocks of each dev split that are scored and from which the cached prior is computed."
    )


class ScoredTokens(DevBlocks):
    """The settings of the section `evaluation` that say which tokens are scored: first blocks of dev, first of test."""

    test_tokens: Positive | None = Field(
        default=None, description="Tokens of each test split to score; null scores all."
    )

    def limit(self, split: str, length: int) -> int | None:
        """The maximum number of tokens of `split` to score, with blocks of `length` tokens; None means all."""
        return self.dev_blocks * length if split == "dev" else self.test_tokens


class ScoringRecipe(ScoredTokens):
    """The settings of the section `evaluation` that scoring uses."""

    precision: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="Number format of the forward pass in scoring. Logits and all that follows are fp32 or more.",
    )


class MixingRecipe(DevBlocks):
    """The settings of the section `evaluation` that mixing uses."""

    decay: Decay = Field(default=DECAY, description="Lambda of the updating and cached priors (Eq. 7).")
    decays: DistinctItems[Decay] = Field(
        default=(0.1, 0.3, 0.5, 0.7, 1.0),
        description="Further lambdas to evaluate; the paper's tables use `decay`. The released code's running mean has "
        "a decay of 0.7.",
    )
    prior_blocks: DistinctItems[Positive] = Field(
        default=(1, 5, 10, 50, 100),
        description="Further numbers of dev blocks from which to compute the cached prior, at most `dev_blocks`. "
        "Where 100 blocks are asked for, the scorer released with the paper uses 202; score 202 blocks "
        "to compare with the paper's numbers.",
    )
    weights: DistinctItems[WeightsName] = Field(
        default=("history", "released", "tempered", "switching"),
        min_length=1,
        description="Rules that compute the experts' weights from the text so far. Of the current block: history (all "
        "tokens so far, Eq. 5-6) and released (only the last token, as in the code published with the paper). Of all "
        "text so far: tempered and switching, which the paper does not have. Their parameters "
        "are chosen on dev, or given as in `tempered(0.2,0.98)` (beta, gamma) and `switching(0.2)` (alpha). By the "
        "distance of the text so far to each expert's cluster (section `clusterings`): cluster, and cluster+history, "
        "which adds the evidence of history; `cluster(0.3)` has a temperature of its own.",
    )
    temperature: Temperature = Field(
        default=DEFAULTS["cluster"][0],
        description="Temperature of the weights cluster and cluster+history: the squared distance is divided by it.",
    )
    temperatures: DistinctItems[Temperature] = Field(
        default=(),
        description="Further temperatures to evaluate, each with every top_k; the tables use `temperature`. Of all of "
        "these, one is chosen by domain on dev, as a row of its own.",
    )
    routing_context: DistinctItems[Context] = Field(
        default=("document",),
        min_length=1,
        description="The text whose distance is used: document (since its beginning, across blocks), block (what "
        "the model sees) or document_half (as document, but from the middle of the document on only the first half, "
        "so that the weights stay fixed, as in an evaluation of c-BTM). The tables use the first; a further one is "
        "also evaluated.",
    )
    top_k: DistinctItems[Positive] = Field(
        default=(),
        description="Numbers k of experts. For each k, mix once more with only the k likeliest experts at each token.",
    )


class CombinedSystem(Settings):
    """A system that mixes probabilities of several models, from their score tables: a cheap rival, or experts of pairs.

    Either `columns` or `pairs` is given.
    """

    columns: dict[Text, WeightsName | None] = Field(
        default_factory=dict,
        description="Models, each with the rule that mixes its experts, null for a model without, such as {dense: "
        "null, ngram5: null}. A model is an entry of `models`, that of a further seed (dense-seed2), n-grams (ngram5, "
        "ngram5_domains) or `cache`, decayed unigrams of the text so far.",
    )
    reset: Switch = Field(
        default=False,
        description="Whether the rules of `columns` and the cache begin again at each block of the models' context, "
        "so that they remember no more of a text than a dense model does. The parameters of `tempered` and "
        "`switching` are then chosen under the same resets.",
    )
    pairs: Items[Text] = Field(
        default=(),
        description="Two models with the same experts, such as [demix, ngram5_domains]: each expert is a mixture of "
        "both. `weights` mixes these experts.",
    )
    weights: WeightsName = Field(default="tempered", description="The rule that mixes the experts of `pairs`.")
    label: Text = Field(default="", description="Name in tables.")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        mixes = len(self.columns) > 1 or any(self.columns.values())
        if not ((mixes and not self.pairs) or (len(self.pairs) == 2 and not self.columns)):
            raise ValueError("mixes nothing", "give two columns, one column with a rule, or two models as pairs")
        if self.pairs and self.reset:
            raise ValueError("has pairs and reset", "leave one out: reset is for columns")
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
        description="Lengths of blocks (T) on which the test splits are scored and evaluated by position, such as "
        "[256, 512, 1024]. A model with learned positions is left out where they are longer than "
        "architecture.context.",
    )
    experts_top_k: DistinctItems[Positive | Literal["all"]] = Field(
        default_factory=absent,
        min_length=1,
        description="Numbers k of experts, such as [1, 2, all]. Models whose tokens choose among experts (entries of "
        "kind routed, and the merge of an entry of kind anchored) are scored once more with each k that is not theirs, "
        "without training. Gates sum to 1 where they do in training. The table of families has a column for each.",
    )
    ngrams: DistinctItems[NGramOrder | AllText] = Field(
        default_factory=absent,
        description="Orders n of n-gram baselines (modified Kneser-Ney), such as [3, 5]; without the key there are "
        "none. Of each order there is one of all training text and one per training domain, mixed as experts are. They "
        "count as many tokens as the model dense learns from, the first of each domain; 5_all counts all of train.",
    )
    systems: dict[DomainName, CombinedSystem | None] = Field(
        default_factory=dict,
        description="Systems that mix columns of any models in fixed proportions, chosen on the dev splits of the "
        "training domains. Tables, figures and claims show them like models. null leaves out a system of the base.",
    )
    suites: dict[DomainName, dict[DomainName, DomainSection]] = Field(
        default_factory=absent,
        description="Suites of further texts that are scored and nothing else, such as `{paloma: {c4: {source: …}}}`: "
        "no model learns from them, no choice and no mean reads them. All of a source's text is its test split, up to "
        "`words.test`; the other budgets say nothing here. The report has a table of them.",
    )

    @property
    def mixed(self) -> dict[str, CombinedSystem]:
        """The systems without those that are left out."""
        return {name: one for name, one in self.systems.items() if one}


# There the mixture by the prior has a name of its own, `average`, as for `demix lm-eval`.
HarnessWeights = Literal["average"] | Annotated[Text, AfterValidator(rule_name)]


class HarnessTasks(Settings):
    """What is asked of the harness, the same of every model."""

    tasks: DistinctItems[Text] = Field(
        min_length=1, description="Tasks, groups or tags of the harness, or patterns of them: [arc_easy, mmlu_*]."
    )
    include_path: Text | None = Field(
        default=None, description="Folder with YAML files of more tasks. If a file in it changes, the tasks run again."
    )
    shots: Annotated[Integer, Field(ge=0)] | None = Field(
        default=None, description="Few-shot examples before each document; null means the task's own number."
    )
    limit: Annotated[Number, Field(gt=0)] | None = Field(
        default=None, description="Documents of each task; below 1, a fraction of its documents; null means all."
    )


class HarnessSection(HarnessTasks):
    """Tasks of EleutherAI's lm-evaluation-harness, which the trained models do."""

    models: DistinctItems[Text] = Field(
        default=(),
        description="Rows of `models` that do the tasks. Empty: all but domain-token and masked models, which cannot.",
    )
    weights: DistinctItems[HarnessWeights] = Field(
        default=("tempered",),
        min_length=1,
        description="Rules that mix the experts, each a row of the table: as in `evaluation.weights`, without numbers "
        "of tokens, or average.",
    )
    offline: Switch = Field(
        default=True,
        description="Read the tasks' data only from local files and the cache of Hugging Face's datasets. With false "
        "one job fetches what the cache lacks, on the machine where downloads run. Changing this key reruns nothing.",
    )
