"""How the tables of a plan show numbers, and rows that are alike."""

from collections.abc import Iterable, Sequence


def folded(rows: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Rows of a name and cells, where rows that are alike but for what follows the last "-" of the name are one row.

    Eight rows demix-dapt-<domain> of equal cells become `demix-dapt-* × 8` with the cells of one.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        stem, dash, _ = name.rpartition("-")
        groups.setdefault((stem + dash or name, *cells), []).append(name)
    return [
        (names[0] if len(names) == 1 else f"{stem}* × {len(names)}", *cells) for (stem, *cells), names in groups.items()
    ]


def significant(number: float) -> str:
    """Two decimals; three significant digits below one."""
    return f"{number:.2f}" if number >= 1 else f"{number:.3g}"


def decimal(number: float) -> str:
    """Two significant digits, as many as rates that are assumed are worth."""
    if number < 1:
        return f"{number:.2g}"
    rounded = float(f"{number:.2g}")
    return f"{rounded:.1f}" if rounded < 10 else f"{rounded:,.0f}"


def short(number: int) -> str:
    """A number with a suffix for thousands to trillions: 1234567 becomes 1.2M."""
    value, letters = float(number), iter(("", "k", "M", "G", "T"))
    letter = next(letters)
    while value >= 999.5 and letter != "T":
        value, letter = value / 1000, next(letters)
    return f"{value:.0f}{letter}" if value >= 99.5 or not letter else f"{value:.1f}{letter}"
