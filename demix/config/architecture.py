"""Sizes and options of the language models, and their presets."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from demix.errors import DemixError
from demix.settings import Integer, Number, Positive, Settings, Switch, names_of, partial, settings_from


class Routed(Settings):
    """Token-routed feedforwards: in every `every`-th layer, each token uses `top_k` of `experts` experts.

    With `renormalise` the gates of the chosen experts are divided by their sum.
    """

    experts: Positive = Field(le=4096)
    top_k: Positive
    every: Positive
    capacity: Number = Field(gt=0, le=4096)
    balance: Number = Field(ge=0)
    renormalise: Switch = True

    def model_post_init(self, context: Any, /) -> None:
        if self.top_k > self.experts:
            cause = f"is {self.top_k}, but a layer has {self.experts} experts"
            raise DemixError("architecture.routed.top_k", cause, "lower it, or raise experts")

    def in_block(self, number: int) -> bool:
        """Whether the feedforward of layer `number` (from 0) is token-routed."""
        return number % self.every == self.every - 1

    def places(self, positions: int) -> int:
        """The tokens of a sequence of T positions that an expert processes in training: ⌊capacity·⌈T/experts⌉⌋."""
        return math.floor(self.capacity * -(-positions // self.experts))


class Sizes(Settings):
    """A decoder's sizes: `layers` layers of `width` units, `heads` attention heads, `context` positions."""

    layers: Positive = Field(le=256, description="Number of transformer layers.")
    width: Positive = Field(
        le=65_536, description="Width of the residual stream; the feedforward is 4 times as wide unless `inner` is set."
    )
    heads: Positive = Field(
        le=65_536, description="Number of attention heads; must divide the width unless `head_width` is set."
    )
    context: Integer = Field(ge=2, le=131_072, description="Context length: tokens of one block (T).")


class RopeScaling(Settings):
    """How rope is extended beyond pretraining's context: `linear` scales all frequencies, `llama3` only low ones."""

    kind: Literal["linear", "llama3"] = Field(
        description="linear (Chen et al. 2023, position interpolation) or llama3 (Llama 3.1: a frequency of fewer than "
        "`low` turns in `context` is divided by `factor`, one of more than `high` is kept, others are interpolated)."
    )
    factor: Number = Field(ge=1, le=1e6, description="Divisor of the frequencies.")
    low: Number = Field(default=1.0, gt=0, le=1e6, description="llama3: turns in `context`; see `kind`.")
    high: Number = Field(default=4.0, gt=0, le=1e6, description="llama3: turns in `context`; see `kind`.")
    context: Positive = Field(default=8192, le=1 << 30, description="llama3: context length of pretraining.")

    def model_post_init(self, context: Any, /) -> None:
        if self.low >= self.high:
            cause = f"is {self.low:g}, but high is {self.high:g}"
            raise DemixError("architecture.rope_scaling.low", cause, "lower it")


