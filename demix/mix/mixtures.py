"""Mixtures of experts' probabilities: for whole texts and for growing texts (docs/explanation/mixing.md)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import log_softmax

from demix.mix.rules import Chunk, State, WeightsRule

# Lower bounds that use the test text: the best expert of each block (for `history`), or of each token (for all rules).
FLOORS = ("best_block", "best_token")
# A sum of products of weights below this has lost precision to underflow.
_SMALL = 1e-290
# A function: for the next tokens [N], the squared distances [N, E] of the texts that end with each to the clusters.
Distances = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, eq=False)
class Mixture:
    """A mixture of E experts: `rule` computes their weights from the text and the prior `log_prior` [E] (or [B, E]).

    Without `decay` every block starts with the prior. With `decay` only the first block starts with it, and the priors
    of later blocks follow the updating rule (paper, Eq. 7). Constant equal weights are the rule `PriorAlone` with a
    uniform prior. `top_k` keeps the k `likeliest` experts at each token. `table` mixes texts whose scores are known; a
    growing text needs a `Stream`.
    """

    rule: WeightsRule
    log_prior: np.ndarray
    decay: float | None = None
    top_k: int | None = None

    def log_priors(self, scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """log π [B, E] at the start of each block. Axes are as in `demix.mix.priors`.

        Raises DemixError for an updating prior with a rule that uses earlier blocks.
        """
        if self.decay is not None:
            return self.rule.log_priors(scores, mask, self.decay, (self.log_prior, 0))[:-1]
        return np.broadcast_to(self.log_prior, (len(scores), scores.shape[2]))

    def table(self, scores: np.ndarray, mask: np.ndarray, distances: np.ndarray | None = None) -> np.ndarray:
        """log p [B, T] in nats of each token of a text (paper, Eq. 4), 0 at padding.

        `scores` [B, T, E] and `mask` [B, T] are as in `demix.mix.priors`. `distances` [B, T, E] are the squared
        distances of the text before each token to the experts' clusters, for rules that need them.
        """
        log_priors, evidence = self._evidence(scores, mask, distances)
        mixed = log_mixtures(scores, log_priors[:, None], evidence, self.rule.uniform_start, self.top_k)[:, 0]
        return np.where(mask, mixed, 0.0)

    def weights(self, scores: np.ndarray, mask: np.ndarray, distances: np.ndarray | None = None) -> np.ndarray:
        """log g [B, T, E]: the weights with which `table` mixes each token."""
        return keep_top(log_weights(*self._evidence(scores, mask, distances), self.rule.uniform_start), self.top_k)

    def _evidence(
        self, scores: np.ndarray, mask: np.ndarray, distances: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        log_priors = self.log_priors(scores, mask)
        return log_priors, self.rule.evidence(Chunk(scores, mask, distances), self.rule.begin(log_priors[0]))[0]


def floor(scores: np.ndarray, method: str) -> np.ndarray:
    """log p [B, T] of each token under the expert that is best in hindsight, in the token's block or at the token.

    `scores` are as in `Mixture.table`; `method` is one of `FLOORS`.
    """
    if method == "best_token":
        highest: np.ndarray = scores.max(axis=2)
        return highest
    best = scores.sum(axis=1).argmax(axis=1)
    chosen: np.ndarray = np.take_along_axis(scores, best[:, None, None], axis=2)[..., 0]
    return chosen


def log_weights(log_priors: np.ndarray, evidence: np.ndarray, uniform_start: bool = False) -> np.ndarray:
    """log g [B, T, E]: the weights that predict each token (paper, Eq. 5-6).

    `log_priors` [B, E] are the log priors at the start of each block. `evidence` [B, T, E] and `uniform_start` come
    from a weights rule.
    """
    logits = log_priors[:, None, :] + evidence
    if uniform_start:
        logits[:, 0, :] = 0.0
    weights: np.ndarray = log_softmax(logits, axis=-1)
    return weights


def log_mixtures(
    scores: np.ndarray,
    log_priors: np.ndarray,
    evidence: np.ndarray,
    uniform_start: bool = False,
    top_k: int | None = None,
) -> np.ndarray:
    """log p [B, K, T] of each token under K mixtures with the priors `log_priors` [B, K, E] (paper, Eq. 4).

    `evidence` [B, T, E] and `uniform_start` come from the weights rule that all K mixtures share. Up to rounding,
    `log_weights`, `keep_top` and logsumexp give the same values. This function is faster, because all priors share one
    exponential per token and expert: it sums products of factors, each divided by the largest of its kind. Where such a
    sum is below 1e-290 (prior and evidence disagree by 667 nats or more), the function computes with logarithms
    instead.
    """
    by_expert = scores.transpose(0, 2, 1)
    highest = by_expert.max(axis=1, keepdims=True)
    likelihood = np.exp(by_expert - highest)
    logits = evidence.transpose(0, 2, 1)
    support = np.exp(logits - logits.max(axis=1, keepdims=True))
    priors = np.exp(log_priors)
    if top_k is None or top_k >= scores.shape[2]:
        top_k = None
        chosen, total = priors @ (support * likelihood), priors @ support
    else:
        chosen, total = (np.empty((*priors.shape[:2], scores.shape[1])) for _ in range(2))
        for number in range(priors.shape[1]):
            weights = np.ascontiguousarray((priors[:, number, :, None] * support).transpose(0, 2, 1))
            kept = np.where(likeliest(weights, top_k), weights, 0.0).transpose(0, 2, 1)
            total[:, number] = kept.sum(axis=1)
            chosen[:, number] = np.einsum("bet,bet->bt", kept, likelihood)
    if uniform_start:
        # With equal weights there are no likeliest experts.
        chosen[:, :, 0], total[:, :, 0] = likelihood[..., 0].sum(axis=1, keepdims=True), scores.shape[2]
    with np.errstate(divide="ignore", invalid="ignore"):
        mixed: np.ndarray = np.log(chosen / total) + highest
    lost = (chosen < _SMALL).any(axis=2)
    for number in np.flatnonzero(lost.any(axis=0)).tolist():
        blocks = lost[:, number]
        log_g = log_weights(log_priors[blocks, number], evidence[blocks], uniform_start)
        mixed[blocks, number] = np.logaddexp.reduce(keep_top(log_g, top_k) + scores[blocks], axis=-1)
    return mixed


def keep_top(log_g: np.ndarray, k: int | None) -> np.ndarray:
    """The k `likeliest` weights of `log_g` [..., E] at each token, renormalised; the others become -inf.

    None keeps all.
    """
    if k is None:
        return log_g
    kept: np.ndarray = log_softmax(np.where(likeliest(log_g, k), log_g, -np.inf), axis=-1)
    return kept


def likeliest(weights: np.ndarray, k: int) -> np.ndarray:
    """Whether each of `weights` [..., E], or of their logarithms, is among the k largest or equals the k-th largest.

    Ties are kept, so the order of the experts has no effect.
    """
    place = -min(k, weights.shape[-1])
    kept: np.ndarray = weights >= np.partition(weights, place, axis=-1)[..., place, None]
    return kept


class Stream:
    """The weights of the E experts of a mixture on B growing texts, which are cut into blocks of `length` tokens.

    `log_weights` [B, E] float64 are log g, the weights that predict the next token (paper, Eq. 5-6). The texts follow
    the tokens `before` [B]. Rules that need distances get them from `distances`, one function per text; its first call
    gets the token before the text.
    """

    def __init__(self, mixture: Mixture, length: int, before: np.ndarray, distances: Sequence[Distances] = ()):
        texts = len(before)
        prior = np.asarray(mixture.log_prior, np.float64)
        prior = prior - np.logaddexp.reduce(prior)
        self.mixture, self.length, self.seen = mixture, length, 0
        self._rule, self._distances = mixture.rule, distances
        self._log_priors = np.tile(prior, (texts, 1))
        self._states: list[State] = [self._rule.begin(prior)] * texts
        # The current block (not in the states), with the distances before each of its tokens and the next one.
        self._scores = np.zeros((texts, 0, len(prior)))
        self._far = self._measured(before[:, None])
        self.log_weights = self._weigh()[:, -1]

    @property
    def room(self) -> int:
        """The number of tokens that still fit into the block; at least 1, because a full block ends immediately."""
        return self.length - self.seen % self.length

    def observe(self, scores: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Read log p [E, B, N] of the next `tokens` [B, N]; return log g [B, N, E], the weights that predicted them."""
        rows = np.asarray(scores, np.float64).transpose(1, 2, 0)
        used = [self.log_weights[:, None][:, :0]]
        while rows.shape[1]:
            room, held = self.room, self._scores.shape[1]
            self._scores = np.concatenate([self._scores, rows[:, :room]], axis=1)
            self._far = np.concatenate([self._far, self._measured(tokens[:, :room])], axis=1)
            self.seen += min(room, rows.shape[1])
            log_g = self._weigh()
            used.append(log_g[:, held:-1])
            self.log_weights = log_g[:, -1]
            if self.room == self.length:
                self._begin_block()
            rows, tokens = rows[:, room:], tokens[:, room:]
        return np.concatenate(used, axis=1)

    def _weigh(self) -> np.ndarray:
        """log g [B, N + 1, E] of the N stored tokens and of the next one, whose own score is not needed."""
        scores = np.pad(self._scores, ((0, 0), (0, 1), (0, 0)))
        evidence = np.empty_like(scores)
        for text, state in enumerate(self._states):
            evidence[text] = self._rule.evidence(self._chunk(scores[text], self._far[text]), state)[0][0]
        return keep_top(log_weights(self._log_priors, evidence, self._rule.uniform_start), self.mixture.top_k)

    def _begin_block(self) -> None:
        if self.mixture.decay is not None:
            blocks, mask = self.seen // self.length - 1, np.ones((1, self.length), bool)
            for prior, scores in zip(self._log_priors, self._scores, strict=True):
                prior[:] = self._rule.log_priors(scores[None], mask, self.mixture.decay, (prior, blocks))[-1]
        whole = [self._chunk(scores, far[:-1]) for scores, far in zip(self._scores, self._far, strict=True)]
        self._states = [self._rule.evidence(*each)[1] for each in zip(whole, self._states, strict=True)]
        self._scores, self._far = self._scores[:, :0], self._far[:, -1:]
        self.log_weights = self._weigh()[:, -1]

    def _chunk(self, scores: np.ndarray, far: np.ndarray) -> Chunk:
        return Chunk(scores[None], np.ones((1, len(scores)), bool), far[None])

    def _measured(self, tokens: np.ndarray) -> np.ndarray:
        """The distances [B, N, E] after each of `tokens` [B, N]; with E = 0 if the rule does not need them."""
        if not self._distances:
            return np.zeros((*tokens.shape, 0))
        return np.stack([far(row) for far, row in zip(self._distances, tokens, strict=True)])
