"""Sizes of the language models: presets and parameter counts."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from demix.errors import DemixError
from demix.settings import Integer, Positive, settings, settings_from


@settings()
class Architecture:
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

    @property
    def described(self) -> dict[str, Any]:
        """The sizes as JSON, with `activation` only where it is not gelu: older descriptions do not have it."""
        return {key: value for key, value in dataclasses.asdict(self).items() if (key, value) != ("activation", "gelu")}


GPT2_TYPES = 50257
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
    if preset := sizes.pop("preset", None):
        if preset not in PRESETS:
            raise DemixError("architecture.preset", f"{preset} is not known", f"use one of {', '.join(PRESETS)}")
        sizes = dataclasses.asdict(PRESETS[preset]) | sizes
    return settings_from(Architecture, sizes, "architecture")


def vocabulary(tokenizer: Mapping[str, Any]) -> int:
    """The number of types of the tokenizer that the config section `tokenizer` describes."""
    return GPT2_TYPES if tokenizer["kind"] == "gpt2" else int(tokenizer["vocab_size"])


def parameters(
    architecture: Architecture, vocab_size: int, domain_tokens: int = 0, expert_scope: str = "feedforward"
) -> tuple[int, int]:
    """Count the parameters that all experts of a model share, and those that each expert owns alone.

    An expert owns the feedforward of every layer, biases included; with `expert_scope` "model" an expert owns
    everything. The shared parameters are tied embeddings, positions, attention and norms. `domain_tokens` > 0 adds the
    extra position and the input embeddings of the domain-token baseline.
    """
    layers, width = architecture.layers, architecture.width
    positions = architecture.context + (1 if domain_tokens else 0)
    embeddings = (vocab_size + positions + domain_tokens) * width
    attention = 4 * width * width + 4 * width
    norms = 2 * 2 * width
    rest = embeddings + layers * (attention + norms) + 2 * width
    feedforwards = layers * (8 * width**2 + 5 * width)
    return (0, rest + feedforwards) if expert_scope == "model" else (rest, feedforwards)
