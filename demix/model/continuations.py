"""Log-probabilities of whole texts, and of continuations of contexts, under a mixture of experts.

The experts' weights are updated from the first token of each text, in context and continuation, as in
`demix.model.decode`. Texts of different lengths are scored together, and a context that several continuations share is
scored once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from demix.data.cluster import Contexts
from demix.data.shards import cut
from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError, nearest
from demix.mix.mixtures import Distances, Mixture, Stream
from demix.mix.rules import weights_rule
from demix.model.clusters import clusters_of
from demix.model.decode import Decoder, log_prior_of, named_prior, weights_of
from demix.model.gpt import GPT
from demix.model.heads import ROWS_AT_ONCE
from demix.model.scoring import EXPERT_TOKENS_AT_ONCE, columns_of, refuse_not_finite, trunk_log_probabilities

# The maximum number of scores of whole texts in memory at once, 8 bytes each.
MAX_SCORES = 1 << 24
# The maximum size of keys and values of shared contexts, of which each continuation has a copy.
MAX_CACHED_BYTES = 1 << 30


@dataclass(frozen=True)
class MixedModel:
    """A mixture of the E experts of a model, as in `demix.model.decode.Decoder`, for any number of texts.

    `contexts` are the texts whose distances to the experts' clusters the rule uses.
    """

    trunks: Sequence[GPT]
    mixture: Mixture
    contexts: Contexts | None = None

    @property
    def experts(self) -> tuple[str, ...]:
        """The names of the experts."""
        return columns_of(self.trunks)

    @property
    def context(self) -> int:
        """The number of tokens of a block, T."""
        return self.trunks[0].architecture.context

    def begin(self, before: np.ndarray) -> Stream:
        """The weights on B new texts, given the tokens `before` [B]."""
        if (contexts := self.contexts) is None:
            return Stream(self.mixture, self.context, before)
        # Experts without a cluster have prior 0, so their distances have no effect.
        columns = [contexts.names.index(name) if name in contexts.names else 0 for name in self.experts]

        def of_a_text() -> Distances:
            own = contexts.restarted()
            return lambda tokens: own.distances(tokens)[:, columns].astype(np.float64)

        return Stream(self.mixture, self.context, before, [of_a_text() for _ in before])

    def decoder(self, before: Tensor) -> Decoder:
        """The decoder of B texts that begin after the tokens `before` [B]."""
        return Decoder(self.trunks, before, self.begin(before.cpu().numpy()))

    def after(self, tokenizer: Tokenizer, text: str) -> Decoder:
        """The decoder of one text that begins with `text`, which follows `end_of_text`."""
        decoder = self.decoder(torch.tensor([tokenizer.end_of_text]))
        decoder.read(torch.from_numpy(tokenizer.encode(text).astype(np.int64))[None])
        return decoder

    def mixed(self, scores: Tensor, tokens: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """log p [B, N] of `tokens` [B, N] under the mixture (paper, Eq. 4), and its weights log g [B, N, E].

        `scores` [E, B, N] are the experts' log p, float64; `before` [B] are the tokens before the texts.
        """
        log_g = torch.from_numpy(self.begin(before.cpu().numpy()).observe(scores.numpy(), tokens.cpu().numpy()))
        return (log_g + scores.permute(1, 2, 0)).logsumexp(-1), log_g


def mixture_of(
    directory: Path,
    trunks: Sequence[GPT],
    tokenizer: Tokenizer,
    weights: str = "tempered",
    prior: str = "",
    experts: Sequence[str] | None = None,
    top_k: int | None = None,
) -> MixedModel:
    """The mixture of the experts of `trunks`, of the model in `directory`; `top_k` keeps the likeliest at each token.

    `weights` and `prior` are names as in `weights_of` and `named_prior`. Only `experts` are mixed (default: all); the
    others have prior 0. Raises DemixError for an unknown expert, rule or prior, and, for a cluster rule, if an expert
    with a positive prior has no cluster.
    """
    names = columns_of(trunks)
    rule = weights_of(weights, directory)
    log_prior, decay = named_prior(prior, directory, names, rule)
    if experts is not None:
        if unknown := [name for name in experts if name not in names]:
            cure = nearest(unknown[0], names, "name experts of the model")
            raise DemixError("experts", f"{unknown[0]!r:.40} is not an expert of this model", cure)
        known = dict(zip(names, np.exp(log_prior).tolist(), strict=True))
        log_prior = log_prior_of(names, {name: known[name] for name in experts})
    contexts = None
    if rule.rules.routed:
        contexts = clusters_of(directory).contexts(tokenizer, trunks[0].architecture.context)
        for name, weight in zip(names, log_prior, strict=True):
            if weight > -np.inf and name not in contexts.names:
                cause = f"need one cluster per expert, but {name} has none"
                raise DemixError(f"--weights {rule.family}", cause, "use another rule or other experts")
    return MixedModel(trunks, Mixture(weights_rule(rule), log_prior, decay, top_k), contexts)


@dataclass(frozen=True)
class Continuation:
    """The `tokens` that follow `context`, whose first token is the one before the text."""

    context: tuple[int, ...]
    tokens: tuple[int, ...]


def within(context: Sequence[int], tokens: Sequence[int], length: int) -> Continuation:
    """The continuation `tokens` with the part of `context` that fits into a model of `length` positions.

    A context that is too long loses its first tokens. Raises DemixError for more tokens than positions.
    """
    if len(tokens) > length:
        cause = f"has {len(tokens)} tokens, more than the model's context of {length}"
        raise DemixError("continuation", cause, "omit the task, or use a model with a longer context")
    return Continuation(tuple(context[-(length + 1 - len(tokens)) :]), tuple(tokens))


def text_scores(
    mixture: MixedModel,
    texts: Sequence[Sequence[int]],
    end_of_text: int,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Score the tokens of each non-empty text after `end_of_text`, beginning with the shortest texts.

    A text is cut into consecutive blocks as in scoring (docs/explanation/demix-layers.md), and the posterior continues
    from block to block. Yields the number of the text, log p [E, N] in nats of its tokens under the experts, log p [N]
    under the mixture, and the mixture's weights log g [N, E], all float64. `advance` is called, once per trunk, with
    the number of tokens that were scored since its last call.
    """
    lengths = [len(text) for text in texts]
    order = sorted(np.flatnonzero(lengths).tolist(), key=lengths.__getitem__)
    before = torch.tensor([end_of_text])
    most = max(1, MAX_SCORES // len(mixture.experts))
    # At most half of the tokens that are scored together are padding.
    alike = groupby(order, lambda number: min(mixture.context, lengths[number]).bit_length())
    for numbers in (part for _, same in alike for part in _parts([*same], lengths, most)):
        width = min(mixture.context, lengths[numbers[-1]])
        in_blocks = [cut(texts[number], width, end_of_text, end_of_text) for number in numbers]
        inputs, targets, mask = (np.concatenate(parts) for parts in zip(*in_blocks, strict=True))
        scored = torch.from_numpy(trunk_log_probabilities(mixture.trunks, inputs, targets, mask, advance=advance))
        by_text = torch.split(scored, [lengths[number] for number in numbers], 1)
        for number, scores in zip(numbers, by_text, strict=True):
            log_p, log_g = mixture.mixed(scores[:, None], torch.tensor([texts[number]]), before)
            yield number, scores, log_p[0], log_g[0]


def continuation_scores(
    model: GPT, wanted: Sequence[Continuation], dtype: torch.dtype | None = None
) -> list[np.ndarray]:
    """log p in nats of the tokens of a context after its first [E, N], and of each of its continuations [E, n].

    The values are under every expert of `model`, float64. `wanted` have the same context, which is computed once.
    """
    scores, before = _Batch.made(wanted).passed(model, dtype)[0].numpy(), len(wanted[0].context) - 1
    return [scores[:, 0, :before], *(scores[:, at, before:][:, : len(one.tokens)] for at, one in enumerate(wanted))]


def continuation_log_probabilities(
    mixture: MixedModel,
    wanted: Sequence[Continuation],
    batch: int | None = None,
    advance: Callable[[float], None] = lambda number: None,
) -> list[tuple[float, bool]]:
    """log p in nats of each continuation given its context, and whether each of its tokens is the likeliest one.

    `wanted` come from `within`. `batch` is the number of continuations per forward pass; by default it follows from
    `EXPERT_TOKENS_AT_ONCE`. `advance` is called with the number of continuations that were scored since its last call.
    Raises DemixError if an expert has log-probabilities that are not finite.
    """
    found = {one: (0.0, True) for one in wanted if not one.tokens}
    order = sorted({*wanted} - found.keys(), key=lambda one: (-len(one.context), one.context, one.tokens))
    for one in _batches(order, mixture, batch):
        passed = [one.passed(trunk) for trunk in mixture.trunks]
        scores = torch.cat([scores for scores, _ in passed])
        refuse_not_finite(mixture.experts, scores.flatten(1).numpy())
        log_p, log_g = mixture.mixed(scores, one.targets, one.inputs[:, 0])
        totals = log_p.masked_fill(~one.asked, 0).sum(1).tolist()
        likeliest = _likeliest(mixture.trunks, passed, log_g[one.asked])
        same = torch.split(likeliest == one.targets[one.asked], [len(each.tokens) for each in one.wanted])
        found |= zip(one.wanted, zip(totals, (bool(each.all()) for each in same), strict=True), strict=True)
        advance(len(one.wanted))
    return [found[one] for one in wanted]


@dataclass(frozen=True)
class _Batch:
    """R continuations of B contexts, padded to N tokens. `of` [R] are the numbers of their contexts.

    `inputs` [R, N] are the tokens from the one before the text on, `targets` [R, N] the tokens after each. `asked`
    [R, N] marks targets in continuations. The first `shared` inputs, which are in all contexts, are read only once for
    all continuations of a context.
    """

    wanted: Sequence[Continuation]
    of: Tensor
    inputs: Tensor
    targets: Tensor
    asked: Tensor
    shared: int

    @staticmethod
    def made(wanted: Sequence[Continuation]) -> "_Batch":
        """The batch of `wanted`, of which those with the same context follow one another."""
        contexts = list(dict.fromkeys(one.context for one in wanted))
        places = {context: number for number, context in enumerate(contexts)}
        shape = len(wanted), max(len(one.context) + len(one.tokens) for one in wanted)
        ids, asked = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
        for number, one in enumerate(wanted):
            text = one.context + one.tokens
            ids[number, : len(text)] = torch.tensor(text)
            asked[number, len(one.context) : len(text)] = True
        of = torch.tensor([places[one.context] for one in wanted])
        shared = min(map(len, contexts)) - 1 if len(contexts) < len(wanted) else 0
        return _Batch(wanted, of, ids[:, :-1], ids[:, 1:], asked[:, 1:], shared)

    @torch.no_grad()
    def passed(self, model: GPT, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """log p [E, R, N] of the targets, float64, and the states [E, tokens, D] that predict the marked targets."""
        device, s = model.token_embedding.device, self.shared
        inputs, targets, of = self.inputs.to(device), self.targets.to(device), self.of.to(device)
        past, scores = None, []
        if s:
            past = model.no_past(inputs.shape[1])
            # The first continuation of each context.
            rows = torch.searchsorted(of, torch.arange(int(self.of[-1]) + 1, device=device))
            hidden = model(inputs[None, rows, :s], dtype=dtype, past=past)
            scores.append(model.log_probabilities(hidden, targets[None, rows, :s])[:, of])
            past = [layer.of(of, len(rows)) for layer in past]
        hidden = model(inputs[None, :, s:], dtype=dtype, past=past)
        scores.append(model.log_probabilities(hidden, targets[None, :, s:]))
        return torch.cat(scores, 2).double().cpu(), hidden[:, self.asked[:, s:].to(device)]


@torch.no_grad()
def _likeliest(trunks: Sequence[GPT], passed: Sequence[tuple[Tensor, Tensor]], log_g: Tensor) -> Tensor:
    """The likeliest token under the mixture at each marked target [tokens].

    `passed` has `_Batch.passed` by trunk, and `log_g` [tokens, E] are the weights there.
    """
    of_trunks = torch.split(log_g, [len(trunk.experts) for trunk in trunks], 1)
    rows = max(1, ROWS_AT_ONCE[passed[0][1].device.type] // len(passed[0][1]))
    found = []
    for first in range(0, len(log_g), rows):
        place = slice(first, first + rows)
        parts = (
            _mixed_next(trunk, hidden[:, place], weights[place])
            for trunk, (_, hidden), weights in zip(trunks, passed, of_trunks, strict=True)
        )
        found.append(reduce(torch.logaddexp, parts).argmax(-1).cpu())
    return torch.cat(found)


def _mixed_next(model: GPT, hidden: Tensor, log_g: Tensor) -> Tensor:
    """log Σ g·p [tokens, V] over the experts of `model`, for states [E, tokens, D] and log g [tokens, E]."""
    logits = model.logits(hidden)
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return (log_p + log_g.T[..., None].to(log_p)).logsumexp(0)


def _batches(order: Sequence[Continuation], mixture: MixedModel, batch: int | None) -> Iterator[_Batch]:
    """`order` in batches of `batch` continuations, or of `EXPERT_TOKENS_AT_ONCE`. Contexts come in order of length."""
    experts, sizes = len(mixture.experts), mixture.trunks[0].architecture
    cached = MAX_CACHED_BYTES // (8 * experts * sizes.layers * sizes.key_value_heads * sizes.unit)
    chosen: list[Continuation] = []
    contexts = longest = 0
    for one in order:
        new = not chosen or chosen[-1].context != one.context
        inputs, shared = len(one.context) + len(one.tokens) - 1, len(one.context) - 1
        length = max(longest, inputs)
        tokens = (contexts + new) * shared + (len(chosen) + 1) * (length - shared)
        full = tokens * experts > EXPERT_TOKENS_AT_ONCE or (len(chosen) + 1) * length > cached
        if chosen and (len(chosen) >= batch if batch else full):
            yield _Batch.made(chosen)
            chosen, contexts, new, length = [], 0, True, inputs
        chosen.append(one)
        contexts, longest = contexts + new, length
    if chosen:
        yield _Batch.made(chosen)


def _parts(texts: Sequence[int], lengths: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    """The numbers of `texts`, of which the last is the longest, in parts of at most `most` tokens, or of one text."""
    count = max(1, most // lengths[texts[-1]])
    yield from (texts[first : first + count] for first in range(0, len(texts), count))
