"""The parts of a block, as an architecture asks for them."""

from torch import nn

from demix.config.architecture import Architecture
from demix.model.layers.attention import Attention, KeyValues, attention_bias
from demix.model.layers.demix import DEMixLayer
from demix.model.layers.norm import layer_norm

__all__ = ["Attention", "DEMixLayer", "KeyValues", "attention_bias", "feedforward", "layer_norm"]


def feedforward(architecture: Architecture, layer: int, experts: int) -> nn.Module:
    """The feedforward of block number `layer` (from 0): (x [E or 1, B, T, D], auxiliary) -> [E, B, T, D].

    `auxiliary` is a list of losses that the feedforward may add to (`GPT.forward`).
    """
    return DEMixLayer(experts, architecture.width)
