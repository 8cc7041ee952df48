"""The figures of a report as files: Vega-Lite JSON with its data, HTML, SVG, PDF and PNG, made without a network."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from demix.files import replacing, write_text
from demix.report.page import render

PNG_SCALE = 2.0
VERSION = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])


@cache
def _vega() -> str:
    """The code that draws a chart in a page."""
    code: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VERSION)
    return code


def renumbered(svg: str) -> str:
    """`svg` with ids numbered from 0: Vega continues the count from one figure of a process to the next."""
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        name = numbers.setdefault(match[2], f"id{len(numbers)}")
        return f"{match[1]}{name}{match[3]}"

    return re.sub(r"""( id="|url\(#)([^")]+)("|\))""", number, svg)


def write_chart(name: str, chart: alt.TopLevelMixin, output_dir: Path) -> None:
    """Write a chart as `<name>.json`, `.html`, `.svg`, `.pdf` and `.png` into `output_dir`.

    The JSON is Vega-Lite, data included. The HTML page is self-contained. It shows the numbers under the pointer and
    can save the figure.
    """
    drawn = _drawn(chart)
    text = json.dumps(drawn, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"
    write_text(output_dir / f"{name}.json", text)
    # The page has title and caption as text, which wraps on a narrow screen.
    title, untitled = drawn["title"], json.dumps({key: value for key, value in drawn.items() if key != "title"})
    caption, chart_text = " ".join(title["subtitle"]), untitled.replace("<", "\\u003c")
    page = render("figure", title=title["text"], caption=caption, vega=_vega(), chart=chart_text)
    write_text(output_dir / f"{name}.html", page)
    svg = svg_of(text)
    write_text(output_dir / f"{name}.svg", svg)
    pictures = {"pdf": vl_convert.svg_to_pdf(svg), "png": vl_convert.svg_to_png(svg, scale=PNG_SCALE)}
    for suffix, picture in pictures.items():
        with replacing(output_dir / f"{name}.{suffix}") as temporary:
            temporary.write_bytes(picture)


def inline(chart: alt.TopLevelMixin) -> str:
    """The drawing of a chart as a part of a page, which needs no name spaces."""
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg_of(json.dumps(_drawn(chart), allow_nan=False)))


def _drawn(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """A chart as Vega-Lite. One whose data have no row says so in their place: it could have no size."""
    drawn: dict[str, Any] = chart.to_dict()
    if any(drawn.get("datasets", {}).values()):
        return drawn
    said = alt.Chart(alt.InlineData(values=[{}])).mark_text(text="No numbers to draw.", fontSize=13)
    kept = {key: value for key, value in drawn.items() if key in ("title", "config", "background")}
    empty: dict[str, Any] = said.properties(width=400, height=60).to_dict()
    return empty | kept


def svg_of(chart: str) -> str:
    """The drawing of a chart, which is JSON."""
    return renumbered(vl_convert.vegalite_to_svg(chart, vl_version=VERSION))
