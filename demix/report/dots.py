"""Dots with their intervals, a line per system: how far systems lie apart, and whether significantly."""

from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

from demix.report.domains import Domains
from demix.report.look import COLOURS, data_of, finish, finite
from demix.report.ranking import Entry, Ranking

# Changes beyond it, in percent, would press all others into a corner.
MOST = 30


def dots(
    records: list[dict[str, Any]] | pd.DataFrame,
    systems: Sequence[str],
    title: str | list[str],
    *,
    labels: bool,
    zero: bool,
    width: int = 190,
    step: int = 9,
    **more: Any,
) -> Any:
    """One panel: the value of each record with a line from low to high, in the line of its system.

    `systems` are in order, named at the left with `labels`. With `zero` a line stands at 0. A panel is `width` wide and
    a line `step` high, in pixels. `more` are encodings.
    """
    chart = alt.Chart(data_of(records)).encode(
        y=alt.Y("system:N", title=None, scale=alt.Scale(domain=list(systems)), axis=alt.Axis(labels=labels)), **more
    )
    low, value = (
        alt.X(f"{name}:Q", title=title, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))
        for name in ("low", "value")
    )
    # The dots have names for screen readers. Lines have none: without intervals, theirs would be an image without text.
    rule = chart.mark_rule(strokeWidth=1.5, aria=False).encode(x=low, x2="high:Q")
    layers: list[Any] = [rule, chart.mark_point(filled=True, size=30, opacity=1).encode(x=value)]
    if zero:
        at_zero = alt.Chart(data_of([{"zero": 0}])).mark_rule(color="#888888")
        layers.insert(0, at_zero.encode(x="zero:Q"))
    return alt.layer(*layers).properties(width=width, height=alt.Step(step))


def ranked(ranking: Ranking, *, narrow: bool = False) -> alt.TopLevelMixin:
    """The changes of the lines that matter from Dense (Balanced), a panel for each kind of domains.

    The panels stand side by side, or with `narrow`, for a telephone, one below the other.
    """
    shown, left_out = within_the_axis(ranking)
    kinds = ranking.material.kinds
    panels = [
        dots(
            [_record(one, domains) for one in shown if not one.oracle_on(domains.kind)],
            [one.label for one in shown],
            ["change in %,", domains.said] if narrow else f"change from {ranking.dense.label} in %, {domains.said}",
            labels=narrow or not number,
            zero=True,
            color=line_colour(),
            width=120 if narrow else 420,
            step=20,
        )
        for number, domains in enumerate(kinds)
    ]
    return finish(
        (alt.vconcat if narrow else alt.hconcat)(*panels, spacing=24),
        "Change, with 95% interval" if narrow else "Change from the dense model, with 95% interval",
        "Left of the line is better. Lines are 95% intervals of the change, from resampling the same test documents."
        f"{left_out}",
        characters=48 if narrow else 150,
    )


def within_the_axis(ranking: Ranking) -> tuple[list[Entry], str]:
    """The lines that matter but those whose mean change exceeds MOST, and the sentences that name what is left out."""
    shown = [one for one in ranking.main if not any(each.change > MOST for each in one.on.values())]
    beyond = [one for one in ranking.main if one not in shown]
    left_out = "".join(f" Beyond the axis: {one.label} ({one.first.change:+.0f}%)." for one in beyond)
    return shown, left_out + " Left out: the oracle of a novel domain." * any(one.oracle for one in shown)


def line_colour() -> alt.Color:
    """Models with experts are coloured, baselines grey."""
    return alt.Color(
        "what:N", scale=alt.Scale(domain=["experts", "baseline"], range=[COLOURS[0], "#767676"]), legend=None
    )


def _record(entry: Entry, domains: Domains) -> dict[str, Any]:
    measured = entry.on[domains.kind]
    low, high = measured.interval or (measured.change, measured.change)
    found = {"value": measured.change, "low": low, "high": high}
    return {"system": entry.label, "what": entry.what} | {name: finite(one) for name, one in found.items()}
