"""Sums of exponentials, and of decaying terms. scipy has both in modules that need a second of every start to load."""

import numpy as np

# Terms that one matrix product sums; larger blocks cost more products, smaller ones more levels.
_BLOCK = 32


def logsumexp(logs: np.ndarray, axis: int = -1) -> np.ndarray:
    """log Σ exp(logs) along `axis`; -inf where all of them are -inf."""
    highest = _highest(logs, axis)
    with np.errstate(divide="ignore"):
        summed: np.ndarray = np.log(np.exp(logs - highest).sum(axis=axis)) + np.squeeze(highest, axis)
    return summed


def log_softmax(logs: np.ndarray, axis: int = -1) -> np.ndarray:
    """`logs` less a constant, so that the exponentials along `axis` sum to 1."""
    lower = logs - _highest(logs, axis)
    # In this order, so that the logarithm of almost 1 keeps its digits.
    normalised: np.ndarray = lower - np.log(np.exp(lower).sum(axis=axis, keepdims=True))
    return normalised


def decaying_sums(terms: np.ndarray, decay: float, before: np.ndarray) -> np.ndarray:
    """S [E, N] with S[:, t] = decay·S[:, t-1] + terms[:, t], and `before` [E] in the place of S[:, -1].

    Within blocks of terms a matrix of powers sums them. The sums at the ends of blocks are such a series themselves,
    with the decay of a whole block.
    """
    rows, number = terms.shape
    blocks = -(-number // _BLOCK)
    padded = np.zeros((rows, blocks * _BLOCK))
    padded[:, :number] = terms
    ages = np.subtract.outer(np.arange(_BLOCK), np.arange(_BLOCK))
    powers = np.where(ages >= 0, decay ** np.maximum(ages, 0.0), 0.0)
    sums = (padded.reshape(-1, _BLOCK) @ powers.T).reshape(rows, blocks, _BLOCK)
    carried = before[:, None]
    if blocks > 1:
        carried = np.concatenate([carried, decaying_sums(sums[:, :-1, -1], decay**_BLOCK, before)], axis=1)
    sums += carried[..., None] * decay ** np.arange(1.0, _BLOCK + 1)
    found: np.ndarray = sums.reshape(rows, -1)[:, :number]
    return found


def _highest(logs: np.ndarray, axis: int) -> np.ndarray:
    highest = logs.max(axis=axis, keepdims=True)
    return np.where(np.isfinite(highest), highest, 0.0)