class Options(Settings):
    """Options of a decoder's computation, without its sizes. An entry of `models` may have options of its own.

    The first value of an option is the default, as in GPT-2 and GPT-3.
    """

    activation: Literal["gelu", "gelu_new", "relu", "silu", "relu2"] = Field(
        default="gelu",
        description="Activation of the feedforward: gelu (exact), gelu_new (GPT-2's tanh approximation), relu (OPT's), "
        "silu (with `gated`: SwiGLU) or relu2 (ReLU squared).",
    )
    position: Literal["learned", "sinusoidal", "alibi", "rope"] = Field(
        default="learned",
        description="How a model knows the order of tokens: learned (a table of positions), sinusoidal (a fixed table "
        "of sines and cosines), alibi (attention falls with the distance; in masked models the distance of a later "
        "position is reduced by half a position) or rope (queries and keys are rotated by their position). Without "
        "learned positions, blocks may be longer than in training.",
    )
    head: Literal["tied", "clap", "untied", "roberta"] = Field(
        default="tied",
        description="Output layer: tied (the token embedding), clap (the token embedding, its rows scaled to norm 1, "
        "also where it is the input; logits are multiplied by a learned number), untied (an embedding of its own) or "
        "roberta (a linear map, GELU and a norm, then the token embedding and a bias; only with objective mlm).",
    )
    objective: Literal["clm", "mlm"] = Field(
        default="clm",
        description="Training objective: clm (predict the next token; a position attends to itself and earlier ones "
        "of its block) or mlm (predict masked tokens; a position attends to all of its block).",
    )
    mask: Literal["zeros", "learned"] = Field(
        default="zeros",
        description="Input embedding of a masked token in a masked model: zeros, or learned (a vector of its own).",
    )
    norm: Literal["layer", "rms"] = Field(
        default="layer",
        description="Norms: layer (LayerNorm) or rms (RMSNorm: no mean, no bias).",
    )
    norm_place: Literal["before", "after", "post"] = Field(
        default="before",
        description="Place of a layer's norms: before (before attention and feedforward), after (after them, before "
        "the residual sum; OLMo 2) or post (after the residual sum; BERT). With post, another norm follows the sum of "
        "embeddings and positions, and no norm precedes the head.",
    )
    query_norm: Literal["none", "head", "all"] = Field(
        default="none",
        description="RMSNorm of queries and keys: none, head (each head by itself; Qwen 3) or all (all heads together; "
        "OLMo 2).",
    )
    biases: Literal["all", "qkv", "none"] = Field(
        default="all",
        description="Which linear maps have a bias: all, qkv (those of queries, keys and values; Qwen 2) or none "
        "(Llama).",
    )
    gated: Switch = Field(
        default=False,
        description="Whether the feedforward is gated: one half of the inner units passes the activation and scales "
        "the other half (Shazeer 2020; with silu: SwiGLU).",
    )
    residual: Literal["sequential", "parallel"] = Field(
        default="sequential",
        description="Input of a layer's feedforward: the residual sum after attention (sequential), or the layer's "
        "input, as for attention (parallel; GPT-NeoX).",
    )
    inner: Positive | None = Field(
        default=None, le=1 << 20, description="Inner units of the feedforward; default: 4 times the width."
    )
    key_heads: Positive | None = Field(
        default=None,
        le=65_536,
        description="Number of key and value heads, each shared by several query heads (grouped-query attention). It "
        "must divide `heads`. Default: `heads`.",
    )
    head_width: Positive | None = Field(
        default=None, le=65_536, description="Units of one head; default: width / heads."
    )
    epsilon: Number = Field(
        default=1e-5, gt=0, le=1, description="Constant that norms add to the variance; default: 1e-5."
    )
    rope_theta: Number = Field(default=10_000.0, gt=0, le=1e12, description="Base of the frequencies of rope.")
    rope_share: Number = Field(
        default=1.0, gt=0, le=1, description="Fraction of a head's units that rope rotates, from the first unit."
    )
    bigrams: Literal["none", "shared", "experts"] = Field(
        default="none",
        description="Bigram embeddings: a table with 5 rows per vocabulary entry. A hash of the last two tokens picks "
        "the row that is added before every layer. none, shared (one table for all experts) or experts (one table per "
        "expert, like its feedforwards). A table adds no matrix product, so FLOPs do not count it.",
    )
    value_embeddings: Switch = Field(
        default=False,
        description="Value embeddings: whether every layer has a token embedding that is added to the values of "
        "attention, with a gate for each head.",
    )
    rope_scaling: RopeScaling | None = Field(
        default=None, description="How rope is extended beyond the context of pretraining; default: not at all."
    )


class Decoder(Options, Sizes):
    """The sizes and options that the section `architecture` of a config can give."""

    def model_post_init(self, context: Any, /) -> None:
        if self.head_width is None and self.width % self.heads:
            cause = f"is {self.heads}, which does not divide the width {self.width}"
            raise DemixError("architecture.heads", cause, "choose a divisor, or add head_width")
        if self.heads % self.key_value_heads:
            cause = f"is {self.key_heads}, which does not divide the {self.heads} heads"
            raise DemixError("architecture.key_heads", cause, "choose a divisor")
        for key in ("rope_theta", "rope_share", "rope_scaling"):
            if getattr(self, key) != USUAL[key] and self.position != "rope":
                cause = f"is set, but position is {self.position}"
                raise DemixError(f"architecture.{key}", cause, "leave it out, or use position rope")
        if self.position == "rope" and (self.rotated % 2 or not self.rotated):
            cause = f"rotates {self.rotated} of a head's {self.unit} units, which is an odd number"
            raise DemixError("architecture.rope_share", cause, "choose one with an even number of units")
        if self.norm_place != "before" and self.residual == "parallel":
            cause = f"is {self.norm_place}, but no norm can follow a parallel residual"
            raise DemixError("architecture.norm_place", cause, "use before, or residual: sequential")

    @property
    def unit(self) -> int:
        """The number of units of one head."""
        return self.head_width or self.width // self.heads

    @property
    def key_value_heads(self) -> int:
        """The number of key heads, which is also the number of value heads."""
        return self.key_heads or self.heads

    @property
    def rotated(self) -> int:
        """The number of units of a head that rope rotates."""
        return int(self.unit * self.rope_share)

    @property
    def inner_width(self) -> int:
        """The number of inner units of a feedforward."""
        return self.inner or 4 * self.width

    @property
    def maps(self) -> int:
        """The number of linear maps of a feedforward: two, or three if it is gated."""
        return 3 if self.gated else 2


