"""Mixing rules: the evidence of the text so far about each expert, without the prior (docs/explanation/mixing.md).

A rule computes the log evidence L [B, T, E] in nats. The weights that predict token t are g[t, j] ∝ π[j]·exp(L[t, j]),
with the prior π of the block (paper, Eq. 5-6). A new rule needs a class and an entry of CLASSES here, and an entry of
`demix.config.mixing.FAMILIES`. The rules of the paper use only the current block. `Tempered` and `Switching` use the
stream: all tokens before t, across blocks and documents.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.linalg import solve_banded
from scipy.special import softmax

from demix.config.mixing import Weights, parsed_weights
from demix.errors import DemixError
from demix.mix.priors import Decay, First, released_log_priors, updating_log_priors

# A rule's state after the text before a chunk. Rules whose evidence starts again in each block have none.
State = tuple[np.ndarray, ...]
# The number of sections of a chunk that `Switching` scans in parallel; about 128 are fastest for 10M tokens.
_STRETCHES = 128
_SMALLEST = float(np.finfo(np.float64).tiny)
# Below this number, the 8th power, and so a product of 8 probabilities, may underflow.
_RARE = 1e-33
# Below this weight, the product with a rare probability may underflow.
_SMALL = 1e-230


@dataclass(frozen=True)
class Chunk:
    """Consecutive blocks of a text, the input of a rule: B blocks, T positions, E experts.

    `scores` [B, T, E] are float64 log p(token) in nats, 0 at padding. `mask` [B, T] is False at the padding of the last
    block. `distances` [B, T, E] are the squared distances of the text before each token to the experts' clusters, which
    only cluster rules use. `documents` [N] are the document numbers of the N tokens that are not padding; None means
    one document.
    """

    scores: np.ndarray
    mask: np.ndarray
    distances: np.ndarray | None = None
    documents: np.ndarray | None = None


class WeightsRule(ABC):
    """The evidence of the text so far for each expert. Rules are frozen and hashable, so equal rules share evidence.

    With `uniform_start`, the first token of a block gets equal weights for any prior. With `by_prior`, the evidence
    depends on the prior, so mixtures with different priors do not share their evidence. `scorer` is `released` for the
    rules of published code.
    """

    uniform_start: ClassVar[bool] = False
    by_prior: ClassVar[bool] = False
    scorer: ClassVar[str] = "paper"

    def begin(self, log_prior: np.ndarray) -> State:
        """The state before the first block of a text, for a text with the log prior `log_prior` [E]."""
        return ()

    @abstractmethod
    def evidence(self, chunk: Chunk, state: State) -> tuple[np.ndarray, State]:
        """L [B, T, E] before each token of a chunk, and the state after the chunk. `state` is the state before it."""

    def block_evidence(self, scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Evidence [B, E] of each block by itself, after its last token. It turns the block's prior into a posterior.

        A rule that uses earlier blocks raises DemixError: an updating or cached prior would count their evidence twice.
        """
        raise DemixError(f"mixing rule {self}", "uses earlier blocks, like this prior", "use prior uniform or fitted")

    def posteriors(self, scores: np.ndarray, mask: np.ndarray, log_priors: np.ndarray) -> np.ndarray:
        """The posterior [B, E] after a whole block; before each token it is `log_weights` of `demix.mix.mixtures`."""
        posteriors: np.ndarray = softmax(log_priors + self.block_evidence(scores, mask), axis=-1)
        return posteriors

    def log_priors(self, scores: np.ndarray, mask: np.ndarray, decay: Decay, first: First = (None, 0)) -> np.ndarray:
        """The updating log prior [B + 1, E] at the start of each block and after the last one (paper, Eq. 7).

        `decay` and `first` are as in `updating_log_priors`.
        """
        return updating_log_priors(self.block_evidence(scores, mask), decay, first)

    def blocks_read(self, dev_blocks: int) -> int:
        """The number of blocks from which the cached prior of `dev_blocks` is computed."""
        return dev_blocks

    def cached_log_prior(self, scores: np.ndarray, mask: np.ndarray, *, decay: float, blocks: int) -> np.ndarray:
        """The cached log prior [E]: the updating prior after the first `blocks` blocks of a domain's dev split."""
        read = self.blocks_read(blocks)
        log_prior: np.ndarray = self.log_priors(scores[:read], mask[:read], decay)[-1]
        return log_prior


