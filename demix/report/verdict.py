"""The verdict on a claim, from comparisons over domains.

A comparison is shown only if the mean over domains and more than half of the domains agree. It is weak, whatever they
say, if its mean difference is not significant: the difference is within `UNCHANGED`, its 95% interval contains zero, or
another seed has the other sign. A claim is also weak if it is not significant after Holm's correction (1979), which is
made separately over the papers' claims and over ours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd

Verdict = Literal["shown", "weak", "mixed", "not shown", "cannot be judged"]
# The probability of one or more false claims in a family (the papers' or ours) that Holm's correction allows.
LEVEL = 0.05
# The sentence that prints a comparison, by the number of its cells.
SENTENCES = {1: "{}.".format, 4: "{}; change: {}; 95% interval: {}; domains that agree: {}.".format}
# Half of a 95% interval in standard errors.
HALF = 1.96
# Parameters that adaptation does not change give the same scores up to the order of sums.
UNCHANGED = 1e-4


@dataclass(frozen=True)
class Part:
    """One comparison: whether the mean agrees, the number of agreeing domains and of all domains, and cells of a table.

    The `cells` are the two compared systems, the change, its 95% interval, and the number of domains that agree (in
    parentheses: significantly). A comparison of another kind has one sentence. `significant` is False if the mean
    difference is not significant. `seeds` is a sentence on the agreement of other seeds. `rival` is the second system.
    `p` is the p value of the mean difference; NaN without an interval.
    """

    mean_agrees: bool
    agreeing: int
    domains: int
    cells: tuple[str, ...]
    significant: bool = True
    seeds: str = ""
    rival: str = ""
    p: float = math.nan

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
        """This part combined with the same part in other seeds: weak unless the mean gives the same answer in all seeds
        that have numbers."""
        said = [other.mean_agrees == self.mean_agrees for other in (self, *others) if other.domains]
        if len(said) < 2:
            return self
        agreement = f"The mean gives the same answer in {sum(said)} of {len(said)} seeds."
        return replace(self, seeds=agreement, significant=self.significant and all(said))


@dataclass(frozen=True)
class Claim:
    """A statement of the papers (`published`) or of ours, and the comparisons that decide on it.

    `adjusted` is `p` after Holm's correction over a family of claims; NaN before the correction, and without `p`.
    """

    name: str
    statement: str
    parts: tuple[Part, ...]
    published: bool = True
    adjusted: float = math.nan

    @property
    def verdict(self) -> Verdict:
        """The verdict of the parts if they agree; weak if some are weak and the others shown or not shown; else mixed.

        A verdict shown or not shown becomes weak if it is not significant after the correction.
        """
        verdicts: set[Verdict] = {part.verdict for part in self.parts}
        if "cannot be judged" in verdicts:
            return "cannot be judged"
        decided = verdicts - {"weak"}
        if len(decided) > 1 or decided == {"mixed"}:
            return "mixed"
        return "weak" if "weak" in verdicts or self.adjusted > LEVEL else decided.pop()

    @property
    def p(self) -> float:
        """The largest p of the parts, since a claim is shown only if all parts are; NaN if no part has a p."""
        return max((part.p for part in self.parts if not math.isnan(part.p)), default=math.nan)

    @property
    def said(self) -> str:
        """The verdict, with the systems against which the claim is shown."""
        verdicts: dict[str, set[Verdict]] = {}
        for part in (part for part in self.parts if part.rival):
            verdicts.setdefault(part.rival, set()).add(part.verdict)
        shown = [rival for rival, found in verdicts.items() if found == {"shown"}]
        if not shown or self.verdict not in ("shown", "mixed"):
            return self.verdict
        return f"{'shown' if self.verdict == 'shown' else 'mixed: shown'} compared with {', '.join(shown)}"

    @property
    def numbers(self) -> str:
        """The numbers that decide, as sentences."""
        found = [text for part in self.parts for text in (SENTENCES[len(part.cells)](*part.cells), part.seeds) if text]
        return " ".join([*found, *[self.corrected] * bool(self.corrected)])

    @property
    def corrected(self) -> str:
        """The corrected p as a sentence; empty if there is none."""
        if math.isnan(self.adjusted):
            return ""
        return f"After Holm's correction, p {'< 0.0001' if self.adjusted < 1e-4 else f'= {self.adjusted:.2g}'}."

    def among(self, others: Sequence["Claim"]) -> "Claim":
        """This claim combined with the same claim in other seeds."""
        by_part = zip(self.parts, *(other.parts for other in others), strict=True)
        return replace(self, parts=tuple(part.among(same) for part, *same in by_part))


def corrected(claims: Sequence[Claim]) -> list[Claim]:
    """Claims with Holm's correction of p, made separately over the published claims and over ours.

    Of m sorted values, the i-th (from 0) becomes p·(m - i), or the corrected value before it if that is larger.
    """
    adjusted: dict[str, float] = {}
    for family in (True, False):
        known = sorted((one.p, one.name) for one in claims if one.published == family and not math.isnan(one.p))
        highest = 0.0
        for place, (p, name) in enumerate(known):
            highest = adjusted[name] = max(highest, min(1.0, (len(known) - place) * p))
    return [replace(one, adjusted=adjusted.get(one.name, math.nan)) for one in claims]


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
    """Whether `values` are below `others` (`higher`: above; `allowance`: at most this fraction above), on domains of
    both.

    `bounds` are the bounds of the differences, as `read.paired` returns them.
    """
    both = pd.DataFrame({"value": values, "other": others}).dropna()
    if both.empty:
        return Part(False, 0, 0, (f"{label} and {other_label}: no numbers",))

    def holds(value: Any, other: Any) -> Any:
        if allowance:
            return value <= other * (1 + allowance)
        return value > other if higher else value < other

    value, other = both["value"].mean(), both["other"].mean()
    interval = mean_interval(both["value"] - both["other"], bounds)
    edge = allowance * other
    within = interval is not None and interval[0] <= edge <= interval[1]
    distance, p = abs(value - other - edge), math.nan
    significant = distance > UNCHANGED * other and not within
    if interval and interval[1] > interval[0]:
        p = math.erfc(HALF * distance / (interval[1] - interval[0]) * math.sqrt(2))
    agreeing = int(holds(both["value"], both["other"]).sum())
    how = f"at most {100 * allowance:g}% higher" if allowance else "higher" if higher else "lower"
    agreed = f"{agreeing} of {len(both)}"
    if bounds is not None and len(bounds) and not allowance:
        sure = int(((bounds["low"] > 0) if higher else (bounds["high"] < 0)).sum())
        agreed += f" ({sure} of {len(bounds)})"
    cells = (
        f"{label}: {value:.2f}; {other_label}: {other:.2f}; claimed: {how}",
        as_percent(value / other - 1),
        " to ".join(as_percent(bound / other) for bound in interval) if interval else "–",
        agreed,
    )
    return Part(bool(holds(value, other)), agreeing, len(both), cells, bool(significant), p=p)


def mean_interval(difference: pd.Series, bounds: pd.DataFrame | None) -> tuple[float, float] | None:
    """The 95% interval of the mean of `difference`, if `bounds` has an interval for all its domains; variances add up.

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
