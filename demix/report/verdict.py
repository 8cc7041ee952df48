"""A claim's verdict: comparisons over domains, and what they say together.

A comparison holds only if the mean over domains and more than half of the domains agree. Where both systems were
scored on the same documents, the sentence also counts the domains whose whole interval supports the claim.
"""

from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

Verdict = Literal["shown", "mixed", "not shown", "cannot be judged"]


@dataclass(frozen=True)
class Claim:
    """A statement of the paper or of ours, the verdict on this run, and the deciding numbers in sentences."""

    name: str
    statement: str
    verdict: Verdict
    numbers: str

    @property
    def shown(self) -> bool | None:
        """True if shown, False if mixed or not shown, None if rows to judge by are missing."""
        return None if self.verdict == "cannot be judged" else self.verdict == "shown"


@dataclass(frozen=True)
class Part:
    """One comparison: whether the mean agrees, the number of agreeing domains, of all domains, and a sentence."""

    mean_agrees: bool
    agreeing: int
    domains: int
    sentence: str

    @property
    def verdict(self) -> Verdict:
        if not self.domains:
            return "cannot be judged"
        majority = 2 * self.agreeing > self.domains
        if self.mean_agrees and majority:
            return "shown"
        return "mixed" if self.mean_agrees or majority else "not shown"


def compare(
    label: str,
    values: pd.Series,
    other_label: str,
    others: pd.Series,
    *,
    higher: bool = False,
    allowance: float = 0.0,
    bounds: pd.DataFrame | None = None,
    over: str = "domains",
) -> Part:
    """Whether `values` are below `others` (or above, or at most a fraction `allowance` above), where both exist.

    `bounds` are the bounds of the differences, as `read.paired` returns them. `over` names what is counted.
    """
    both = pd.DataFrame({"value": values, "other": others}).dropna()
    if both.empty:
        return Part(False, 0, 0, f"{label} against {other_label}: no rows.")

    def holds(value: Any, other: Any) -> Any:
        if allowance:
            return value <= other * (1 + allowance)
        return value > other if higher else value < other

    value, other = both["value"].mean(), both["other"].mean()
    agreeing = int(holds(both["value"], both["other"]).sum())
    how = f"at most {100 * allowance:g}% higher" if allowance else "higher" if higher else "lower"
    sentence = (
        f"{label} {value:.2f} against {other_label} {other:.2f} ({as_percent(value / other - 1)}), "
        f"{how} on {agreeing} of {len(both)} {over}{_beyond(bounds, higher)}."
    )
    return Part(bool(holds(value, other)), agreeing, len(both), sentence)


def _beyond(bounds: pd.DataFrame | None, higher: bool) -> str:
    """The number of domains on which the whole interval of the difference lies on the claimed side, as text."""
    if bounds is None or bounds.empty:
        return ""
    sure = (bounds["low"] > 0) if higher else (bounds["high"] < 0)
    return f", and so is the whole 95% interval of the difference on {sure.sum()} of {len(bounds)}"


def as_percent(change: float) -> str:
    """A relative change as text: −0.05 is −5.0%."""
    return f"{100 * change:+.1f}%".replace("-", "−")


def claim_of(name: str, statement: str, *parts: Part) -> Claim:
    """A claim that is shown if all parts are shown, and cannot be judged if one part cannot."""
    verdicts = {part.verdict for part in parts}
    verdict: Verdict
    if "cannot be judged" in verdicts:
        verdict = "cannot be judged"
    elif verdicts == {"shown"}:
        verdict = "shown"
    else:
        verdict = "not shown" if verdicts == {"not shown"} else "mixed"
    return Claim(name, statement, verdict, " ".join(part.sentence for part in parts))
