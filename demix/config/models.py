"""The rows of the section `models`: the kinds of models, and what one row may say."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from demix.config.architecture import RowArchitecture
from demix.config.names import refuse_name
from demix.config.parents import HubParent
from demix.config.training import TrainingSection
from demix.settings import Integer, Number, Positive, Settings, Switch, Text, absent, partial

# The single expert of a model without domain experts.
DENSE_EXPERT = "dense"


@dataclass(frozen=True)
class Kind:
    """How models of one kind are built, and what they learn from.

    `label` is the paper's name of the kind. `expert_scope` says which tensors belong to a domain's expert alone:
    `feedforward` (DEMix layers), `model` (Branch-Train-Merge: each expert is a whole model, trained by itself), or
    `none` for a model whose single expert is called `dense`. `batches` says how a step is drawn: `by_domain` (a group
    of sequences for each domain's expert), `mixed` (the same sequences as one group) or `proportional` (in proportion
    to the domains' sizes). With `domain_tokens` the token of its domain stands before each sequence. With `routed` the
    tokens choose among experts in some feedforwards (`TokenRouting`). Experts that are `anchored` stand beside the
    feedforwards of a parent, and learn alone: all tensors of the parent stay as they are (FlexOlmo, Shi et al. 2025).
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
# The paper's models, which a run has unless a row is null.
PAPER = ("demix", "dense", "dense_unbalanced", "domain_token")
# Rows that a config must keep: DEMix is the model under test, and the dense model is its baseline.
KEPT = ("demix", "dense")


def paper_rows(rows: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Mapping[str, Any] | None]:
    """The paper's rows. Those that `rows` of models do not name begin with the model folder that `rows` begin with.

    It is the first one in the order of the tables. A row with an architecture of its own does not count, since its
    parent fits no other. No folder has domain tokens, so that a model with them is left out. Without a folder all begin
    from scratch, as does a row that is named without a parent.
    """
    named = (row for name in dict.fromkeys((*PAPER, *rows)) if (row := rows.get(name)))
    parents = (row["parent"] for row in named if row.get("parent") and not row.get("architecture"))
    parent = next((one for one in parents if isinstance(one, Mapping) or "/" in one), None)
    begin: dict[str, Any] = {"parent": parent} if parent else {}
    left_out = [name for name in PAPER if parent and KINDS[name].domain_tokens]
    return {name: rows.get(name, None if name in left_out else begin) for name in PAPER}


def _row_name(name: str) -> str:
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise ValueError(
            "is not a usable name of a model", "use lower-case letters, digits and _, and begin with a letter"
        )
    refuse_name(name)
    return name


RowName = Annotated[Text, AfterValidator(_row_name)]


def _label(label: str) -> str:
    if not re.fullmatch(r"[^\W_][\w ,.+:/'’×%–-]{0,59}", label):
        cure = "use up to 60 letters, digits, blanks and , . + : / ' × % -, and begin with a letter or a digit"
        raise ValueError("is not a usable label", cure)
    return label


class Branching(Settings):
    """With which state of another model a row begins, and on what its experts train."""

    parent: HubParent | Text = Field(
        default_factory=absent,
        description="A row of kind dense. The model begins with the state that this row's model had after "
        "`seed_tokens` tokens (a seed phase): the dense feedforward is copied into every expert, and training "
        "goes on. A branch has all its parent's settings; those of time and memory can differ, and dev_blocks. "
        "Or the folder of a dense model, such as imported/gpt2 that `demix import` wrote: the model begins with "
        "its parameters, and with a training of its own. Or `{hub: owner/name, revision: commit}`, such a model of the "
        "Hugging Face hub, which the run imports once. For kind routed also a row of kind demix, branched or "
        "anchored, whose experts become those of every layer, as `merged_routed` says: the row trains the merged "
        "model on all domains for `tokens` more, as `match` counts them (Branch-Train-MiX, Sukhbaatar et al. 2024).",
    )
    seed_tokens: Integer = Field(
        default_factory=absent,
        ge=0,
        description="Tokens of the seed phase, rounded down to whole steps. They are a part of the model's "
        "`tokens`. 0 trains from scratch.",
    )
    schedule: Literal["continue", "restart"] = Field(
        default_factory=absent,
        description="What follows the seed phase. `continue`, which holds where the key is absent (but for kind "
        "routed, where `restart` does): the parent's schedule and the optimizer's moments go on; a row of kind routed "
        "then needs match: updates. `restart`: fresh moments, no warm-up but what the row or its preset says, and the "
        "peak rate, which falls over the tokens that remain. Such a row can have tokens, "
        "sequences, a learning rate and a warm-up of its own, and any kind but domain_token.",
    )
    data: Text = Field(
        default_factory=absent,
        description="The clustering (section `clusterings`) on whose clusters the experts train, one expert per "
        "cluster, with equal tokens. Without it the experts train on the domains.",
    )
    averages: Switch = Field(
        default_factory=absent,
        description="Score averages of the parameters of a row of kind branched, too: one by equal weights, and "
        "for each domain one by its cached prior. Each costs what one model costs.",
    )
    merged_routed: Switch = Field(
        default_factory=absent,
        description="Score the experts of a row of kind demix, branched or anchored as a token-routed model, too, "
        "which is made without training: each token chooses two of their feedforwards in every layer, by a ridge "
        "regression of the expert's domain (or cluster) on the token's state, over 40 blocks of dev text of "
        "each. All other weights of experts of kind branched are averaged. Experts of kind anchored keep "
        "the routers that they learned, and have the anchor beside them.",
    )


class TokenRouting(Settings):
    """The keys of a row whose tokens choose their experts."""

    experts: Positive = Field(
        default_factory=absent,
        le=4096,
        description="Experts of each routed feedforward of a row of kind routed; 8 without the key, or those of a "
        "parent that is merged.",
    )
    top_k: Positive = Field(
        default_factory=absent,
        description="Experts that each token of a row of kind routed chooses: 1 (switch, as without the key), 2 "
        "(GShard's top-2, as without the key after a parent that is merged) or more.",
    )
    every: Positive = Field(
        default_factory=absent,
        description="Every how many blocks one has a routed feedforward: 1 (as without the key) stands for all, 2 "
        "for the second, the fourth and so on.",
    )
    capacity: Number = Field(
        default_factory=absent,
        gt=0,
        # With as many as there are experts, each takes all tokens.
        le=4096,
        description="Tokens of a sequence that an expert takes in training, as a multiple of T / experts: 1.25 "
        "without the key for top_k 1, else 2. First choices come before second ones. Scoring has no such limit.",
    )
    balance: Number = Field(
        default_factory=absent,
        ge=0,
        description="Weight of the loss that balances the loads of the experts; 0.01 without the key.",
    )
    match: Literal["flops", "updates"] = Field(
        default_factory=absent,
        description="What a row of kind routed shares with a dense model of its `tokens`: `flops` of training (as "
        "without the key), so that it has fewer updates and tokens, or `updates`.",
    )


class RowSettings(TrainingSection, TokenRouting, Branching):
    """The section `training` with the values of a row, and what a row alone can say."""

    @property
    def parent_row(self) -> str | None:
        """The row whose seed phase the model begins with; a model elsewhere is no row."""
        return self.parent if isinstance(self.parent, str) else None

    architecture: RowArchitecture = Field(  # type: ignore[valid-type]
        default_factory=absent,
        description="Options of the section `architecture` that this row has instead. A row with a `parent` has "
        "those of its parent.",
    )


ModelRow = partial(
    "ModelRow",
    RowSettings,
    kind=Annotated[
        Literal[tuple(KINDS)],
        Field(description="Kind of the model. A row that is named like a kind may omit this key."),
    ],
    label=Annotated[
        Text,
        AfterValidator(_label),
        Field(
            description="Name of the row in tables, figures, claims and cards, which is made of its settings without "
            "this key, such as “DEMix, warm start 500k”. The paper's four rows have the paper's names."
        ),
    ],
)
