"""The sections `models` (model types and the keys that an entry of each type may have) and `clusterings`."""

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from demix.config.architecture import EntryArchitecture
from demix.config.names import EntryName
from demix.config.training import RouterTraining, TrainingSection
from demix.errors import DemixError
from demix.settings import Number, Positive, Settings, Switch, Text, absent, partial

# The name of the single expert of a model without domain experts.
DENSE_EXPERT = "dense"


@dataclass(frozen=True)
class Kind:
    """How models of one type are built, and which text they train on.

    `label` is the paper's name of the type. `expert_scope` says which tensors belong only to a domain's expert:
    `feedforward` (DEMix layers), `model` (Branch-Train-Merge: each expert is a whole model, trained by itself), or
    `none` for a model whose single expert is called `dense`. `batches` says which sequences a step uses: `by_domain` (a
    group of sequences for each domain's expert), `mixed` (the same sequences as one group) or `proportional` (in
    proportion to the domains' sizes). With `domain_tokens` each sequence starts with the token of its domain. With
    `routed` some feedforwards are token-routed (`TokenRouting`). Experts that are `anchored` train next to the
    feedforwards of a parent, and all tensors of the parent stay frozen (FlexOlmo, Shi et al. 2025).
    """

    name: str
    label: str
    expert_scope: str
    batches: str
    domain_tokens: bool = False
    routed: bool = False
    anchored: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether each domain has an expert of its own."""
        return self.expert_scope != "none"

    @property
    def has_routers(self) -> bool:
        """Whether a router weights the feedforwards of a layer."""
        return self.routed or self.anchored


KINDS = {
    kind.name: kind
    for kind in (
        Kind("demix", "DEMix", "feedforward", "by_domain"),
        Kind("dense", "Dense (Balanced)", "none", "mixed"),
        Kind("dense_unbalanced", "Dense", "none", "proportional"),
        Kind("domain_token", "+ Domain Token", "none", "mixed", domain_tokens=True),
        Kind("branched", "BTM", "model", "by_domain"),
        Kind("routed", "Token-routed", "none", "mixed", routed=True),
        Kind("anchored", "FlexOlmo", "model", "by_domain", anchored=True),
    )
}
# The paper's models. A run trains each of them unless its entry is null.
PAPER = ("demix", "dense", "dense_unbalanced", "domain_token")
# Entries that a config must keep: DEMix is the model under test, and the dense model is its baseline.
KEPT = ("demix", "dense")


def _label(label: str) -> str:
    if not re.fullmatch(r"[^\W_][\w ,.+:/'’×%–-]{0,59}", label):
        cure = "use up to 60 letters, digits, spaces and , . + : / ' × % -, and begin with a letter or a digit"
        raise ValueError("is not a usable label", cure)
    return label


class Parent(Settings):
    """The model from which an entry's training starts."""

    parent: Text = Field(
        default_factory=absent,
        description="An entry of kind dense: training starts from the state of that entry's model after `seed_tokens` "
        "tokens (a dense warm start); the dense feedforward is copied into every expert. The entry then has all "
        "settings of its parent, except those of time and memory and dev_blocks, which may differ. Or the folder of a "
        "dense model, such as imported/gpt2, written by `demix import`: the model starts from its parameters, with a "
        "training of its own. For kind routed also an entry of kind demix, branched or anchored: the feedforwards of "
        "its experts become the experts of every layer, of which each token uses two, and the merged model is trained "
        "further on all domains, with the FLOPs of `tokens` tokens of a dense model. Routers start at random, and all "
        "other parameters of branched experts are averaged (Branch-Train-MiX, Sukhbaatar et al. 2024). Anchored "
        "experts keep their learned routers, and the anchor stays next to them.",
    )
    seed_tokens: Positive = Field(
        default_factory=absent,
        description="Tokens of the dense warm start, rounded down to whole steps. They are part of the model's "
        "`tokens`.",
    )


class Branch(Parent):
    """How an entry continues from the state of another one."""

    schedule: Literal["continue", "restart"] = Field(
        default_factory=absent,
        description="Schedule after the dense warm start. `continue` (default): the parent's schedule and optimizer "
        "moments go on. `restart` (always for kinds routed and anchored): moments start at zero, and the learning rate "
        "starts at its peak, unless the entry or its preset has a warm-up, and falls over the remaining tokens. Such "
        "an entry can have its own tokens, sequences, learning rate and warm-up.",
    )


class ExpertText(Settings):
    """The text on which the experts of an entry train."""

    data: Text = Field(
        default_factory=absent,
        description="A clustering (section `clusterings`): one expert trains on each of its clusters, all on the same "
        "number of tokens. Default: experts train on the domains.",
    )


