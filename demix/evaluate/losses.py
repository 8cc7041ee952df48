"""The mixtures of an evaluation, and one pass over a score table: the loss of each document under each of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from demix.config.evaluation import DECAY, MixingRecipe
from demix.config.mixing import Weights, parsed_weights
from demix.errors import DemixError
from demix.evaluate.intervals import stretch_tokens
from demix.evaluate.score_tables import (
    Blocks,
    ScoreTable,
    SideTable,
    footer_of,
    refuse_evidence,
    stream_scores,
)
from demix.files.batches import counted
from demix.mix.mixtures import FLOORS, floor, log_mixtures
from demix.mix.priors import RELEASED_DECAY, fitted_log_prior
from demix.mix.rules import Chunk, PriorAlone, State, WeightsRule, released_rule, weights_rule
from demix.run.systems import ExpertSet


@dataclass(frozen=True)
class PlannedMixture:
    """One way to mix the experts of a table (`demix.mix.mixtures.Mixture`); its prior may have to be computed on dev.

    `weights` is the rule's name in tables, possibly without parameters. The prior of `cached` is computed from
    `dev_blocks`. If the rule uses distances, `routing` and `context` name the clustering and the measured text.
    """

    method: str
    experts: tuple[str, ...]
    rule: WeightsRule
    weights: str = ""
    decay: float = DECAY
    dev_blocks: int = 100
    top_k: int | None = None
    routing: str = ""
    context: str = ""

    @property
    def by_text(self) -> bool:
        """Whether the text weights the experts."""
        return not isinstance(self.rule, PriorAlone)


@dataclass(frozen=True)
class Plan:
    """The mixtures of a set of experts, each with the variant of its row. `scored` is the number of scored dev blocks.

    `chosen` are the mixing rules whose parameters are chosen on dev.
    """

    evaluation: MixingRecipe
    some: ExpertSet
    scored: int
    chosen: Mapping[str, WeightsRule] = field(default_factory=dict)

    def mixtures(self) -> Iterator[tuple[PlannedMixture, str]]:
        """The mixtures of the tables, then those of the variants."""
        yield from self._of_tables()
        if len(self.evaluation.routing_context) + len(self.evaluation.temperatures) > 1:
            for mixture in self.routed_grid(*self.evaluation.routing_context):
                yield mixture, "routing"
        if self.some.variants:
            yield from self._varied()

    def _of_tables(self) -> Iterator[tuple[PlannedMixture, str]]:
        """The mixtures of the tables, and, for cluster rules, those of the published code."""
        for top_k in self._top_k:
            for method in self.some.methods:
                for weights, parsed in self._named.items():
                    if method in parsed.rules.evaluated:
                        mixture = self._mixture(method, weights, top_k=top_k)
                        yield mixture, ""
                        if parsed.family == "cluster":
                            yield replace(mixture, rule=released_rule(mixture.rule)), "released_scorer"
                # This is only the prior; with equal weights there are no likeliest experts.
                if method == "fitted" or (method == "average" and top_k is None):
                    yield self._mixture(method, top_k=top_k), ""
        if "average" in self.some.methods:
            for method in FLOORS:
                yield self._mixture(method), ""

    def _varied(self) -> Iterator[tuple[PlannedMixture, str]]:
        """The grids of decays and of numbers of dev blocks, and the scorer that was published with the paper."""
        given = self.evaluation
        for weights, parsed in self._named.items():
            if "cached" not in parsed.rules.evaluated or parsed.rules.routed:
                continue
            for decay in sorted({*given.decays, given.decay}):
                for method in ("updating", "cached"):
                    yield self._mixture(method, weights, decay=decay), "decay"
            for blocks in sorted({min(number, self.scored) for number in (*given.prior_blocks, given.dev_blocks)}):
                yield self._mixture("cached", weights, dev_blocks=blocks), "dev_blocks"
        rule = released_rule(weights_rule("released"))
        for method in ("updating", "cached"):
            yield self._mixture(method, "released", rule=rule, decay=RELEASED_DECAY), "released_scorer"

    def routed_grid(self, *contexts: str) -> list[PlannedMixture]:
        """The mixtures with all temperatures, all top-k and `contexts`.

        There are none for experts without clusters, and for sets that are mixed by only some methods.
        """
        given = self.evaluation
        found = [
            self._mixture(method, weights, temperature, context=context, top_k=top_k)
            for weights, parsed in self._named.items()
            if parsed.rules.routed and "average" in self.some.methods
            for method in parsed.rules.evaluated
            for context in contexts
            for temperature in sorted({*given.temperatures, given.temperature})
            for top_k in self._top_k
        ]
        return list(dict.fromkeys(found))

    @cached_property
    def _named(self) -> dict[str, Weights]:
        """The rules by name; cluster rules need a centre for each expert."""
        named = {weights: parsed_weights(weights) for weights in self.some.weights or self.evaluation.weights}
        return {weights: parsed for weights, parsed in named.items() if self.some.routing or not parsed.rules.routed}

    @property
    def _top_k(self) -> tuple[int | None, ...]:
        """No top-k, then the values that are smaller than the number of experts."""
        return (None, *(k for k in self.evaluation.top_k if k < len(self.some.experts)))

    def _mixture(self, method: str, weights: str = "", temperature: float | None = None, **more: Any) -> PlannedMixture:
        """The mixture by a method and a named rule; `temperature` is used if the rule has none."""
        given, rule, routed = self.evaluation, self.chosen.get(weights), dict[str, Any]()
        if weights and (parsed := parsed_weights(weights)).rules.routed:
            hot = given.temperature if temperature is None else temperature
            rule = weights_rule(replace(parsed, parameters=parsed.parameters or (hot,)))
            routed = {"routing": self.some.routing, "context": given.routing_context[0]}
        usual: dict[str, Any] = {"rule": rule or weights_rule(weights), "weights": weights, "decay": given.decay}
        usual |= {"dev_blocks": min(given.dev_blocks, self.scored)}
        return PlannedMixture(method, self.some.experts, **usual | routed | more)


@dataclass(frozen=True)
class DocumentLosses:
    """The losses of D documents: `nll` (negative log-likelihoods in nats) [D] by expert and by mixture.

    numbers [D] are the documents' numbers in the split, ascending; tokens [D] are their numbers of scored tokens;
    origins [D] are equal for chunks of one source document. `byte_count` is the number of bytes of the whole text, None
    without byte lengths. `sha256` is the hash of the token ids. posteriors [B, E] are the traced mixture's after each
    block. `folds` is the score table's. `stretches` are the losses [S] by expert and mixture in the text's stretches
    (`demix.evaluate.intervals`), `stretched` [S] their numbers of tokens.
    """

    numbers: np.ndarray
    tokens: np.ndarray
    origins: np.ndarray
    nll: dict[str | PlannedMixture, np.ndarray]
    byte_count: int | None
    sha256: str
    posteriors: np.ndarray | None
    stretched: np.ndarray
    stretches: dict[str | PlannedMixture, np.ndarray]
    folds: int


def dev_priors(dev: ScoreTable, mixtures: Iterable[PlannedMixture]) -> dict[PlannedMixture, np.ndarray]:
    """The log prior [E] of each `cached` or `fitted` one of `mixtures`, from a domain's dev split."""
    priors: dict[PlannedMixture, np.ndarray] = {}
    fitted: dict[tuple[str, ...], np.ndarray] = {}
    for mixture in mixtures:
        part = dev.select(mixture.experts)
        if mixture.method == "cached":
            decay, blocks = mixture.decay, mixture.dev_blocks
            priors[mixture] = mixture.rule.cached_log_prior(part.scores, part.mask, decay=decay, blocks=blocks)
        elif mixture.method == "fitted":
            if mixture.experts not in fitted:
                fitted[mixture.experts] = fitted_log_prior(part.scores, part.mask)
            priors[mixture] = fitted[mixture.experts]
    return priors


