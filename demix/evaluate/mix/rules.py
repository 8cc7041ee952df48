"""Weights rules: the evidence of the text so far about each expert (docs/concepts.md), without the prior.

A rule computes the log evidence L [B, T, E] in nats. The weights that predict token t are g[t, j] ∝ π[j]·exp(L[t, j]),
with the prior π of the block (paper, Eq. 5-6). A new rule needs a class here. A rule that a config names also needs a
row of RULES.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from demix.errors import DemixError

# What a rule keeps of the text before a chunk. Rules whose evidence starts anew in each block keep nothing.
State = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Chunk:
    """Consecutive blocks of a text, the input of a rule: B blocks, T positions, E experts.

    `scores` [B, T, E] are float64 log p(token) in nats, 0 at padding. `mask` [B, T] is False at the padding of the last
    block. `beside` has the values [B, T, C] that `demix.evaluate.score_tables.stream_scores` streamed with the scores,
    by name.
    """

    scores: np.ndarray
    mask: np.ndarray
    beside: Mapping[str, np.ndarray] = field(default_factory=dict)


class WeightsRule(ABC):
    """The evidence of the text so far for each expert. Rules are frozen and hashable, so equal rules share evidence.

    With `uniform_start`, the first token of a block gets equal weights for any prior. With `by_prior`, the evidence
    depends on the prior, so mixtures with different priors do not share their evidence.
    """

    uniform_start: ClassVar[bool] = False
    by_prior: ClassVar[bool] = False

    def begin(self, log_prior: np.ndarray) -> State:
        """The state before the first block of a text, for a text with the log prior `log_prior` [E]."""
        return ()

    @abstractmethod
    def evidence(self, chunk: Chunk, state: State) -> tuple[np.ndarray, State]:
        """L [B, T, E] before each token of a chunk, and the state after it. `state` is that after the chunk before."""

    def block_evidence(self, scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Evidence [B, E] of each block alone, after its last token. It turns the block's prior into a posterior.

        A rule that sees earlier blocks raises DemixError: an updating or cached prior would count their evidence twice.
        """
        raise DemixError(f"weights {self}", "see more than one block", "use them with a uniform prior")


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
class Window(WeightsRule):
    """The evidence is the sum of the scores of the last `tokens` tokens of the block so far."""

    tokens: int

    def evidence(self, chunk: Chunk, state: State) -> tuple[np.ndarray, State]:
        """See `WeightsRule.evidence`."""
        sums = np.cumsum(chunk.scores, axis=1)
        before = _before(sums)
        before[:, self.tokens + 1 :] -= sums[:, : -self.tokens - 1]
        return before, state

    def block_evidence(self, scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """See `WeightsRule.block_evidence`."""
        lengths = mask.sum(axis=1)
        counted = np.arange(mask.shape[1]) >= (lengths - self.tokens)[:, None]
        evidence: np.ndarray = (scores * (counted & mask)[..., None]).sum(axis=1)
        return evidence


@dataclass(frozen=True)
class Released(Window):
    """The rule of the paper's published code: the last token alone, and equal weights at the start of a block."""

    uniform_start: ClassVar[bool] = True
    tokens: int = 1


# The rules that a config names. A positive number is a window in tokens.
RULES: dict[str, WeightsRule] = {"history": History(), "released": Released()}


def weights_rule(weights: str | int) -> WeightsRule:
    """The rule that a value of `evaluation.weights` stands for. Raises DemixError for an unknown value."""
    if isinstance(weights, str) and weights in RULES:
        return RULES[weights]
    if isinstance(weights, int) and weights > 0:
        return Window(weights)
    known = ", ".join(RULES)
    raise DemixError(f"evaluation.weights {weights!r}", "is not known", f"use {known} or a positive window")


def _before(sums: np.ndarray) -> np.ndarray:
    before = np.zeros_like(sums)
    before[:, 1:] = sums[:, :-1]
    return before
