"""Dropout of what attention and feedforwards add to the residual stream, in training alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from demix.files import seed_for

# What `Dropout.masks` returns.
Masks = tuple[Tensor, float]


@dataclass(frozen=True)
class Dropout:
    """Drops the share `rate` of the units that attention and feedforward of each block add, at each position anew.

    These are the places of OPT's dropout (`OPTDecoderLayer` of transformers): after the last map of attention, and
    after that of the feedforward. The weights of positions and the embeddings stay whole. `seeds`, E lists of B
    numbers, has one for each sequence of a training pass. The masks of a sequence follow from its number and the layer:
    from no rank, no other sequence and no earlier pass.
    """

    rate: float
    seeds: Sequence[Sequence[int]]

    def masks(self, layer: int, x: Tensor) -> Masks:
        """What block `layer` keeps of attention, then of the feedforward, bool [2, E, B, T, D] for `x` [E, B, T, D].

        With it the factor 1 / (1 - rate) of what is kept, so that means stay as they are.
        """
        kept = torch.empty(2, *x.shape, dtype=torch.bool, device=x.device)
        for e, seeds in enumerate(self.seeds):
            for b, seed in enumerate(seeds):
                generator = torch.Generator(x.device).manual_seed(seed_for(seed, layer))
                drawn = torch.rand(2, *x.shape[2:], generator=generator, device=x.device)
                torch.ge(drawn, self.rate, out=kept[:, e, b])
        return kept, 1 / (1 - self.rate)


def dropped(x: Tensor, masks: Masks | None, place: int) -> Tensor:
    """`x` [E, B, T, D] with the mask of `place` (0: attention, 1: the feedforward), or as it is without masks."""
    if masks is None:
        return x
    kept, factor = masks
    return x * kept[place] * factor