def document_losses(
    directory: Path,
    experts: Sequence[str],
    mixtures: Sequence[PlannedMixture] = (),
    priors: dict[PlannedMixture, np.ndarray] | None = None,
    byte_lengths: np.ndarray | None = None,
    traced: PlannedMixture | None = None,
    side: Mapping[str, SideTable] | None = None,
) -> DocumentLosses:
    """Sum the scores of `experts` in `directory`, and the log p of all their `mixtures`, for each document.

    `priors` holds the log prior of each `cached` or `fitted` mixture. A mixture with a method of `FLOORS` is the best
    expert in hindsight. `traced` is a mixture with the method `updating`; `byte_lengths` are the numbers of bytes of
    the tokenizer's ids; `side` has, by context, the distances to the experts' clusters, which some rules need. The
    table is streamed, so memory grows with the number of documents and mixtures, not with the number of tokens. Raises
    DemixError if a mixture would weight the experts of a masked model by the text.
    """
    mixer, footer = Mixer(experts, mixtures, priors, side, traced), footer_of(directory, experts)
    if by_text := next((mixture for mixture in mixer.mixtures if mixture.by_text), None):
        refuse_evidence(directory, footer.folds, f"{by_text.method} with weights {by_text.weights}")
    count, length = footer.rows, stretch_tokens(footer.rows)
    names: list[str | PlannedMixture] = [*experts, *mixer.mixtures]
    stretches = np.zeros((len(names), -(-count // length)))
    pieces, byte_count, read = [], 0, 0
    what, files = f"{directory.parent.name} on {directory.name}: tokens", [directory / "tokens.parquet"]
    stream = stream_scores(directory, experts, side=side)
    for chunk in counted(stream, what, files, lambda chunk: len(chunk.documents)):
        # The chunk's stretches; then the positions at which its documents and its stretches begin.
        within = slice(read // length, -(-(read + len(chunk.documents)) // length))
        cuts = [
            np.flatnonzero(np.diff(chunk.documents, prepend=chunk.documents[0] - 1)),
            np.maximum(np.arange(within.start, within.stop) * length - read, 0),
        ]
        read += len(chunk.documents)
        sums = [_between(chunk, log_p, cuts) for log_p in mixer.log_p(chunk)]
        by_document, by_stretch = (np.concatenate(some) for some in zip(*sums, strict=True))
        stretches[:, within] -= by_stretch
        numbers, begins, counts = np.unique(chunk.documents, return_index=True, return_counts=True)
        pieces.append((numbers, counts, chunk.origins[begins], by_document))
        if byte_lengths is not None:
            if chunk.tokens.max() >= len(byte_lengths):
                raise DemixError(directory, "has ids that the tokenizer lacks", "name the tokenizer.json of the run")
            byte_count += int(byte_lengths[chunk.tokens].sum())
    every, tokens, origins, totals = _joined(pieces)
    return DocumentLosses(
        every,
        tokens,
        origins,
        dict(zip(names, totals, strict=True)),
        byte_count if byte_lengths is not None else None,
        footer.tokens_sha256,
        np.concatenate(mixer.posteriors) if mixer.posteriors else None,
        np.minimum(length, count - np.arange(stretches.shape[1]) * length),
        dict(zip(names, stretches, strict=True)),
        footer.folds,
    )


def _joined(
    pieces: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Numbers, tokens and origins of all documents [D], and their losses [K, D], from those of each chunk's."""
    every = np.unique(np.concatenate([numbers for numbers, *_ in pieces]))
    tokens, totals = np.zeros(len(every), np.int64), np.zeros((len(pieces[0][-1]), len(every)))
    origins = np.zeros_like(tokens)
    for numbers, counts, belong, summed in pieces:
        # A document may continue in the next chunk, but occurs only once in a chunk.
        places = np.searchsorted(every, numbers)
        tokens[places] += counts
        origins[places] = belong
        totals[:, places] -= summed
    return every, tokens, origins, totals


class Mixer:
    """log p of the tokens of a text, chunk by chunk, under experts, mixtures and floors.

    `mixtures` are in the order of the rows; `posteriors` are the traced mixture's, by chunk.
    """

    def __init__(
        self,
        experts: Sequence[str],
        mixtures: Sequence[PlannedMixture] = (),
        priors: Mapping[PlannedMixture, np.ndarray] | None = None,
        side: Mapping[str, SideTable] | None = None,
        traced: PlannedMixture | None = None,
    ) -> None:
        self._experts, self._side, self._traced = experts, side or {}, traced
        self._groups: dict[_Group, dict[int | None, list[PlannedMixture]]] = {}
        # By experts and rule: the mixtures with updating priors, and their priors after the blocks so far.
        self._updating: dict[tuple[tuple[str, ...], WeightsRule], list[PlannedMixture]] = {}
        self._after: dict[tuple[tuple[str, ...], WeightsRule], np.ndarray] = {}
        self._states: dict[_Group, State] = {}
        self._fixed: dict[PlannedMixture, np.ndarray] = {}
        self._seen, floors = 0, []
        for one in dict.fromkeys(mixtures if traced is None else (*mixtures, traced)):
            if one.method in FLOORS:
                floors.append(one)
                continue
            if one.method == "updating":
                self._updating.setdefault((one.experts, one.rule), []).append(one)
            else:
                uniform = np.full(len(one.experts), -np.log(len(one.experts)))
                self._fixed[one] = priors[one] if priors and one.method in ("cached", "fitted") else uniform
            group = _Group(one.experts, one.rule, one.context, replace(one, top_k=None) if one.rule.by_prior else None)
            self._groups.setdefault(group, {}).setdefault(one.top_k, []).append(one)
        by_top_k = [alike for group in self._groups.values() for alike in group.values()]
        self.mixtures = [*chain(*by_top_k), *floors]
        self.posteriors: list[np.ndarray] = []

    def log_p(self, chunk: Blocks) -> Iterator[np.ndarray]:
        """log p [B, K, T] of the next chunk's tokens under the experts, then under `mixtures`, in several groups."""
        yield chunk.scores.transpose(0, 2, 1)
        parts = {some: _columns(chunk.scores, self._experts, some) for some in {one.experts for one in self.mixtures}}
        log_priors = self._log_priors(parts, chunk.mask)
        self._seen += len(chunk.mask)
        for group, by_top_k in self._groups.items():
            part, rule, far = parts[group.experts], group.rule, None
            if group not in self._states:
                first = next(iter(by_top_k.values()))[0]
                self._states[group] = rule.begin(log_priors[first][0])
            if group.context in self._side:
                known = self._side[group.context].columns
                far = _columns(chunk.side[group.context], known, group.experts)
            given = Chunk(part, chunk.mask, far, chunk.documents)
            evidence, self._states[group] = rule.evidence(given, self._states[group])
            for top_k, members in by_top_k.items():
                stacked = np.stack([log_priors[member] for member in members], axis=1)
                yield log_mixtures(part, stacked, evidence, rule.uniform_start, top_k)
        for one in self.mixtures:
            if one.method in FLOORS:
                yield floor(parts[one.experts], one.method)[:, None]
        if (traced := self._traced) is not None:
            found = traced.rule.posteriors(parts[traced.experts], chunk.mask, log_priors[traced])
            self.posteriors.append(found)

    def _log_priors(
        self, parts: dict[tuple[str, ...], np.ndarray], mask: np.ndarray
    ) -> dict[PlannedMixture, np.ndarray]:
        """log priors [B, E] at the start of the next blocks, computed together for all decays of a rule."""
        found = {one: np.broadcast_to(prior, (len(mask), len(prior))) for one, prior in self._fixed.items()}
        for key, members in self._updating.items():
            some, rule = key
            decays = sorted({member.decay for member in members})
            path = rule.log_priors(parts[some], mask, np.array(decays), (self._after.get(key), self._seen))
            self._after[key] = path[-1]
            for member in members:
                found[member] = path[:-1, decays.index(member.decay)] if path.ndim > 2 else path[:-1]
        return found


@dataclass(frozen=True)
class _Group:
    """Mixtures that share their evidence: same experts, context and rule, and same prior if evidence depends on it."""

    experts: tuple[str, ...]
    rule: WeightsRule
    context: str
    prior: PlannedMixture | None


def _columns(values: np.ndarray, experts: Sequence[str], some: tuple[str, ...]) -> np.ndarray:
    """The values [B, T, E] of `some` of the experts."""
    by_expert = values.transpose(0, 2, 1)
    return by_expert[:, [experts.index(name) for name in some]].transpose(0, 2, 1)


def _between(chunk: Blocks, by_token: np.ndarray, cuts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Sums [K, C] of values [B, K, T] over the tokens of a chunk from each of C `cuts` to the next, by list of cuts."""
    rows = by_token.transpose(1, 0, 2).reshape(by_token.shape[1], -1)[:, : len(chunk.documents)]
    return [np.add.reduceat(rows, starts, axis=1) for starts in cuts]