class Architecture(Decoder):
    """A decoder with these sizes and options. With `routed`, some of its feedforwards are token-routed."""

    routed: Routed | None = None

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        for key, value in (("mask", "learned"), ("head", "roberta")):
            if getattr(self, key) == value and self.objective != "mlm":
                cause = f"is {value}, but the objective is {self.objective}"
                raise DemixError(f"architecture.{key}", cause, "leave it out: it is for masked models")
        if self.position == "sinusoidal" and self.width % 2:
            raise DemixError("architecture.position", f"is sinusoidal, but width is {self.width}", "use an even width")
        for key in ("bigrams", "value_embeddings"):
            if getattr(self, key) != USUAL[key] and (self.routed or self.objective == "mlm"):
                cause = f"is {getattr(self, key)}, but the model is {'token-routed' if self.routed else 'masked'}"
                raise DemixError(f"architecture.{key}", cause, "leave it out, or use a causal model without routers")
        if self.routed and self.routed.every > self.layers:
            cause = f"is {self.routed.every}, but the model has {self.layers} layers"
            raise DemixError("architecture.routed.every", cause, f"use 1 to {self.layers}")
        if self.routed and not self.routed.places(self.context):
            cause = f"is {self.routed.capacity:g}: an expert could process none of the {self.context} tokens"
            raise DemixError("architecture.routed.capacity", cause, "raise it, or lower experts")

    @property
    def routed_layers(self) -> int:
        """The number of layers whose feedforward is token-routed."""
        return self.layers // self.routed.every if self.routed else 0

    @property
    def unrouted(self) -> "Architecture":
        """The same architecture with dense feedforwards."""
        return self.replace(routed=None)

    @property
    def described(self) -> dict[str, Any]:
        """The architecture as JSON, without newer keys that have the value which older descriptions imply."""
        usual = USUAL | {"routed": None}
        given = self.as_dict()
        if self.routed and self.routed.renormalise:
            del given["routed"]["renormalise"]
        return {key: value for key, value in given.items() if key not in usual or value != usual[key]}

    def merged_routed(self, experts: int) -> "Architecture":
        """The architecture in which each token uses two of `experts` domain experts in every layer.

        It is for a merged model before further training: experts have no capacity limit, and the load-balancing loss
        has weight 0.
        """
        routed = Routed(experts=experts, top_k=2, every=1, capacity=float(experts), balance=0.0)
        return self.replace(routed=routed)


# The options of a model whose config gives none.
USUAL = Options().as_dict()
# A masked model scores a block in this many passes; each pass then masks about as many tokens as training does.
FOLDS = 7
# Sizes of GPT-3 (Brown et al. 2020, table 2.1) with the head counts of fairseq's transformer_lm_gpt3_*.
PRESETS = {
    "gpt3-small": Architecture(layers=12, width=768, heads=12, context=1024),
    "gpt3-medium": Architecture(layers=24, width=1024, heads=16, context=1024),
    "gpt3-large": Architecture(layers=24, width=1536, heads=16, context=1024),
    "gpt3-xl": Architecture(layers=24, width=2048, heads=32, context=1024),
}
_LLAMA = {"norm": "rms", "position": "rope", "activation": "silu", "gated": True, "biases": "none", "head": "untied"}
# Options of decoders whose sizes the config gives: published ones, that of the sample run, and the paper's.
DECODERS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA | {"rope_theta": 500_000.0},
    "olmo2": _LLAMA | {"rope_theta": 500_000.0, "norm_place": "after", "query_norm": "all", "epsilon": 1e-6},
    "qwen3": _LLAMA | {"rope_theta": 1_000_000.0, "query_norm": "head", "epsilon": 1e-6, "head": "tied"},
    "opt": {"activation": "relu"},
    "pythia": {"position": "rope", "rope_share": 0.25, "residual": "parallel", "head": "untied"},
    "roberta": {
        "objective": "mlm",
        "mask": "learned",
        "head": "roberta",
        "norm_place": "post",
    },
    "modern": _LLAMA | {"query_norm": "head"},
    "compact": _LLAMA | {"query_norm": "head", "bigrams": "experts", "value_embeddings": True},
    "paper": {},
}
# The options that an entry of `models` gives.
EntryArchitecture = partial(
    "EntryArchitecture",
    Options,
    preset=Annotated[
        Literal[tuple(DECODERS)],
        Field(description="Name of a set of options, which replaces the options of the section `architecture`."),
    ],
)


def with_options(section: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The section `architecture` with an entry's `options`.

    If the options name a preset, only the section's sizes remain.
    """
    if "preset" not in options:
        return {**section, **options}
    sizes = PRESETS[section["preset"]].as_dict() if section.get("preset") in PRESETS else section
    return {**{name: section.get(name, sizes[name]) for name in names_of(Sizes)}, **options}


def architecture_from(section: Mapping[str, Any]) -> Architecture:
    """The architecture that the config section `architecture` describes.

    The section names a preset, such as `{preset: gpt3-small}`, with optional overrides, or gives all four sizes.
    Presets in `DECODERS` have only options, so the section gives their sizes.
    """
    sizes = dict(section)
    if preset := sizes.pop("preset", None):
        if preset not in (*PRESETS, *DECODERS):
            known = ", ".join([*PRESETS, *DECODERS])
            raise DemixError("architecture.preset", f"{preset} is not known", f"use one of {known}")
        sizes = (PRESETS[preset].as_dict() if preset in PRESETS else DECODERS[preset]) | sizes
    return settings_from(Architecture, sizes, "architecture")
