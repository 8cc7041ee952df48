"""The sections `models`, with the kinds of models and the keys of an entry of each kind, and `clusterings`."""

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

# The single expert of a model without domain experts.
DENSE_EXPERT = "dense"


@dataclass(frozen=True)
class Kind:
    """How models of one kind are built, and what they learn from.

    `label` is the paper's name of the kind. `expert_scope` says which tensors belong only to a domain's expert:
    `feedforward` (DEMix layers), `model` (Branch-Train-Merge: each expert is a whole model, trained by itself), or
    `none` for a model whose single expert is called `dense`. `batches` says how a step is drawn: `by_domain` (a group
    of sequences for each domain's expert), `mixed` (the same sequences as one group) or `proportional` (in proportion
    to the domains' sizes). With `domain_tokens` the token of its domain precedes each sequence. With `routed` the
    tokens choose among experts in some feedforwards (`TokenRouting`). Experts that are `anchored` are next to the
    feedforwards of a parent, and only they learn: all tensors of the parent stay as they are (FlexOlmo, Shi et al.
    2025).
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
        """Whether a router weighs feedforwards of a layer."""
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
# The paper's models, which a run has unless an entry is null.
PAPER = ("demix", "dense", "dense_unbalanced", "domain_token")
# Entries that a config must keep: DEMix is the model under test, and the dense model is its baseline.
KEPT = ("demix", "dense")


def _label(label: str) -> str:
    if not re.fullmatch(r"[^\W_][\w ,.+:/'’×%–-]{0,59}", label):
        cure = "use up to 60 letters, digits, blanks and , . + : / ' × % -, and begin with a letter or a digit"
        raise ValueError("is not a usable label", cure)
    return label


class Parent(Settings):
    """With which model an entry begins."""

    parent: Text = Field(
        default_factory=absent,
        description="An entry of kind dense. The model begins with the state that this entry's model had after "
        "`seed_tokens` tokens (a dense warm start): the dense feedforward is copied into every expert, and training "
        "goes on. A branch has all its parent's settings; those of time and memory can differ, and dev_blocks. Or the "
        "folder of a dense model, such as imported/gpt2 that `demix import` wrote: the model begins with its "
        "parameters, and with a training of its own. For kind routed also an entry of kind demix, branched or "
        "anchored, whose experts' feedforwards become the experts of every layer, two of which each token chooses: the "
        "entry trains the merged model on all domains for more tokens, with the FLOPs of `tokens` of a dense model. "
        "Routers start at random, and all other weights of experts of kind branched are averaged (Branch-Train-MiX, "
        "Sukhbaatar et al. 2024). Experts of kind anchored keep the routers that they learned, and have the anchor "
        "next to them.",
    )
    seed_tokens: Positive = Field(
        default_factory=absent,
        description="Tokens of the dense warm start, rounded down to whole steps. They are a part of the model's "
        "`tokens`.",
    )


class Branch(Parent):
    """How an entry goes on from the state of another one."""

    schedule: Literal["continue", "restart"] = Field(
        default_factory=absent,
        description="What follows the dense warm start. `continue`, which holds where the key is absent: the parent's "
        "schedule and the optimizer's moments go on. `restart`, as always for kinds routed and anchored: fresh "
        "moments, no warm-up but what the entry or its preset says, and the peak rate, which falls over the tokens "
        "that remain. Such an entry can have tokens, sequences, a learning rate and a warm-up of its own.",
    )


class ExpertText(Settings):
    """On what the experts of an entry train."""

    data: Text = Field(
        default_factory=absent,
        description="The clustering (section `clusterings`) on whose clusters the experts train, one expert per "
        "cluster, with equal tokens. Without it the experts train on the domains.",
    )


class Averaging(Settings):
    """Whether the experts of an entry are averaged."""

    averages: Switch = Field(
        default_factory=absent,
        description="Score averages of the parameters of an entry of kind branched, too: one by equal weights, and for "
        "each domain one by its cached prior. Each costs what one model costs.",
    )


class TokenRouting(Settings):
    """The keys of an entry whose tokens choose their experts."""

    experts: Positive = Field(
        default_factory=absent,
        le=4096,
        description="Experts of each routed feedforward of an entry of kind routed; 8 without the key, or those of a "
        "parent that is merged.",
    )
    top_k: Positive = Field(
        default_factory=absent,
        description="Experts that each token of an entry of kind routed chooses: 1 (switch, as without the key), 2 "
        "(GShard's top-2, as without the key after a parent that is merged) or more.",
    )
    every: Positive = Field(
        default_factory=absent,
        description="Every how many blocks one has a routed feedforward: 1 (as without the key) means all, 2 for "
        "the second, the fourth and so on.",
    )
    capacity: Number = Field(
        default_factory=absent,
        gt=0,
        # With as many as there are experts, each processes all tokens.
        le=4096,
        description="Tokens of a sequence that an expert processes, as a multiple of T / experts: 1.25 without "
        "the key for top_k 1, else 2. First choices come before second ones. Scoring has no such limit.",
    )
    balance: Number = Field(
        default_factory=absent,
        ge=0,
        description="Weight of the loss that balances the loads of the experts; 0.01 without the key.",
    )


class EntrySettings(TrainingSection, Branch, ExpertText, Averaging, TokenRouting, RouterTraining):
    """The section `training` with the values of an entry, and the keys that only an entry has."""

    architecture: EntryArchitecture = Field(  # type: ignore[valid-type]
        default_factory=absent,
        description="Options of the section `architecture` that this entry has instead. An entry with a `parent` has "
        "those of its parent.",
    )


_LABEL = Annotated[
    Text,
    AfterValidator(_label),
    Field(
        description="Name of the model in tables, figures, claims and cards: without this key that of the entry. The "
        "paper's four entries have the paper's names."
    ),
]
# The keys that entries of each kind may have next to those of the section `training`.
_KEYS: dict[str, tuple[type[Settings], ...]] = {
    "demix": (Branch, ExpertText),
    "dense": (Branch,),
    "dense_unbalanced": (Branch,),
    "domain_token": (),
    "branched": (Branch, ExpertText, Averaging),
    # Trained with the FLOPs of `tokens` of a dense model.
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
    """The entries of a file, where one that is named like a kind is of this kind."""
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

    # Each cluster is an expert with files and jobs of its own; c-BTM's paper ends at 128.
    clusters: Annotated[Positive, Field(le=4096)] | None = Field(
        default=None, description="Clusters. Not given for the method metadata."
    )
    method: Literal["kmeans", "random", "metadata"] = Field(
        default="kmeans",
        description="kmeans: the nearest centre of k-means. random: drawn by the hash of a document. metadata: one "
        "cluster per training domain.",
    )
    balanced: Switch = Field(default=True, description="Whether k-means keeps its clusters equal in documents.")
    dimensions: Positive = Field(default=100, description="Dimensions that tf-idf is reduced to.")
    documents: Positive = Field(default=400_000, description="Documents of the sample that is fitted, drawn by hash.")


def cluster_names(name: str, clustering: Clustering, domains: Iterable[str]) -> tuple[str, ...]:
    """The clusters of the clustering `name` of these training domains: c00, c01, …, or the domains themselves.

    Raises DemixError if the clustering does not say how many there are.
    """
    if clustering.method == "metadata":
        return tuple(sorted(domains))
    if clustering.clusters is None:
        raise DemixError(f"config key clusterings.{name}.clusters", "is missing", "say how many clusters there are")
    digits = max(2, len(str(clustering.clusters - 1)))
    return tuple(f"c{number:0{digits}}" for number in range(clustering.clusters))
