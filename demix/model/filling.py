"""Filling in the masks of a text with a masked language model, whose experts are mixed by static weights."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.model.gpt import GPT, MASKED

MASK = "<mask>"


class Filling(NamedTuple):
    """A token that may replace a mask, its probability in the mixture, and that under each expert [E]."""

    text: str
    probability: float
    by_expert: tuple[float, ...]


def masked_inputs(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """The inputs [T] of a masked model for `text`: end of text, as before each document, then its tokens and MASKED.

    As in fairseq's `fill_mask`, the white space before `<mask>` belongs to the token that is filled in.
    """
    first, *others = text.split(MASK)
    ids = [np.array([tokenizer.end_of_text]), tokenizer.encode(first.rstrip() if others else first)]
    for number, part in enumerate(others, 1):
        ids += [np.array([MASKED]), tokenizer.encode(part.rstrip() if number < len(others) else part)]
    return np.concatenate(ids).astype(np.int64)


@torch.no_grad()
def fillings(
    trunks: Sequence[GPT], tokenizer: Tokenizer, text: str, log_prior: np.ndarray, top: int = 5
) -> list[list[Filling]]:
    """The `top` likeliest fillings of each `<mask>` of `text`, likeliest first, under experts with `log_prior` [E].

    All masks are hidden together, and each is filled in by itself. Raises DemixError for a text without a
    mask, and for one that is longer than the model's blocks.
    """
    sizes = trunks[0].architecture
    inputs = masked_inputs(tokenizer, text)
    masks = np.flatnonzero(inputs == MASKED)
    if not len(masks):
        raise DemixError("text", f"has no {MASK}", f"write {MASK} where a word is to be filled in")
    if len(inputs) > sizes.context:
        cause = f"has {len(inputs)} tokens, and blocks of the model {sizes.context}"
        raise DemixError("text", cause, "shorten it")
    found = []
    for trunk in trunks:
        states = trunk(torch.from_numpy(inputs)[None, None].to(trunk.token_embedding.device))[:, 0, masks]
        found.append(trunk.logits(states).double().log_softmax(-1).cpu())
    log_p = torch.cat(found)  # [E, masks, V]
    mixed = (torch.from_numpy(log_prior)[:, None, None] + log_p).logsumexp(0)
    best = mixed.topk(min(top, mixed.shape[1]))
    return [
        [
            Filling(tokenizer.decode([token]), value, tuple(log_p[:, place, token].exp().tolist()))
            for value, token in zip(best.values[place].exp().tolist(), best.indices[place].tolist(), strict=True)
        ]
        for place in range(len(masks))
    ]
