"""Positions of tokens (learned, sinusoidal, ALiBi, rope) and attention masks.

Axes: E experts, B sequences, T new positions, H heads.
"""

import torch
from torch import Tensor

from demix.config.architecture import Architecture

# Cosines and sines [T, pairs] of the angles by which queries and keys are rotated.
CosSin = tuple[Tensor, Tensor]


def sines(start: int, T: int, width: int) -> Tensor:
    """Float64 [T, D] of positions from `start` (Vaswani et al. 2017).

    Units 2n and 2n + 1 of position p are the sine and the cosine of p·10000^(-2n/width).
    """
    angles = _angles(start, T, frequencies(10_000, width))  # [T, D / 2]
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def cos_sin(options: Architecture, start: int, T: int, x: Tensor) -> CosSin:
    """The cosines and sines, of the type of `x`, by which rope rotates T positions from `start`.

    Queries and keys are rotated by their position (Su et al. 2021, "RoFormer", Eq. 15).
    """
    angles = _angles(start, T, rope_frequencies(options))
    cos, sin = (part.to(device=x.device, dtype=x.dtype) for part in (angles.cos(), angles.sin()))
    return cos, sin


def rope_frequencies(options: Architecture) -> Tensor:
    """The angles by which pairs of units are rotated from one position to the next: float64 [pairs].

    They are scaled by `RopeScaling`.
    """
    angles, scaling = frequencies(options.rope_theta, options.rotated), options.rope_scaling
    if scaling is None:
        return angles
    slow = angles / scaling.factor
    if scaling.kind == "linear":
        return slow
    turns = scaling.context * angles / (2 * torch.pi)
    kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
    return (1 - kept) * slow + kept * angles


def bias_of(options: Architecture, before: int, T: int, x: Tensor) -> Tensor | None:
    """The bias added to the attention scores of T new positions to the `before` earlier ones and to themselves.

    It has the type of `x` (ALiBi), or is a mask: bool [T, before + T], true where a position attends. None if no mask
    is needed: for T positions at the start of a text, and for a single position, which attends to all.
    """
    if options.position == "alibi":
        return _alibi(options, before, T, x)
    if not before or T == 1:
        return None
    return torch.ones(T, before + T, dtype=torch.bool, device=x.device).tril(before)


def _alibi(options: Architecture, before: int, T: int, x: Tensor) -> Tensor:
    """-m_h·(i - j) [1, H, T, before + T] for position i and an earlier one j; -inf for a later one.

    For a masked model, whose attention is bidirectional, it is m_h·(1/2 - (j - i)) for a later one.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    at = torch.arange(before + T, dtype=exact, device=x.device)
    distances = at - at[before:, None]  # [T, before + T], at most 0 for what is seen
    if options.objective == "mlm":
        distances = torch.where(distances > 0, 0.5 - distances, distances)
    else:
        distances = distances.masked_fill(distances > 0, -torch.inf)
    slopes = torch.tensor(alibi_slopes(options.heads), dtype=exact, device=x.device)
    return (slopes[:, None, None] * distances).to(x.dtype)[None]


def alibi_slopes(heads: int) -> list[float]:
    """The slope m_h of each of n `heads`: 2^(-8h/n), h = 1 ... n (Press et al. 2022, "Train Short, Test Long").

    If n is not a power of two, they are the slopes of the next lower power of two, then every other slope of twice that
    power.
    """
    power = 1 << heads.bit_length() - 1
    own, between = ([2 ** (-8 * h / number) for h in range(1, number + 1)] for number in (power, 2 * power))
    return own + between[::2][: heads - power]


def frequencies(theta: float, units: int) -> Tensor:
    """theta^(-2n/units) for each pair n of units: float64 [units / 2]."""
    exponents: Tensor = -torch.arange(0, units, 2, dtype=torch.float64) / units
    return theta**exponents


def _angles(start: int, T: int, frequencies: Tensor) -> Tensor:
    """The angles of T positions from `start`: float64 [T, pairs]."""
    return torch.arange(start, start + T, dtype=torch.float64)[:, None] * frequencies
