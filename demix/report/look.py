"""What all figures share: font, colours, titles, and numbers that JSON can hold."""

import textwrap
from typing import Any

import altair as alt
import numpy as np

FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
CELL_RANGE = ["#f7fbff", "#6baed6", "#08306b"]
# Okabe and Ito's colours, told apart with every common kind of colour blindness; dashes say the same again.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#56b4e9", "#e69f00", "#999999")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2], [4, 4], [10, 4], [1, 3], [6, 2, 1, 2])


def finish(chart: Any, title: str, subtitle: str) -> alt.TopLevelMixin:
    """`chart` with its title and the one look that all figures share."""
    finished: alt.TopLevelMixin = (
        chart.properties(
            title=alt.Title(title, subtitle=_balanced(subtitle), anchor="start", offset=14, fontSize=16),
            background="white",
        )
        .configure(font=FONT)
        .configure_title(subtitleColor="#444444", subtitleFontSize=12, subtitlePadding=4)
        .configure_axis(labelFontSize=11, titleFontSize=12, titleFontWeight="normal", labelLimit=0, gridColor="#e8e8e8")
        .configure_view(stroke=None)
        .configure_mark(tooltip=True)
        .configure_legend(
            labelFontSize=12, titleFontSize=12, titleFontWeight="normal", gradientLength=160, labelLimit=0
        )
    )
    return finished


def _balanced(text: str, width: int = 150) -> list[str]:
    """`text` in as few lines as `width` characters allow, of about one length: no last word by itself."""
    lines = len(_wrapped(text, width))
    return next(found for limit in range(len(text) // lines, width + 1) if len(found := _wrapped(text, limit)) == lines)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def finite(value: Any) -> float | None:
    """A number that strict JSON can hold: NaN and infinities become None, digits beyond drawing are dropped."""
    return float(f"{float(value):.6g}") if value is not None and np.isfinite(value) else None
