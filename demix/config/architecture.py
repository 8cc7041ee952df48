"""Sizes of the language models: presets and parameter counts."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from demix.errors import DemixError
from demix.settings import Integer, Number, Positive, Switch, partial, settings, settings_from


@settings(kw_only=True)
class Routed:
    """Feedforwards of `experts` experts, of which each token chooses `top_k`, in every `every`-th block.

    With `cosine` a token's state is divided by its length before the router. The rows of the router then have the
    length 1/temperature, so that its logits are cosines over the temperature (`demix.model.merge_routed`). No training
    makes such a router.
    """

    experts: Positive = Field(le=4096)
    top_k: Positive
    every: Positive
    capacity: Number = Field(gt=0, le=4096)
    balance: Number = Field(ge=0)
    cosine: Switch = False

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            cause = f"is {self.top_k}, and a layer has {self.experts} experts"
            raise DemixError("architecture.routed.top_k", cause, "lower it, or raise experts")

    def in_block(self, number: int) -> bool:
        """Whether the feedforward of block `number` (from 0) is routed."""
        return number % self.every == self.every - 1

    def places(self, positions: int) -> int:
        """The tokens of a sequence of T positions that an expert takes in training: ⌊capacity·⌈T/experts⌉⌋."""
        return math.floor(self.capacity * -(-positions // self.experts))


@settings()
class Sizes:
    """A GPT-3-like decoder: `layers` blocks of `width` units, `heads` attention heads, `context` positions."""

    layers: Positive = Field(le=256, description="Number of transformer blocks.")
    width: Positive = Field(
        le=65_536, description="Width of the residual stream; the feedforward layer is 4 times as wide."
    )
    heads: Positive = Field(le=65_536, description="Number of attention heads; must divide the width.")
    context: Integer = Field(ge=2, le=131_072, description="Tokens of one block (T), the longest context of the model.")
    activation: Literal["gelu", "gelu_new"] = Field(
        default="gelu",
        description="Activation of the feedforward: gelu (exact, also where the key is absent) or gelu_new (GPT-2's).",
    )

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise DemixError(
                "architecture.heads", f"{self.heads} does not divide the width {self.width}", "choose a divisor"
            )


@settings()
class Options:
    """The positions, the attention, the head and the objective of a model. A row of `models` may have its own."""

    position: Literal["learned", "alibi"] = Field(
        default="learned",
        description="How a model knows the order of tokens: learned (a table of positions, also where the key is "
        "absent) or alibi (attention falls with the distance; blocks may be longer than those of training).",
    )
    attention: Literal["causal", "bidirectional"] = Field(
        default="causal",
        description="What a position attends to: causal (itself and earlier ones, also where the key is absent) or "
        "bidirectional (all of the block; with objective mlm only).",
    )
    alibi: Literal["symmetric", "asymmetric"] = Field(
        default="symmetric",
        description="How alibi counts later positions under bidirectional attention: symmetric (by their distance, "
        "also where the key is absent) or asymmetric (by half a position less).",
    )
    head: Literal["tied", "clap"] = Field(
        default="tied",
        description="What scores the vocabulary: tied (the token embedding, also where the key is absent) or clap (the "
        "token embedding with rows of length 1, times a learned temperature).",
    )
    objective: Literal["clm", "mlm"] = Field(
        default="clm",
        description="What is learned: clm (the next token, also where the key is absent) or mlm (masked tokens; with "
        "attention bidirectional only).",
    )


@settings()
class Decoder(Options, Sizes):
    """What the section `architecture` of a config may say of a model."""


@settings()
class Architecture(Decoder):
    """A decoder of these sizes; with `routed`, the tokens choose among experts in some feedforwards."""

    routed: Routed | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.attention == "bidirectional") != (self.objective == "mlm"):
            cause = f"is {self.attention}, and the objective is {self.objective}"
            cure = "use bidirectional with mlm, and causal with clm"
            raise DemixError("architecture.attention", cause, cure)
        if self.alibi != "symmetric":
            _check_alibi(self.position, self.attention)
        if self.routed and self.routed.every > self.layers:
            cause = f"is {self.routed.every}, and the model has {self.layers} layers"
            raise DemixError("architecture.routed.every", cause, f"use 1 to {self.layers}")
        if self.routed and not self.routed.places(self.context):
            cause = f"is {self.routed.capacity:g}, which leaves an expert no token of {self.context}"
            raise DemixError("architecture.routed.capacity", cause, "raise it, or lower experts")

    @property
    def routed_layers(self) -> int:
        """The number of blocks whose feedforward is routed."""
        return self.layers // self.routed.every if self.routed else 0

    @property
    def unrouted(self) -> "Architecture":
        """The same architecture with dense feedforwards."""
        return dataclasses.replace(self, routed=None)

    @property
    def described(self) -> dict[str, Any]:
        """The architecture as JSON, without a key that is as in descriptions that do not have it."""
        usual = USUAL | {"activation": "gelu", "routed": None}
        given = dataclasses.asdict(self)
        if self.routed and not self.routed.cosine:
            del given["routed"]["cosine"]
        return {key: value for key, value in given.items() if key not in usual or value != usual[key]}

    def merged_routed(self, experts: int) -> "Architecture":
        """The architecture in which each token chooses two of `experts` domain experts in every layer, by cosine.

        It is not trained: each expert has a place for every token, and the loss of balance has no weight.
        """
        routed = Routed(experts=experts, top_k=2, every=1, capacity=float(experts), balance=0.0, cosine=True)
        return dataclasses.replace(self, routed=routed)


# The options of a model whose config names none.
USUAL = dataclasses.asdict(Options())
# The options that a row of `models` gives.
RowArchitecture = partial("RowArchitecture", Options)

# A masked model scores a block in this many passes, so that about as many of its tokens are hidden as in training.
FOLDS = 7
# The share of a block's tokens that are its targets in training (Devlin et al. 2019, "BERT", section 3.1).
MASKED_SHARE = 0.15
# Sizes of GPT-3 (Brown et al. 2020, table 2.1) with the head counts of fairseq's transformer_lm_gpt3_*.
PRESETS = {
    "gpt3-small": Architecture(layers=12, width=768, heads=12, context=1024),
    "gpt3-medium": Architecture(layers=24, width=1024, heads=16, context=1024),
    "gpt3-large": Architecture(layers=24, width=1536, heads=16, context=1024),
    "gpt3-xl": Architecture(layers=24, width=2048, heads=32, context=1024),
}


def architecture_from(section: Mapping[str, Any]) -> Architecture:
    """The architecture that the config section `architecture` describes.

    The section names a preset, such as `{preset: gpt3-small}`, with optional overrides, or gives all four sizes.
    """
    sizes = dict(section)
    if "alibi" in sizes:
        _check_alibi(sizes.get("position", "learned"), sizes.get("attention", "causal"))
    if preset := sizes.pop("preset", None):
        if preset not in PRESETS:
            raise DemixError("architecture.preset", f"{preset} is not known", f"use one of {', '.join(PRESETS)}")
        sizes = dataclasses.asdict(PRESETS[preset]) | sizes
    return settings_from(Architecture, sizes, "architecture")


def _check_alibi(position: str, attention: str) -> None:
    """Raise DemixError unless the option `alibi` has a meaning beside these options."""
    if position != "alibi" or attention != "bidirectional":
        cause = f"is given to position {position} and attention {attention}"
        raise DemixError("architecture.alibi", cause, "leave it out: it is for position alibi, attention bidirectional")


def training_flops_per_token(architecture: Architecture, vocab_size: int, length: int) -> float:
    """96·l·h²·(1 + s/6h + V/16lh) for sequences of `length`: forward, forward again, backward (twice a forward).

    Narayanan et al. 2021, section 5.1. V is rounded up to a multiple of 8, as in the paper's Table 2. A token passes
    through one expert per layer: DEMix costs as much as a dense model. Without activation checkpointing the layers
    cost three quarters of the formula's value. Each of the m routed layers adds the router and k - 1 more experts of a
    token: 4·m·(16h²(k - 1) + 2hE). A masked model has logits of its targets alone.
    """
    layers, width, vocabulary = architecture.layers, architecture.width, -(-vocab_size // 8) * 8
    # Of a block's tokens, these have logits.
    share = masked_places(length) / length if architecture.objective == "mlm" else 1
    dense = 96 * layers * width**2 * (1 + length / (6 * width) + share * vocabulary / (16 * layers * width))
    return dense + 4 * routing_flops(architecture)


def masked_places(length: int) -> int:
    """The number M of targets in a masked block of `length` tokens: 15% of them, and one at least."""
    return max(1, round(MASKED_SHARE * length))


def routing_flops(architecture: Architecture) -> int:
    """FLOPs a token of a forward pass that routed layers need beyond those of a dense model."""
    routed, width = architecture.routed, architecture.width
    if not routed:
        return 0
    return architecture.routed_layers * (16 * width**2 * (routed.top_k - 1) + 2 * width * routed.experts)


def unchosen_parameters(architecture: Architecture) -> int:
    """The parameters of routed experts that a token does not choose."""
    routed, width = architecture.routed, architecture.width
    return architecture.routed_layers * (routed.experts - routed.top_k) * (8 * width**2 + 5 * width) if routed else 0


def parameters(
    architecture: Architecture, vocab_size: int, domain_tokens: int = 0, expert_scope: str = "feedforward"
) -> tuple[int, int]:
    """Count the parameters that all experts of a model share, and those that each expert owns alone.

    An expert owns the feedforward of every layer, biases included; with `expert_scope` "model" an expert owns
    everything. The shared parameters are tied embeddings, positions (none with ALiBi), attention, norms and the scale
    of CLAP. `domain_tokens` > 0 adds the extra position and the input embeddings of the domain-token baseline. A routed
    feedforward counts with all its experts and its router.
    """
    layers, width = architecture.layers, architecture.width
    positions = architecture.context + (1 if domain_tokens else 0) if architecture.position == "learned" else 0
    embeddings = (vocab_size + positions + domain_tokens) * width
    attention = 4 * width * width + 4 * width
    norms = 2 * 2 * width
    rest = embeddings + layers * (attention + norms) + 2 * width + (architecture.head == "clap")
    feedforward = 8 * width**2 + 5 * width
    feedforwards = layers * feedforward
    if routed := architecture.routed:
        feedforwards += architecture.routed_layers * ((routed.experts - 1) * feedforward + routed.experts * width)
    return (0, rest + feedforwards) if expert_scope == "model" else (rest, feedforwards)
