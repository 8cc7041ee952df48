"""A claim's verdict: comparisons over domains, and what they say together.

A comparison is shown only if the mean over domains and more than half of the domains agree. It is weak, whatever they
say, if the run cannot tell its mean difference from none: the difference is within `UNCHANGED`, its 95% interval holds
zero, or its sign is not that of every other seed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd

Verdict = Literal["shown", "weak", "mixed", "not shown", "cannot be judged"]
# Parameters that adaptation does not change give the same scores up to the order of sums.
UNCHANGED = 1e-4


@dataclass(frozen=True)
class Part:
    """One comparison: whether the mean agrees, the number of agreeing domains, of all domains, and cells of a table.

    The `cells` are what is compared, the change, its 95% interval, and the domains that agree (of these significant);
    one sentence for another kind of comparison. `significant` is False if the mean difference is not significant.
    `seeds` says in a sentence whether other seeds point the same way.
    """

    mean_agrees: bool
    agreeing: int
    domains: int
    cells: tuple[str, ...]
    significant: bool = True
    seeds: str = ""

    @property
    def verdict(self) -> Verdict:
        if not self.domains:
            return "cannot be judged"
        if not self.significant:
            return "weak"
        majority = 2 * self.agreeing > self.domains
        if self.mean_agrees and majority:
            return "shown"
        return "mixed" if self.mean_agrees or majority else "not shown"

    def among(self, others: Sequence["Part"]) -> "Part":
        """This part together with the same part in other seeds: weak unless the mean says the same in all that have
        it."""
        said = [other.mean_agrees == self.mean_agrees for other in (self, *others) if other.domains]
        if len(said) < 2:
            return self
        agreement = f"The mean points the same way in {sum(said)} of {len(said)} seeds."
        return replace(self, seeds=agreement, significant=self.significant and all(said))


@dataclass(frozen=True)
class Claim:
    """A statement of the paper or of ours, and the comparisons that decide on it."""

    name: str
    statement: str
    parts: tuple[Part, ...]

    @property
    def verdict(self) -> Verdict:
        """That of all parts if they agree. A weak part makes a claim weak if all others are shown."""
        verdicts: set[Verdict] = {part.verdict for part in self.parts}
        if "cannot be judged" in verdicts:
            return "cannot be judged"
        if "weak" in verdicts and verdicts <= {"weak", "shown"}:
            return "weak"
        decided = verdicts - {"weak"}
        return decided.pop() if len(decided) == 1 else "mixed"

    @property
    def numbers(self) -> str:
        """The deciding numbers in words."""
        return " ".join(text for part in self.parts for text in ("; ".join(part.cells) + ".", part.seeds) if text)

    def among(self, others: Sequence["Claim"]) -> "Claim":
        """This claim together with the same claim in other seeds."""
        by_part = zip(self.parts, *(other.parts for other in others), strict=True)
        return replace(self, parts=tuple(part.among(same) for part, *same in by_part))


def compare(
    label: str,
    values: pd.Series,
    other_label: str,
    others: pd.Series,
    *,
    higher: bool = False,
    allowance: float = 0.0,
    bounds: pd.DataFrame | None = None,
) -> Part:
    """Whether `values` are below `others` (or above, or at most a fraction `allowance` above), where both exist.

    `bounds` are the bounds of the differences, as `read.paired` returns them.
    """
    both = pd.DataFrame({"value": values, "other": others}).dropna()
    if both.empty:
        return Part(False, 0, 0, (f"{label} against {other_label}: no rows",))

    def holds(value: Any, other: Any) -> Any:
        if allowance:
            return value <= other * (1 + allowance)
        return value > other if higher else value < other

    value, other = both["value"].mean(), both["other"].mean()
    interval = mean_interval(both["value"] - both["other"], bounds)
    edge = allowance * other
    within = interval is not None and interval[0] <= edge <= interval[1]
    significant = abs(value - other - edge) > UNCHANGED * other and not within
    agreeing = int(holds(both["value"], both["other"]).sum())
    how = f"at most {100 * allowance:g}% higher" if allowance else "higher" if higher else "lower"
    agreed = f"{agreeing} of {len(both)}"
    if bounds is not None and len(bounds) and not allowance:
        sure = int(((bounds["low"] > 0) if higher else (bounds["high"] < 0)).sum())
        agreed += f" ({sure} of {len(bounds)})"
    cells = (
        f"{label} {value:.2f} against {other_label} {other:.2f}: {how}",
        as_percent(value / other - 1),
        " to ".join(as_percent(bound / other) for bound in interval) if interval else "–",
        agreed,
    )
    return Part(bool(holds(value, other)), agreeing, len(both), cells, bool(significant))


def mean_interval(difference: pd.Series, bounds: pd.DataFrame | None) -> tuple[float, float] | None:
    """The 95% interval of the mean of `difference`, if all its domains have one in `bounds`: their errors add up.

    Both have one row per domain; `bounds` has the columns low and high.
    """
    if bounds is None or not set(difference.index) <= set(bounds.index):
        return None
    halves = (bounds["high"] - bounds["low"]).loc[difference.index] / 2
    error = math.sqrt((halves**2).sum()) / len(halves)
    return float(difference.mean()) - error, float(difference.mean()) + error


def as_percent(change: float) -> str:
    """A relative change as text: −0.05 is −5.0%."""
    return f"{100 * change:+.1f}%".replace("-", "−")
