"""Mixing experts: arithmetic on score tables (DESIGN section 5), no forward pass and no torch."""

import numpy as np
from scipy.special import logsumexp

from demix.errors import DemixError
from demix.evaluate.posterior import evidence, keep_top, log_weights, updating_log_priors

METHODS = ("average", "uniform", "updating", "cached")


def weights_rule(weights: str | int) -> tuple[int | None, bool]:
    """(window, uniform start) of a weights rule: `history`, `released` or a window in tokens."""
    if weights == "history":
        return None, False
    if weights == "released":
        return 1, True
    if isinstance(weights, int) and weights > 0:
        return weights, False
    raise DemixError(f"evaluation.weights {weights!r}", "is not known", "use history, released or a positive window")


def mix(
    scores: np.ndarray,
    mask: np.ndarray,
    method: str,
    weights: str | int = "history",
    *,
    decay: float = 0.3,
    log_prior: np.ndarray | None = None,
    top_k: int | None = None,
) -> np.ndarray:
    """log p [B, T] in nats of each token under the mixture of experts (paper, Eq. 6).

    `scores` [B, T, E] and `mask` [B, T] as in `demix.evaluate.posterior`; padded positions come out 0. `method`
    is `average` (equal weights, no posterior), or a posterior with the prior `uniform`, `updating` (with
    `decay`) or `cached` (`log_prior` [E], from `cached_log_prior`).
    """
    blocks, _, experts = scores.shape
    uniform = np.full((blocks, experts), -np.log(experts))
    window, uniform_start = weights_rule(weights)
    if method == "average":
        log_g = np.broadcast_to(uniform[:, None, :], scores.shape)
    elif method in METHODS:
        if method == "cached" and log_prior is None:
            raise DemixError("method cached", "was given no prior", "compute one with cached_log_prior")
        log_priors = {
            "uniform": lambda: uniform,
            "updating": lambda: updating_log_priors(evidence(scores, mask, window), decay)[:-1],
            "cached": lambda: np.broadcast_to(log_prior, uniform.shape),
        }[method]()
        log_g = log_weights(scores, log_priors, window, uniform_start)
    else:
        raise DemixError(f"method {method}", "is not known", f"use one of {', '.join(METHODS)}")
    if top_k is not None and top_k < experts:
        log_g = keep_top(log_g, top_k)
    return np.where(mask, logsumexp(log_g + scores, axis=-1), 0.0)


def cached_log_prior(
    scores: np.ndarray, mask: np.ndarray, weights: str | int, *, decay: float, blocks: int
) -> np.ndarray:
    """log prior [E] after the first `blocks` blocks of a domain's dev split (the paper: 100)."""
    window, _ = weights_rule(weights)
    return updating_log_priors(evidence(scores[:blocks], mask[:blocks], window), decay)[-1]
