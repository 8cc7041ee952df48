"""The layers of a transformer block, chosen by the architecture."""

from torch import nn

from demix.config.architecture import Architecture
from demix.model.layers.attention import Attention, KeyValues, attention_bias
from demix.model.layers.demix import DEMixLayer
from demix.model.layers.norm import layer_norm

__all__ = ["Attention", "DEMixLayer", "KeyValues", "attention_bias", "feedforward", "layer_norm"]


def feedforward(architecture: Architecture, layer: int, experts: int) -> nn.Module:
    """The feedforward of block number `layer` (from 0). It maps (x [E or 1, B, T, D], auxiliary) to [E, B, T, D].

    `auxiliary` is a list to which the feedforward may append losses (`GPT.forward`).
    """
    return DEMixLayer(experts, architecture.width, architecture.activation)