class Averaging(Settings):
    """Whether the experts of an entry are averaged."""

    averages: Switch = Field(
        default_factory=absent,
        description="For kind branched: also score averages of the experts' parameters, one with equal weights and for "
        "each domain one weighted by its cached prior. At inference each average costs as much as one model.",
    )


class TokenRouting(Settings):
    """The keys of an entry that is token-routed."""

    experts: Positive = Field(
        default_factory=absent,
        le=4096,
        description="For kind routed: experts in each token-routed feedforward. Default: 8, or, if a parent is merged, "
        "its number of experts.",
    )
    top_k: Positive = Field(
        default_factory=absent,
        description="For kind routed: experts that each token uses: 1 (switch; the default), 2 (GShard's top-2; the "
        "default if a parent is merged) or more.",
    )
    every: Positive = Field(
        default_factory=absent,
        description="For kind routed: every n-th layer has a token-routed feedforward. 1 (default): all layers; 2: the "
        "second, the fourth and so on.",
    )
    capacity: Number = Field(
        default_factory=absent,
        gt=0,
        # If the capacity equals the number of experts, each expert can process all tokens.
        le=4096,
        description="For kind routed: tokens of a sequence that an expert can process in training, as a multiple of "
        "T / experts. Default: 1.25 for top_k 1, else 2. First choices come before second ones. Scoring has no limit.",
    )
    balance: Number = Field(
        default_factory=absent,
        ge=0,
        description="For kind routed: weight of the load-balancing loss. Default: 0.01.",
    )


class EntrySettings(TrainingSection, Branch, ExpertText, Averaging, TokenRouting, RouterTraining):
    """The section `training` with an entry's values, and the keys that only entries have."""

    architecture: EntryArchitecture = Field(  # type: ignore[valid-type]
        default_factory=absent,
        description="Options that replace those of the section `architecture` for this entry. An entry with a `parent` "
        "has its parent's options.",
    )


_LABEL = Annotated[
    Text,
    AfterValidator(_label),
    Field(
        description="Name of the model in tables, figures, claims and cards. Default: the entry's name, and for the "
        "paper's four entries the paper's names."
    ),
]
# The keys that entries of each kind may have in addition to those of the section `training`.
_KEYS: dict[str, tuple[type[Settings], ...]] = {
    "demix": (Branch, ExpertText),
    "dense": (Branch,),
    "dense_unbalanced": (Branch,),
    "domain_token": (),
    "branched": (Branch, ExpertText, Averaging),
    # These are trained with the FLOPs of `tokens` tokens of a dense model.
    "routed": (Parent, TokenRouting, RouterTraining),
    "anchored": (Parent, ExpertText),
}
ENTRIES = {
    kind: partial(
        f"{kind}_entry", TrainingSection, *keys, kind=Literal[kind], label=_LABEL, architecture=EntryArchitecture
    )
    for kind, keys in _KEYS.items()
}


def _with_kinds(entries: Any) -> Any:
    """The entries of a file. An entry that is named like a kind gets this kind."""
    if not isinstance(entries, dict):
        return entries
    return {
        name: {"kind": name} | entry if name in KINDS and isinstance(entry, dict) else entry
        for name, entry in entries.items()
    }


ModelEntry: Any = Annotated[reduce(operator.or_, ENTRIES.values()), Field(discriminator="kind")]
Models = Annotated[dict[EntryName, ModelEntry | None], BeforeValidator(_with_kinds)]


class Clustering(Settings):
    """How the documents of the training domains are divided into clusters."""

    # Each cluster is an expert with its own files and jobs. The paper of c-BTM has at most 128 clusters.
    clusters: Annotated[Positive, Field(le=4096)] | None = Field(
        default=None, description="Number of clusters. Not for method metadata."
    )
    method: Literal["kmeans", "random", "metadata"] = Field(
        default="kmeans",
        description="How a document gets its cluster. kmeans: the nearest centre of k-means. random: by the document's "
        "hash. metadata: one cluster per training domain.",
    )
    balanced: Switch = Field(default=True, description="Whether k-means keeps the clusters equal in documents.")
    dimensions: Positive = Field(default=100, description="Dimensions to which tf-idf is reduced.")
    documents: Positive = Field(default=400_000, description="Documents to fit k-means on, drawn by their hash.")


def cluster_names(name: str, clustering: Clustering, domains: Iterable[str]) -> tuple[str, ...]:
    """The names of the clusters of the clustering `name`: c00, c01, …, or the training domains themselves.

    Raises DemixError if the number of clusters is missing.
    """
    if clustering.method == "metadata":
        return tuple(sorted(domains))
    if clustering.clusters is None:
        raise DemixError(f"config key clusterings.{name}.clusters", "is missing", "set the number of clusters")
    digits = max(2, len(str(clustering.clusters - 1)))
    return tuple(f"c{number:0{digits}}" for number in range(clustering.clusters))
