"""The layers of a transformer block, chosen by the architecture."""

from torch import nn

from demix.config.architecture import Architecture
from demix.model.layers.attention import Attention, KeyValues, Rotations, attention_bias, rotations, sinusoids
from demix.model.layers.demix import DEMixLayer
from demix.model.layers.dropout import Dropout, Masks, dropped
from demix.model.layers.norm import norm_of, normed
from demix.model.layers.routed import Auxiliary, RoutedLayer, router_metrics

__all__ = [
    "Attention",
    "Auxiliary",
    "DEMixLayer",
    "Dropout",
    "KeyValues",
    "Masks",
    "Rotations",
    "RoutedLayer",
    "attention_bias",
    "dropped",
    "feedforward",
    "norm_of",
    "normed",
    "rotations",
    "router_metrics",
    "sinusoids",
]


def feedforward(architecture: Architecture, layer: int, experts: int) -> nn.Module:
    """The feedforward of block number `layer` (from 0). It maps (x [E or 1, B, T, D], auxiliary) to [E, B, T, D].

    `auxiliary` is a list to which the feedforward may append losses (`GPT.forward`).
    """
    width, activation, routed = architecture.width, architecture.activation, architecture.routed
    inner, gated, biased = architecture.inner_width, architecture.gated, architecture.biases == "all"
    if routed and routed.in_block(layer):
        return RoutedLayer(routed, width, activation, inner=inner, gated=gated, biased=biased)
    return DEMixLayer(experts, width, activation, inner=inner, gated=gated, biased=biased)