@dataclass(frozen=True)
class PriorAlone(WeightsRule):
    """No evidence: the weights of every token are the prior."""

    def evidence(self, chunk: Chunk, state: State) -> tuple[np.ndarray, State]:
        """Zeros."""
        return np.zeros_like(chunk.scores), state

    def block_evidence(self, scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Zeros."""
        return np.zeros((scores.shape[0], scores.shape[2]))


@dataclass(frozen=True)
class History(WeightsRule):
    """The evidence is the sum of the scores of the block so far (paper, Eq. 5-6)."""

    def evidence(self, chunk: Chunk, state: State) -> tuple[np.ndarray, State]:
        """See `WeightsRule.evidence`."""
        return _before(np.cumsum(chunk.scores, axis=1)), state

    def block_evidence(self, scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """See `WeightsRule.block_evidence`."""
        evidence: np.ndarray = scores.sum(axis=1)
        return evidence


@dataclass(frozen=True)
class Released(WeightsRule):
    """The rule of the paper's published code: only the last token, and equal weights at the start of a block."""

    uniform_start: ClassVar[bool] = True

    def evidence(self, chunk: Chunk, state: State) -> tuple[np.ndarray, State]:
        """See `WeightsRule.evidence`."""
        return _before(chunk.scores), state

    def block_evidence(self, scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """See `WeightsRule.block_evidence`."""
        evidence: np.ndarray = scores[np.arange(len(scores)), mask.sum(axis=1) - 1]
        return evidence


@dataclass(frozen=True)
class ReleasedScorer(Released):
    """The whole scorer of the published code: the weights of `Released`, with the code's own priors and decay."""

    scorer: ClassVar[str] = "released"

    def log_priors(self, scores: np.ndarray, mask: np.ndarray, decay: Decay, first: First = (None, 0)) -> np.ndarray:
        """See `released_log_priors`; `decay` is ignored, because the published code has its own."""
        return released_log_priors(scores, mask, first)

    def blocks_read(self, dev_blocks: int) -> int:
        """See `WeightsRule.blocks_read`: the published code reads one more pair of blocks than it says."""
        return 2 * (dev_blocks + 1)


@dataclass(frozen=True)
class Tempered(WeightsRule):
    """The evidence is β times the weighted sum of the scores of all earlier tokens.

    A token u tokens back has the weight γ^(u-1). With β = 1 and γ = 0 only the last token counts; with β = γ = 1 all
    text so far counts fully. The scan is S ← γ·S + ℓ[t].
    """

    beta: float
    gamma: float

    def begin(self, log_prior: np.ndarray) -> State:
        """See `WeightsRule.begin`."""
        return (np.zeros_like(log_prior),)

    def evidence(self, chunk: Chunk, state: State) -> tuple[np.ndarray, State]:
        """See `WeightsRule.evidence`."""
        (before,) = state
        given = _rows(chunk).copy()
        given[:, 0] += self.gamma * before
        # S[t] - γ·S[t-1] = ℓ[t]: two diagonals.
        diagonals = np.stack([np.ones(given.shape[1]), np.full(given.shape[1], -self.gamma)])
        sums = solve_banded((1, 0), diagonals, given.T).T
        found = np.concatenate([before[:, None], sums[:, :-1]], axis=1)
        return _chunked(self.beta * found, chunk), (sums[:, -1],)


@dataclass(frozen=True)
class Switching(WeightsRule):
    """The weights are the posterior of a hidden chain of experts ("fixed share", Herbster and Warmuth 1998).

    At each token the chain keeps its expert with probability 1 - α, and otherwise draws one from the prior π: g[1] = π,
    and g[t+1, j] = (1 - α)·g[t, j]·exp ℓ[t, j] / Σ_i g[t, i]·exp ℓ[t, i] + α·π[j]. With α = 1 the weights are the
    prior; with α = 0 the evidence is the sum of all scores so far.
    """

    by_prior: ClassVar[bool] = True
    alpha: float

    def begin(self, log_prior: np.ndarray) -> State:
        """See `WeightsRule.begin`."""
        return log_prior, log_prior

    def evidence(self, chunk: Chunk, state: State) -> tuple[np.ndarray, State]:
        """See `WeightsRule.evidence`.

        The scan is sequential, but sections of the chunk are scanned in parallel. A first pass computes for each
        section the matrix [E, E] that maps the weights before it to those after it. A second pass starts every section
        from its own weights.
        """
        log_prior, log_g = state
        rows = _rows(chunk)
        # The minimum over tokens of max_i π[i]·p_i / max_i p_i. If it is too small, products in matrices would
        # underflow.
        lowest = ((rows + log_prior[:, None]).max(axis=0) - rows.max(axis=0)).min()
        least = log_prior[log_prior > -np.inf].min()
        if self.alpha * np.exp(lowest) < _RARE or self.alpha * np.exp(least) < _SMALL:
            found, after = self._by_logarithms(rows.T, log_prior, log_g)
            return _chunked(found.T, chunk), (log_prior, after)
        experts, tokens = rows.shape
        length = -(-tokens // _STRETCHES)
        stretches = -(-tokens // length)
        likelihood = np.ones((experts, stretches * length))
        np.exp(rows - rows.max(axis=0), out=likelihood[:, :tokens])
        # [L, E, C]: section c has the tokens from c·L to (c + 1)·L.
        steps = np.ascontiguousarray(likelihood.reshape(experts, stretches, length).transpose(2, 0, 1))
        prior = np.exp(log_prior)
        g = np.empty((experts, stretches))
        g[:, 0] = np.exp(log_g)
        for number, (matrix, logs) in enumerate(self._transfers(steps[..., :-1], prior)):
            ended = (g[:, number] * np.exp(logs - logs.max())) @ matrix
            g[:, number + 1] = ended / ended.sum()
        drawn = self.alpha * prior[:, None]
        weights = np.empty_like(steps)
        for before, step in zip(weights, steps, strict=True):
            before[:] = g
            joint = g * step
            g = joint * ((1 - self.alpha) / joint.sum(axis=0)) + drawn
        by_token = weights.transpose(1, 2, 0).reshape(experts, -1)[:, :tokens]
        joint = by_token[:, -1] * likelihood[:, tokens - 1]
        with np.errstate(divide="ignore"):
            after = np.log((1 - self.alpha) * joint / joint.sum() + self.alpha * prior)
            found = np.log(by_token, out=np.zeros_like(by_token), where=prior[:, None] > 0)
        found[prior > 0] -= log_prior[prior > 0, None]
        return _chunked(found, chunk), (log_prior, after)

    def _by_logarithms(
        self, rows: np.ndarray, log_prior: np.ndarray, log_g: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """log g - log π [N, ..., E] of N tokens and log g after them, one token after the other.

        No weight underflows. The axes between are texts that are scanned in parallel.
        """
        found = np.zeros_like(rows)
        with np.errstate(divide="ignore"):
            kept, drawn = np.log1p(-self.alpha), np.log(self.alpha) + log_prior
        for number, scores in enumerate(rows):
            np.subtract(log_g, log_prior, out=found[number], where=log_prior > -np.inf)
            joint = log_g + scores
            log_g = np.logaddexp(kept + joint - np.logaddexp.reduce(joint, axis=-1, keepdims=True), drawn)
        return found, log_g

    def _transfers(self, steps: np.ndarray, prior: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For each of C sections, whose likelihoods are `steps` [L, E, C]: a matrix [E, E], and logarithms [E].

        Row j of the matrix has, up to a factor, the weights after the section for a chain that began with only expert
        j. The logarithm contains this factor: together they give the probability of the section under this chain.
        """
        _, experts, stretches = steps.shape
        followed = np.repeat(np.eye(experts)[..., None], stretches, axis=2)
        logs = np.zeros((experts, stretches))
        drawn = self.alpha * prior[:, None]
        for number, step in enumerate(steps):
            followed *= step
            total = followed.sum(axis=1, keepdims=True)
            followed *= 1 - self.alpha
            followed += total * drawn
            if number % 8 == 7:
                total = np.maximum(followed.sum(axis=1, keepdims=True), _SMALLEST)
                followed /= total
                logs += np.log(total[:, 0])
        yield from zip(followed.transpose(2, 0, 1), logs.T, strict=True)


class BlockTempered(Tempered):
    """`Tempered` with a sum that starts again at each block, so that it remembers no more than a model's context."""

    def evidence(self, chunk: Chunk, state: State) -> tuple[np.ndarray, State]:
        """See `WeightsRule.evidence`."""
        sums = np.zeros_like(chunk.scores)
        for place in range(1, chunk.scores.shape[1]):
            sums[:, place] = self.gamma * sums[:, place - 1] + chunk.scores[:, place - 1]
        return self.beta * sums, state


class BlockSwitching(Switching):
    """`Switching` with a chain that starts again at each block."""

    def evidence(self, chunk: Chunk, state: State) -> tuple[np.ndarray, State]:
        """See `WeightsRule.evidence`."""
        found, _ = self._by_logarithms(chunk.scores.transpose(1, 0, 2), *state)
        return found.transpose(1, 0, 2), state


def in_blocks(rule: WeightsRule) -> WeightsRule:
    """The variant of `rule` that starts again at each block; `rule` may use earlier blocks."""
    if isinstance(rule, Tempered):
        return BlockTempered(rule.beta, rule.gamma)
    return BlockSwitching(rule.alpha) if isinstance(rule, Switching) else rule


@dataclass(frozen=True)
class Cluster(History):
    """The evidence is the nearness of the text so far to the cluster of each expert (Gururangan et al. 2023, Eq. 3).

    L[t, j] = -d²[t, j] / temperature, where d is the distance of the text before token t to the centre of cluster j.
    Updating and cached priors are computed as for `History`, because a block's distances are not evidence for the next
    block.
    """

    temperature: float

    def evidence(self, chunk: Chunk, state: State) -> tuple[np.ndarray, State]:
        """See `WeightsRule.evidence`."""
        return _distances(chunk) / -self.temperature, state


@dataclass(frozen=True)
class ReleasedCluster(Cluster):
    """The rule of the code published with c-BTM: `Cluster` with distances that are squared twice and one token late.

    L[t, j] = -(d²[t-1, j])² / temperature: the distance is that of the text before token t-1, although token t-1 is
    known when token t is predicted.
    Every document begins with `<|endoftext|>`. The token after it uses row t, that of the empty text; so does the
    very first token, which has no earlier row.
    """

    scorer: ClassVar[str] = "released"

    def evidence(self, chunk: Chunk, state: State) -> tuple[np.ndarray, State]:
        """See `WeightsRule.evidence`. The state is the last row, its document, and whether it begins the document."""
        distances, tokens = _distances(chunk), int(chunk.mask.sum())
        rows = distances.reshape(-1, distances.shape[2])
        documents = np.zeros(tokens, np.int64) if chunk.documents is None else chunk.documents
        before, document, began = state or (rows[0], documents[0] - 1, np.False_)
        begins = np.diff(documents, prepend=document) != 0
        late = np.concatenate([before[None], rows[:-1]])
        empty = np.flatnonzero(np.append(began, begins[:-1]))
        late[empty] = rows[empty]
        after = (rows[tokens - 1], documents[-1], begins[-1])
        return (late**2 / -self.temperature).reshape(distances.shape), after


@dataclass(frozen=True)
class ClusterHistory(Cluster):
    """The evidence is the evidence of `Cluster` plus the evidence of `History`."""

    def evidence(self, chunk: Chunk, state: State) -> tuple[np.ndarray, State]:
        """See `WeightsRule.evidence`."""
        return _distances(chunk) / -self.temperature + History().evidence(chunk, state)[0], state


CLASSES: dict[str, type[WeightsRule]] = {
    "history": History,
    "released": Released,
    "tempered": Tempered,
    "switching": Switching,
    "cluster": Cluster,
    "cluster+history": ClusterHistory,
}


def weights_rule(weights: str | Weights) -> WeightsRule:
    """The rule that a value of `evaluation.weights` names; "" is only the prior.

    Raises DemixError for an unknown value, and for a value without needed parameters.
    """
    if weights == "":
        return PriorAlone()
    try:
        parsed = weights if isinstance(weights, Weights) else parsed_weights(weights)
    except ValueError as error:
        raise DemixError(f"mixing rule {weights}", *error.args) from None
    if parsed.open:
        form = f"{parsed.family}({','.join(parsed.rules.parameters)})"
        raise DemixError(f"mixing rule {weights}", "lacks its parameters", f"give them as {form}")
    return CLASSES[parsed.family](*parsed.parameters)


def released_rule(rule: WeightsRule) -> WeightsRule:
    """The rule of published code that corresponds to `rule`: c-BTM's code for cluster rules, else DEMix's."""
    return ReleasedCluster(rule.temperature) if isinstance(rule, Cluster) else ReleasedScorer()


def _distances(chunk: Chunk) -> np.ndarray:
    """The squared distances [B, T, E] of a chunk. Raises DemixError if there are none."""
    if chunk.distances is None:
        cause = "needs the distances of the text to the experts' clusters"
        raise DemixError("mixing rule cluster", cause, "use another rule, or a model with a cluster for each expert")
    return chunk.distances


def _before(values: np.ndarray) -> np.ndarray:
    """`values` [B, T, E] one token later."""
    before = np.zeros_like(values)
    before[:, 1:] = values[:, :-1]
    return before


def _rows(chunk: Chunk) -> np.ndarray:
    """The scores [E, N] of the N tokens of a chunk that are not padding, which only the last block has, at its end."""
    return chunk.scores.transpose(2, 0, 1).reshape(chunk.scores.shape[2], -1)[:, : int(chunk.mask.sum())]


def _chunked(rows: np.ndarray, chunk: Chunk) -> np.ndarray:
    """Values [E, N] of the tokens of a chunk as [B, T, E], 0 at padding."""
    blocks, length, experts = chunk.scores.shape
    filled = np.zeros((experts, blocks * length))
    filled[:, : rows.shape[1]] = rows
    return filled.reshape(experts, blocks, length).transpose(1, 2, 0)
