"""The figures of a report as files: Vega-Lite JSON with its data, HTML, SVG and PNG, made without a network."""

import json
import re
from functools import cache
from pathlib import Path

import altair as alt
import pandas as pd
import vl_convert

from demix.files import replacing, write_text
from demix.report import left_out
from demix.report.curves import figure6, training_figure
from demix.report.heatmaps import figure2, figure4, posterior_figure
from demix.report.page import render
from demix.report.read import Results
from demix.run.run import Run

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


def write_figures(
    results: Results,
    priors: pd.DataFrame,
    overlap: pd.DataFrame,
    posteriors: pd.DataFrame,
    metrics_dir: str | Path,
    run: Run,
    output_dir: str | Path,
) -> None:
    """Write each figure that the run has as `<name>.json`, `.html`, `.svg` and `.png` into `output_dir`.

    The JSON is Vega-Lite, data included. The HTML page is self-contained. It shows the numbers under the pointer and
    can save the figure.
    """
    charts = {
        "figure2": figure2(results, overlap, run),
        "figure4": figure4(priors, posteriors, run),
        "figure6": figure6(metrics_dir, run),
        "figure7": posterior_figure(posteriors, run, "training"),
        "figure8": posterior_figure(posteriors, run, "novel"),
        "training": training_figure(metrics_dir, run),
    }
    write_charts({name: chart for name, chart in charts.items() if name not in left_out(run)}, output_dir)


def write_charts(charts: dict[str, alt.TopLevelMixin], output_dir: str | Path) -> None:
    """Write each chart as `<name>.json`, `.html`, `.svg` and `.png` into `output_dir`."""
    for name in sorted(charts):
        drawn = charts[name].to_dict()
        text = json.dumps(drawn, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"
        write_text(Path(output_dir) / f"{name}.json", text)
        write_text(
            Path(output_dir) / f"{name}.html",
            render("figure", title=drawn["title"]["text"], vega=_vega(), chart=text.replace("<", "\\u003c")),
        )
        svg = renumbered(vl_convert.vegalite_to_svg(text, vl_version=VERSION))
        write_text(Path(output_dir) / f"{name}.svg", svg)
        with replacing(Path(output_dir) / f"{name}.png") as temporary:
            temporary.write_bytes(vl_convert.svg_to_png(svg, scale=PNG_SCALE))
