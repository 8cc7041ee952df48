"""The layers of a transformer block, chosen by the architecture."""

from torch import nn

from demix.config.architecture import Architecture
from demix.model.layers.attention import Attention, KeyValues, attention_bias
from demix.model.layers.demix import DEMixLayer
from demix.model.layers.norm import layer_norm
from demix.model.layers.routed import Auxiliary, RoutedLayer, router_metrics

__all__ = [
    "Attention",
    "Auxiliary",
    "DEMixLayer",
    "KeyValues",
    "RoutedLayer",
    "attention_bias",
    "feedforward",
    "layer_norm",
    "router_metrics",
]


def feedforward(architecture: Architecture, layer: int, experts: int) -> nn.Module:
    """The feedforward of block number `layer` (from 0). It maps (x [E or 1, B, T, D], auxiliary) to [E, B, T, D].

    `auxiliary` is a list to which the feedforward may append losses (`GPT.forward`).
    """
    routed = architecture.routed
    if routed and routed.in_block(layer):
        return RoutedLayer(routed, architecture.width, architecture.activation)
    return DEMixLayer(experts, architecture.width, architecture.activation)
