"""Log-probabilities of whole texts under every expert, for training and evaluation."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from demix.config.architecture import FOLDS
from demix.errors import DemixError
from demix.files import seed_for
from demix.model.device import free_memory
from demix.model.gpt import GPT, MASKED
from demix.model.heads import ROWS_AT_ONCE

# Tokens x experts in one forward pass: enough to keep a core busy, and few enough to stay in its cache.
EXPERT_TOKENS_AT_ONCE = 8192
# The maximum on a GPU. More is not faster, and with a maximum, GPUs with different amounts of memory yield the same
# bits.
MAX_ON_GPU = 1 << 17
# The fraction of a GPU's free memory that a pass may use: torch rounds sizes up, and other processes need memory, too.
SHARE_OF_FREE = 0.5
# The number of states (of the model's width) per token and expert in a layer: those before and after it, their norm,
# and the output of the feedforward.
WIDTHS_IN_BLOCK = 3 + 1


def columns_of(trunks: Sequence[GPT]) -> tuple[str, ...]:
    """The names of the rows of `trunk_log_probabilities`: the experts, trunk by trunk, or the domain tokens."""
    return tuple(name for trunk in trunks for name in trunk.domain_tokens or trunk.experts)


def expert_tokens_at_once(model: GPT, dtype: torch.dtype | None = None, free: int | None = None) -> int:
    """Tokens x experts in one forward pass of `model` with activations of `dtype`: a power of two.

    On a CPU it is what fits into its cache; on a GPU what fits, next to the logits, into `free` bytes (default: the
    memory that is free now). A power of two stays the same if the free memory differs a little.
    """
    device = model.token_embedding.device
    if device.type == "cpu" and free is None:
        return EXPERT_TOKENS_AT_ONCE
    computed = dtype or model.token_embedding.dtype
    exact = torch.promote_types(computed, torch.float32)
    logits = ROWS_AT_ONCE["cuda"] * model.vocab_size * (exact.itemsize + computed.itemsize * (computed != exact))
    # In a token-routed layer, each choice has inner states.
    routed = model.architecture.routed
    sizes = model.architecture
    feedforward = (sizes.maps - 1) * sizes.inner_width
    # Queries, keys and values count twice, because a GPU's attention copies them; so does attention's output.
    heads = 4 * sizes.heads + 4 * sizes.key_value_heads
    numbers = WIDTHS_IN_BLOCK * sizes.width + heads * sizes.unit + feedforward
    numbers += sizes.width * (sizes.bigrams != "none")
    numbers += sizes.layers * sizes.key_value_heads * sizes.unit * sizes.value_embeddings
    numbers += (2 * sizes.width + feedforward) * routed.top_k if routed else 0
    # Embeddings have the type of the parameters.
    each = numbers * computed.itemsize + sizes.width * model.token_embedding.dtype.itemsize
    room = SHARE_OF_FREE * (free_memory(device) if free is None else free) - logits
    return min(MAX_ON_GPU, 1 << max(0, int(room // each).bit_length() - 1)) if room >= each else 1


def trunk_log_probabilities(
    trunks: Sequence[GPT],
    inputs: np.ndarray,
    targets: np.ndarray,
    mask: np.ndarray,
    dtype: torch.dtype | None = None,
    advance: Callable[[int], None] = lambda tokens: None,
    domain_tokens: tuple[str, ...] | None = None,
    first: int = 0,
) -> np.ndarray:
    """`log_probabilities` under all experts of a model: [E, tokens] in the order of `columns_of` or `domain_tokens`.

    `trunks` are the model's GPTs, each with some of the experts (`demix.model.directory.load_experts`).

    `advance` is called with the number of tokens that were scored since its last call. Raises DemixError for an expert
    whose log-probabilities are not all finite.
    """
    each = (log_probabilities(trunk, inputs, targets, mask, dtype, advance, domain_tokens, first) for trunk in trunks)
    scores = np.concatenate([*each])
    refuse_not_finite(domain_tokens or columns_of(trunks), scores)
    return scores


def refuse_not_finite(names: Sequence[str], scores: np.ndarray) -> None:
    """Raise DemixError for an expert whose log-probabilities, a row of `scores` [E, tokens], are not all finite."""
    for name, row in zip(names, scores, strict=True):
        if not np.isfinite(row).all():
            cause = "gives tokens no finite log-probability"
            raise DemixError(f"expert {name}", cause, "train it again, or leave it out")


@torch.no_grad()
def log_probabilities(
    model: GPT,
    inputs: np.ndarray,
    targets: np.ndarray,
    mask: np.ndarray,
    dtype: torch.dtype | None = None,
    advance: Callable[[int], None] = lambda tokens: None,
    domain_tokens: tuple[str, ...] | None = None,
    first: int = 0,
) -> np.ndarray:
    """log p in nats of every target under every expert, in the order of the text: [E, tokens], without padding.

    `inputs`, `targets` and `mask` [N, T] come from `demix.data.shards.blocks`. A domain-token model has one row for
    each of `domain_tokens` (default: all). `advance` is called with the number of tokens that were scored since its
    last call. `first` is the number of the first block in its split, which determines the tokens that a masked model
    predicts together (`masked_log_probabilities`).
    """
    if model.architecture.objective == "mlm":
        return masked_log_probabilities(model, targets, mask, dtype, advance, first)
    device = model.token_embedding.device
    chosen = (domain_tokens or model.domain_tokens) if model.domain_tokens else ()
    known = [model.domain_tokens.index(name) for name in chosen]
    columns = len(known or model.experts)
    batch = max(1, expert_tokens_at_once(model, dtype) // (columns * inputs.shape[1]))
    scored = []
    for start in range(0, len(inputs), batch):
        rows = slice(start, start + batch)
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


def folds_of(tokens: int, number: int, folds: int = FOLDS) -> np.ndarray:
    """The fold of each token of a block with this `number` in its split: [tokens] int, of sizes that differ by 1.

    The folds come from a random permutation that depends only on the number, so that all models predict the same tokens
    together.
    """
    order = np.random.Generator(np.random.PCG64(seed_for(0, "folds", number))).permutation(tokens)
    found = np.empty(tokens, np.int64)
    found[order] = np.arange(tokens) % folds
    return found


@torch.no_grad()
def masked_log_probabilities(
    model: GPT,
    tokens: np.ndarray,
    mask: np.ndarray,
    dtype: torch.dtype | None = None,
    advance: Callable[[int], None] = lambda tokens: None,
    first: int = 0,
    folds: int = FOLDS,
) -> np.ndarray:
    """log p in nats of every token at its own position, given the rest of its block: [E, tokens], without padding.

    `tokens` and `mask` [N, T] are blocks without the tokens before them. Each block is read `folds` times, and each of
    its tokens is masked once, together with the others of its fold (`folds_of`). T folds mask one token at a time,
    which is pseudo-perplexity (Salazar et al. 2020). Padding is cut off, so that no position attends to it.
    """
    device, columns = model.token_embedding.device, len(model.experts)
    scores = np.zeros((columns, *tokens.shape))
    lengths = mask.sum(1)
    for length in dict.fromkeys(lengths.tolist()):
        # Each row is a block and a fold of it that has tokens.
        blocks = np.flatnonzero(lengths == length)
        by_block = np.stack([folds_of(length, first + number, folds) for number in blocks.tolist()])
        rows = [(row, fold) for row in range(len(blocks)) for fold in range(min(folds, length))]
        batch = max(1, expert_tokens_at_once(model, dtype) // (columns * length))
        for start in range(0, len(rows), batch):
            some, fold = np.array(rows[start : start + batch]).T
            ids, hidden = tokens[blocks[some], :length], by_block[some] == fold[:, None]
            inputs = torch.from_numpy(np.where(hidden, MASKED, ids))[None].to(device)
            wanted, chosen = (torch.from_numpy(each).to(device) for each in (ids[hidden], hidden))
            states = model(inputs, dtype=dtype)[:, chosen]  # [E, tokens of these folds, D]
            found = model.log_probabilities(states[:, None], wanted[None, None])[:, 0]
            row, place = np.nonzero(hidden)
            scores[:, blocks[some][row], place] = found.double().cpu().numpy()
            advance(len(row))
    return scores[:, mask]
