"""The weights of experts on texts that grow token by token, as `demix.evaluate.mix` computes them for whole texts."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from demix.config.mixing import Weights
from demix.data.cluster import Contexts
from demix.errors import DemixError


class Posterior:
    """The weights of E experts on B growing texts, cut into blocks of `length` tokens.

    `log_weights` [B, E] float64 are log g, the weights that predict the next token (paper, Eq. 5-6). Without `decay`,
    every block begins with the prior `log_prior` [E]. With `decay`, only the first block does, and the priors of later
    blocks follow the updating rule (paper, Eq. 7).
    """

    def __init__(self, log_prior: Tensor, length: int, texts: int = 1, decay: float | None = None):
        self.length, self.decay = length, decay
        self.log_weights = log_prior.double().log_softmax(0).expand(texts, -1)
        self._given, self._log_prior = self.log_weights, self.log_weights
        # The evidence of the current block, and the log of the decayed sum of the posteriors of earlier blocks.
        self._evidence, self._total = torch.zeros_like(self.log_weights), torch.full_like(self.log_weights, -torch.inf)
        self.seen = 0

    @property
    def room(self) -> int:
        """The number of tokens that still fit into the block. It is at least 1, because a full block ends at once."""
        return self.length - self.seen % self.length

    def observe(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """Take log p [E, B, N] of the next `tokens` [B, N]; returns log g [B, N, E], which predicted each token."""
        used = []
        while scores.shape[2]:
            piece, scores = scores[:, :, : self.room], scores[:, :, self.room :]
            sums = self._evidence[:, None] + piece.double().permute(1, 2, 0).cumsum(1)  # [B, n, E]
            logits = self._log_prior[:, None] + torch.cat([self._evidence[:, None], sums], 1)
            log_weights = logits.log_softmax(-1)
            used.append(log_weights[:, :-1])
            self._evidence, self.log_weights = sums[:, -1], log_weights[:, -1]
            ends = piece.shape[2] == self.room
            self.seen += piece.shape[2]
            if ends:
                self._end_block()
        return torch.cat(used, 1) if used else self.log_weights.new_empty(len(self.log_weights), 0, len(self._given[0]))

    def _end_block(self) -> None:
        if self.decay is not None:
            self._total = math.log(self.decay) + torch.logaddexp(self._total, self.log_weights)
        self._log_prior = self._given if self.decay is None else self._total.log_softmax(-1)
        self.log_weights, self._evidence = self._log_prior, torch.zeros_like(self._evidence)


class Stepwise(Posterior):
    """A posterior by the rule `released`, `tempered` or `switching` (docs/concepts.md, "Ways to mix").

    `tempered` and `switching` see all text so far, across blocks.
    """

    def __init__(self, weights: Weights, log_prior: Tensor, length: int, texts: int = 1, decay: float | None = None):
        super().__init__(log_prior, length, texts, decay)
        self._family = weights.family
        self._parameters = torch.tensor(weights.parameters, dtype=torch.float64)
        self._equal = torch.zeros_like(self.log_weights).log_softmax(-1)
        if self._family == "released":
            self.log_weights = self._equal

    def observe(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """See `Posterior.observe`."""
        used = [self.log_weights[:, None][:, :0]]
        for scored in scores.double().permute(2, 1, 0):
            used.append(self.log_weights[:, None])
            self.seen += 1
            self.log_weights = self._after(scored)
            if self._family == "released" and self.seen % self.length == 0:
                self._end_block()
                self.log_weights = self._equal
        return torch.cat(used, 1)

    def _after(self, scored: Tensor) -> Tensor:
        """log g [B, E] after a token with log p [B, E]."""
        if self._family == "released":
            return (self._log_prior + scored).log_softmax(-1)
        if self._family == "tempered":
            beta, gamma = self._parameters
            self._evidence = gamma * self._evidence + scored
            logits: Tensor = self._given + beta * self._evidence
            return logits.log_softmax(-1)
        (alpha,) = self._parameters
        posterior = (self.log_weights + scored).log_softmax(-1)
        return torch.logaddexp((1 - alpha).log() + posterior, alpha.log() + self._given)


class Nearest(Posterior):
    """A posterior by the rule `cluster` or `cluster+history`: by the distance of the text to the experts' clusters.

    `contexts` has the contexts of each text, and `columns` [E] the place of each expert's cluster in their distances;
    -1 stands for none, for experts without any weight in the prior. `before` [B] are the tokens before the texts, by
    default `<|endoftext|>`.
    """

    def __init__(
        self,
        weights: Weights,
        log_prior: Tensor,
        contexts: Sequence[Contexts],
        columns: Sequence[int],
        decay: float | None = None,
        before: Tensor | None = None,
    ):
        super().__init__(log_prior, contexts[0].length, len(contexts), decay)
        self._history = weights.family == "cluster+history"
        self._temperature, self._contexts, self._columns = weights.parameters[0], contexts, list(columns)
        ends = np.full(len(contexts), contexts[0].end_of_text)
        self._near = self._nearness((ends if before is None else before.cpu().numpy())[:, None])[:, 0]
        self._weigh()

    def observe(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """See `Posterior.observe`."""
        used = [self.log_weights[:, None][:, :0]]
        near = self._nearness(tokens.cpu().numpy())
        for number, scored in enumerate(scores.double().permute(2, 1, 0)):
            used.append(self.log_weights[:, None])
            self._near = near[:, number]
            self._evidence = self._evidence + scored
            self.seen += 1
            if self.seen % self.length == 0:
                # Distances tell nothing of the posterior of a block, which later priors are made of.
                self.log_weights = (self._log_prior + self._evidence).log_softmax(-1)
                self._end_block()
            self._weigh()
        return torch.cat(used, 1)

    def _weigh(self) -> None:
        logits = self._log_prior + self._near + (self._evidence if self._history else 0)
        self.log_weights = logits.log_softmax(-1)

    def _nearness(self, tokens: np.ndarray) -> Tensor:
        """-d²/temperature [B, N, E] of the texts that end with each of `tokens` [B, N]."""
        rows = [contexts.distances(some) for contexts, some in zip(self._contexts, tokens, strict=True)]
        return torch.from_numpy(np.stack(rows)[..., self._columns]).double() / -self._temperature


def by_distance(
    weights: Weights,
    log_prior: Tensor,
    experts: Sequence[str],
    contexts: Sequence[Contexts],
    decay: float | None,
    before: Tensor | None = None,
) -> Nearest:
    """The posterior over `experts` [E] by a rule of distances; see `Nearest`.

    Raises DemixError for an expert that the prior allows and that has no cluster.
    """
    names = contexts[0].names
    for name, allowed in zip(experts, (log_prior > -torch.inf).tolist(), strict=True):
        if allowed and name not in names:
            raise DemixError(
                f"--weights {weights.family}",
                f"need one cluster per expert; {name} has none",
                "use other weights or experts",
            )
    columns = [names.index(name) if name in names else -1 for name in experts]
    return Nearest(weights, log_prior, contexts, columns, decay, before)


def posterior_by(
    weights: Weights, log_prior: Tensor, length: int, texts: int = 1, decay: float | None = None
) -> Posterior:
    """The posterior of `texts` texts by the rule `weights`; see `Posterior`."""
    if weights.family == "history":
        return Posterior(log_prior, length, texts, decay)
    return Stepwise(weights, log_prior, length, texts, decay)


def keep_top(log_weights: Tensor, k: int | None) -> Tensor:
    """The k largest of `log_weights` [..., E] at each token, renormalised; the others become -inf. None keeps all.

    Weights that equal the least of them are kept too, as by `demix.evaluate.mix.mixtures.keep_top`.
    """
    if k is None or k >= log_weights.shape[-1]:
        return log_weights
    least = log_weights.topk(k).values[..., -1:]
    return log_weights.where(log_weights >= least, -torch.inf).log_softmax(-1)
