"""A memory of pairs of tokens: a table of states, of which a hash of the last two tokens chooses one."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demix.config.architecture import Architecture
from demix.config.counts import BIGRAM_ROWS

# The hash of a pair: odd numbers, so that pairs with the same second token fall into rows that differ.
OF_TOKEN, OF_PREVIOUS = 1_000_003, 7_919
# The scale of the states in each block before training.
BIGRAM_SCALE = 0.1


class Bigrams(nn.Module):
    """States that are added to the residual stream before each block, times the `scale` [layers] of the block.

    All experts read the same `table` [R, D], or each one its own of `expert_table` [E, R, D], with R = 5·V rows.
    """

    def __init__(self, architecture: Architecture, vocab_size: int, experts: int):
        super().__init__()
        self.rows, own = BIGRAM_ROWS * vocab_size, architecture.bigrams == "experts"
        shape = self.rows, architecture.width
        self.table = None if own else nn.Parameter(torch.empty(shape))
        self.expert_table = nn.Parameter(torch.empty(experts, *shape)) if own else None
        self.scale = nn.Parameter(torch.empty(architecture.layers))

    def forward(self, inputs: Tensor, before: Tensor | None = None) -> Tensor:
        """The states [E or 1, B, T, D] of `inputs` [E or 1, B, T], which follow the tokens `before` [E or 1, B].

        Without `before` the inputs begin a block, whose first token follows token 0.
        """
        first = torch.zeros_like(inputs[..., :1]) if before is None else before[..., None]
        rows = hashed(inputs, torch.cat([first, inputs[..., :-1]], -1), self.rows)
        if self.expert_table is None:
            assert self.table is not None
            return F.embedding(rows, self.table)
        experts = torch.arange(len(self.expert_table), device=rows.device)[:, None, None]
        return F.embedding(rows + self.rows * experts, self.expert_table.flatten(0, 1))


def hashed(tokens: Tensor, previous: Tensor, rows: int) -> Tensor:
    """The row, from 0 to `rows` - 1, of each of `tokens` after each of `previous`."""
    found: Tensor = (tokens.long() * OF_TOKEN ^ previous.long() * OF_PREVIOUS) % rows
    return found
