"""Log-probabilities of whole texts under every expert, for training and evaluation."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from demix.errors import DemixError
from demix.model.gpt import GPT

# Tokens x experts in one forward pass: enough to keep a core busy, little enough to stay in memory.
EXPERT_TOKENS_AT_ONCE = 8192


def columns_of(trunks: Sequence[GPT]) -> tuple[str, ...]:
    """The names of the rows of `trunk_log_probabilities`: the experts, trunk by trunk, or the domain tokens."""
    return tuple(name for trunk in trunks for name in trunk.domain_tokens or trunk.experts)


def trunk_log_probabilities(
    trunks: Sequence[GPT],
    inputs: np.ndarray,
    targets: np.ndarray,
    mask: np.ndarray,
    dtype: torch.dtype | None = None,
    advance: Callable[[int], None] = lambda tokens: None,
    domain_tokens: tuple[str, ...] | None = None,
) -> np.ndarray:
    """`log_probabilities` of all trunks of a model: [E, tokens] in the order of `columns_of`, or of `domain_tokens`.

    `advance` is called with the number of tokens that were scored since its last call. Raises DemixError for an expert
    whose log-probabilities are not all finite.
    """
    scored = []
    for trunk in trunks:
        with trunk.with_weights() as model:
            scored.append(log_probabilities(model, inputs, targets, mask, dtype, advance, domain_tokens))
    scores = np.concatenate(scored)
    for name, row in zip(domain_tokens or columns_of(trunks), scores, strict=True):
        if not np.isfinite(row).all():
            raise DemixError(
                f"expert {name}", "gives tokens no finite log-probability", "train it again, or leave it out"
            )
    return scores


@torch.no_grad()
def log_probabilities(
    model: GPT,
    inputs: np.ndarray,
    targets: np.ndarray,
    mask: np.ndarray,
    dtype: torch.dtype | None = None,
    advance: Callable[[int], None] = lambda tokens: None,
    domain_tokens: tuple[str, ...] | None = None,
) -> np.ndarray:
    """log p in nats of every target under every expert, in the order of the text: [E, tokens], without padding.

    `inputs`, `targets` and `mask` [N, T] come from `demix.data.shards.blocks`. A domain-token model has one row for
    each of `domain_tokens`, by default all that it has. `advance` is called with the number of tokens that were scored
    since its last call.
    """
    device = model.token_embedding.device
    chosen = (domain_tokens or model.domain_tokens) if model.domain_tokens else ()
    known = [model.domain_tokens.index(name) for name in chosen]
    columns = len(known or model.experts)
    batch = max(1, EXPERT_TOKENS_AT_ONCE // (columns * inputs.shape[1]))
    scored = []
    for first in range(0, len(inputs), batch):
        rows = slice(first, first + batch)
        seen, wanted = (torch.from_numpy(ids[rows])[None].to(device) for ids in (inputs, targets))  # [1, B, T]
        if model.domain_tokens:
            B = seen.shape[1]
            domains = torch.tensor(known, device=device).repeat_interleave(B)[None]  # [1, columns * B]
            hidden = model(seen.repeat(1, columns, 1), domains, dtype)
            found = model.log_probabilities(hidden, wanted.repeat(1, columns, 1)).view(columns, B, -1)
        else:
            found = model.log_probabilities(model(seen, dtype=dtype), wanted)  # [E, B, T]
        scored.append(found[:, torch.from_numpy(mask[rows]).to(device)].double().cpu().numpy())
        advance(scored[-1].shape[1])
    return np.concatenate(scored, axis=1)
