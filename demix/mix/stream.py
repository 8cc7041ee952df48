"""The weights of experts on texts that grow, by the rules that also weight the tokens of whole tables."""

from collections.abc import Callable, Sequence

import numpy as np

from demix.mix.mixtures import weigh
from demix.mix.priors import updating_log_priors
from demix.mix.rules import DISTANCES, Chunk, History, State, WeightsRule

# The squared distances [N, E] to the experts' clusters of the texts that end with each of the next tokens [N].
Distances = Callable[[np.ndarray], np.ndarray]


class Posterior:
    """The weights of E experts on B growing texts, cut into blocks of `length` tokens.

    `log_weights` [B, E] float64 are log g, the weights that predict the next token (paper, Eq. 5-6), by `rule`. Without
    `decay`, every block begins with the prior `log_prior` [E]. With `decay`, only the first block does, and the priors
    of later blocks follow the updating rule (paper, Eq. 7). A rule that reads distances takes them from `distances`,
    one function for each text, whose first call is given the token before the text, `before` [B].
    """

    def __init__(
        self,
        log_prior: np.ndarray,
        length: int,
        texts: int = 1,
        decay: float | None = None,
        rule: WeightsRule | None = None,
        distances: Sequence[Distances] = (),
        before: np.ndarray | None = None,
    ):
        prior = np.asarray(log_prior, np.float64)
        prior = prior - np.logaddexp.reduce(prior)
        self.length, self.decay, self.seen = length, decay, 0
        self._rule, self._distances = rule or History(), distances
        self._log_priors = np.tile(prior, (texts, 1))
        self._states: list[State] = [self._rule.begin(prior)] * texts
        # The block so far, which the states lack, with the distances before each of its tokens and the next one.
        self._scores = np.zeros((texts, 0, len(prior)))
        self._far = self._measured(np.zeros((texts, 1)) if before is None else before[:, None])
        self.log_weights = self._weigh()[:, -1]

    @property
    def room(self) -> int:
        """The number of tokens that still fit into the block. It is at least 1, because a full block ends at once."""
        return self.length - self.seen % self.length

    def observe(self, scores: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Take log p [E, B, N] of the next `tokens` [B, N]; returns log g [B, N, E], which predicted each token."""
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
        """log g [B, N + 1, E] of the N tokens held and of the next one, whose own score changes no weight."""
        scores = np.pad(self._scores, ((0, 0), (0, 1), (0, 0)))
        log_g = np.empty_like(scores)
        for text, (prior, state) in enumerate(zip(self._log_priors, self._states, strict=True)):
            log_g[text] = weigh(self._rule, prior[None], self._chunk(scores[text], self._far[text]), state)[0][0]
        return log_g

    def _begin_block(self) -> None:
        if self.decay is not None:
            blocks = self.seen // self.length - 1
            evidence = self._rule.block_evidence(self._scores, np.ones(self._scores.shape[:2], bool))
            for prior, block in zip(self._log_priors, evidence, strict=True):
                prior[:] = updating_log_priors(block[None], self.decay, prior, blocks)[-1]
        whole = [self._chunk(scores, far[:-1]) for scores, far in zip(self._scores, self._far, strict=True)]
        self._states = [self._rule.evidence(*each)[1] for each in zip(whole, self._states, strict=True)]
        self._scores, self._far = self._scores[:, :0], self._far[:, -1:]
        self.log_weights = self._weigh()[:, -1]

    def _chunk(self, scores: np.ndarray, far: np.ndarray) -> Chunk:
        beside = {DISTANCES: far[None]} if self._distances else {}
        return Chunk(scores[None], np.ones((1, len(scores)), bool), beside)

    def _measured(self, tokens: np.ndarray) -> np.ndarray:
        """The distances [B, N, E] after each of `tokens` [B, N]; without experts where no rule reads them."""
        if not self._distances:
            return np.zeros((*tokens.shape, 0))
        return np.stack([far(row) for far, row in zip(self._distances, tokens, strict=True)])
