"""What all figures share: font, colours, titles, and numbers that JSON can hold."""

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
# Dark text is readable on every colour of the range (contrast above 6 to 1).
CELL_RANGE = ["#f7fbff", "#9ecae1", "#4292c6"]
# Okabe and Ito's colours are distinct under every common colour blindness; dashes repeat the distinction.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#56b4e9", "#e69f00", "#999999")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2], [4, 4], [10, 4], [1, 3], [6, 2, 1, 2])


def finish(chart: Any, title: str, subtitle: str, *, characters: int = 150) -> alt.TopLevelMixin:
    """`chart` with a title, a subtitle in lines of at most `characters`, and the look that all figures share."""
    # All at once: each method of a chart copies it with its data.
    finished: alt.TopLevelMixin = chart.properties(
        title=alt.Title(title, subtitle=_balanced(subtitle, characters), anchor="start", offset=14, fontSize=16),
        background="white",
        config=alt.Config(
            font=FONT,
            title=alt.TitleConfig(subtitleColor="#444444", subtitleFontSize=12, subtitlePadding=4),
            axis=alt.AxisConfig(
                labelFontSize=11, titleFontSize=12, titleFontWeight="normal", labelLimit=0, gridColor="#e8e8e8"
            ),
            view=alt.ViewConfig(stroke=None),
            mark=alt.MarkConfig(tooltip=True),
            legend=alt.LegendConfig(
                labelFontSize=12, titleFontSize=12, titleFontWeight="normal", gradientLength=160, labelLimit=0
            ),
        ),
    )
    return finished


def heading_of(text: str) -> alt.Title:
    """The heading of a part of a figure."""
    return alt.Title(text, anchor="start", fontSize=13, fontWeight="normal", offset=8)


def small_heading(text: str | list[str]) -> alt.Title:
    """The heading of one of several small panels."""
    return alt.Title(text, anchor="start", fontSize=12, fontWeight="normal")


def share_scale(colours: Sequence[str] = CELL_RANGE, most: float = 1) -> alt.Scale:
    """The colours of cells whose values go from 0 to `most`."""
    return alt.Scale(domain=[0, most], range=list(colours), interpolate="lab")


def coloured(field: str, names: list[str], legend: alt.Legend, **more: Any) -> alt.Color:
    """A colour for each of `names`, the values of a field."""
    return alt.Color(f"{field}:N", scale=_cycled(names, COLOURS), legend=legend, **more)


def dashed(field: str, names: list[str], legend: alt.Legend, **more: Any) -> alt.StrokeDash:
    """A dash for each of `names`, the values of a field."""
    return alt.StrokeDash(f"{field}:N", scale=_cycled(names, DASHES), legend=legend, **more)


def _cycled(names: list[str], values: Sequence[Any]) -> alt.Scale:
    return alt.Scale(domain=names, range=list(itertools.islice(itertools.cycle(values), len(names))))


def _balanced(text: str, width: int) -> list[str]:
    """`text` in as few lines as `width` characters allow, of about equal length: no word stands alone on the last."""
    lines = len(_wrapped(text, width))
    return next(found for limit in range(len(text) // lines, width + 1) if len(found := _wrapped(text, limit)) == lines)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def data_of(rows: Iterable[dict[str, Any]] | pd.DataFrame) -> alt.InlineData:
    """The data of a chart; numbers of a frame as `finite` gives them."""
    if isinstance(rows, pd.DataFrame):
        rows = [
            {name: finite(value) if isinstance(value, float) else value for name, value in row.items()}
            for row in rows.to_dict("records")
        ]
    # A list is copied, row by row, each time that a chart becomes a part of another one.
    return alt.InlineData(values=tuple(rows))


def finite(value: Any) -> float | None:
    """`value` for strict JSON: NaN and infinities become None; six digits are kept, more than a drawing shows."""
    return float(f"{float(value):.6g}") if value is not None and np.isfinite(value) else None
