"""Mixtures of experts, computed from score tables (docs/concepts.md; paper, section 5.1) without any forward pass."""

import numpy as np

from demix.config.evaluation import DECAY
from demix.config.mixing import METHODS
from demix.errors import DemixError
from demix.mix.logs import log_softmax, logsumexp
from demix.mix.priors import log_prior_path
from demix.mix.rules import DISTANCES, Chunk, PriorAlone, State, WeightsRule, released_rule, weights_rule

# In hindsight, no mixtures: the floor of `history`, which picks one expert for a block, and that of every rule.
FLOORS = ("best_block", "best_token")
# A sum of products of weights below this has lost precision to underflow.
_SMALL = 1e-290


def mix(
    scores: np.ndarray,
    mask: np.ndarray,
    method: str,
    weights: str | int | WeightsRule = "history",
    *,
    decay: float = DECAY,
    log_prior: np.ndarray | None = None,
    top_k: int | None = None,
    distances: np.ndarray | None = None,
) -> np.ndarray:
    """log p [B, T] in nats of each token under the mixture of experts (paper, Eq. 4).

    `scores` [B, T, E] and `mask` [B, T] are as in `demix.mix.priors`; the result is 0 at padding. `method` is
    `average` (equal weights, no posterior), or a posterior with the prior `uniform`, `updating` (with `decay`),
    `cached` or `fitted` (`log_prior` [E], from `cached_log_prior` or `fitted_log_prior`, or [B, E] for a prior of each
    block). `distances` [B, T, E] are the squared distances of the text before each token to the experts' clusters, for
    weights that need them. Raises DemixError for an unknown method, for a missing prior, and for an updating prior with
    weights that see earlier blocks.
    """
    blocks, _, experts = scores.shape
    rule = mixing_rule(method, weights)
    log_priors = np.full((blocks, experts), -np.log(experts))
    if method in ("cached", "fitted"):
        if log_prior is None:
            raise DemixError(f"method {method}", "was given no prior", f"compute one with {method}_log_prior")
        log_priors[:] = log_prior
    elif method == "updating":
        log_priors = log_prior_path(scores, mask, weights, decay)[:-1]
    beside = {} if distances is None else {DISTANCES: distances}
    evidence, _ = rule.evidence(Chunk(scores, mask, beside), rule.begin(log_priors[0]))
    mixed = log_mixtures(scores, log_priors[:, None], evidence, rule.uniform_start, top_k)[:, 0]
    return np.where(mask, mixed, 0.0)


def mixing_rule(method: str, weights: str | int | WeightsRule, scorer: str = "paper") -> WeightsRule:
    """The weights rule of a method and a scorer: that of `weights`, of published code, or the prior for `average`."""
    if method not in METHODS:
        raise DemixError(f"method {method}", "is not known", f"use one of {', '.join(METHODS)}")
    rule = (released_rule if scorer == "released" else weights_rule)(weights)
    return PriorAlone() if method == "average" else rule


def floor(scores: np.ndarray, method: str) -> np.ndarray:
    """log p [B, T] of each token under the expert that is best in hindsight, in its block or at the token itself.

    `scores` are as in `mix`; `method` is one of `FLOORS`.
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
    return log_softmax(logits)


def log_mixtures(
    scores: np.ndarray,
    log_priors: np.ndarray,
    evidence: np.ndarray,
    uniform_start: bool = False,
    top_k: int | None = None,
) -> np.ndarray:
    """log p [B, K, T] of each token under K mixtures with the priors `log_priors` [B, K, E] (paper, Eq. 4).

    `evidence` [B, T, E] and `uniform_start` come from the weights rule that all K mixtures share. The values equal
    those of `log_weights`, `keep_top` and logsumexp up to rounding. This function is faster, because all priors share
    one exponential per token and expert: it sums products of factors, each divided by the largest of its kind. Where
    such a sum is below 1e-290 (prior and evidence disagree by 667 nats or more), the function computes with logarithms
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
        # Equal weights have no likeliest experts.
        chosen[:, :, 0], total[:, :, 0] = likelihood[..., 0].sum(axis=1, keepdims=True), scores.shape[2]
    with np.errstate(divide="ignore", invalid="ignore"):
        mixed: np.ndarray = np.log(chosen / total) + highest
    lost = (chosen < _SMALL).any(axis=2)
    for number in np.flatnonzero(lost.any(axis=0)).tolist():
        blocks = lost[:, number]
        log_g = log_weights(log_priors[blocks, number], evidence[blocks], uniform_start)
        mixed[blocks, number] = logsumexp(keep_top(log_g, top_k) + scores[blocks])
    return mixed


def weigh(
    rule: WeightsRule, log_priors: np.ndarray, chunk: Chunk, state: State | None = None
) -> tuple[np.ndarray, State]:
    """log g [B, T, E] by `rule` of the tokens of a chunk whose blocks have the priors `log_priors` [B, E].

    Also returns the rule's state after the chunk. Without `state` the text begins with the chunk.
    """
    evidence, after = rule.evidence(chunk, rule.begin(log_priors[0]) if state is None else state)
    return log_weights(log_priors, evidence, rule.uniform_start), after


def keep_top(log_g: np.ndarray, k: int | None) -> np.ndarray:
    """The k `likeliest` weights of `log_g` [..., E] at each token, renormalised; the others become -inf.

    None keeps all.
    """
    if k is None:
        return log_g
    return log_softmax(np.where(likeliest(log_g, k), log_g, -np.inf))


def likeliest(weights: np.ndarray, k: int) -> np.ndarray:
    """Whether each of `weights` [..., E], or of their logarithms, is among the k largest or equals the least of these.

    All equal ones are kept, so that the order of the experts never chooses among them.
    """
    place = -min(k, weights.shape[-1])
    kept: np.ndarray = weights >= np.partition(weights, place, axis=-1)[..., place, None]
    return kept
