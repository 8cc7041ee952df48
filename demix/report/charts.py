"""Charts: the common style, their files, training curves, dots with intervals, and heat maps."""

import itertools
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import vl_convert

from demix.files import replacing, write_text
from demix.report.ranking import Entry, Ranking
from demix.report.read import MAX_SHOWN, Domains, read_metrics
from demix.report.run_data import RunData
from demix.report.table import render
from demix.run.run import Run

FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
# Dark text is readable on every colour of the range (contrast above 6 to 1).
CELL_RANGE = ["#f7fbff", "#9ecae1", "#4292c6"]
# Okabe and Ito's colours are distinct for every common colour blindness; dashes distinguish lines, too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#56b4e9", "#e69f00", "#999999")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2], [4, 4], [10, 4], [1, 3], [6, 2, 1, 2])


def finish(chart: Any, title: str, subtitle: str, *, characters: int = 150) -> alt.TopLevelMixin:
    """`chart` with a title, a subtitle in lines of at most `characters`, and the style of all figures."""
    # All at once: each method of a chart copies it with its data.
    finished: alt.TopLevelMixin = chart.properties(
        title=alt.Title(title, subtitle=_balanced(subtitle, characters), anchor="start", offset=14, fontSize=16),
        background="white",
        config=alt.Config(
            font=FONT,
            # A reader's font may be wider than the one with which legends were measured.
            padding={"left": 15, "top": 5, "right": 25, "bottom": 5},
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


def by_panel(chart: alt.Chart, field: str, names: Sequence[str], spacing: int) -> alt.FacetChart:
    """`chart` as small panels in rows of four, one for each of `names`, the values of a field."""
    header = alt.Header(title=None, labelAnchor="start", labelFontSize=12)
    panels = chart.facet(alt.Facet(f"{field}:N", sort=[*names], header=header), columns=4, spacing=spacing)
    figure: alt.FacetChart = panels.resolve_scale(x="independent")
    return figure


def share_scale(colours: Sequence[str] = CELL_RANGE, most: float = 1) -> alt.Scale:
    """The colours of cells whose values go from 0 to `most`."""
    return alt.Scale(domain=[0, most], range=list(colours), interpolate="lab")


def by_line(field: str, names: list[str], legend: alt.Legend) -> dict[str, Any]:
    """A colour and a dash for each of `names`, the values of a field."""

    def cycled(values: Sequence[Any]) -> dict[str, Any]:
        scale = alt.Scale(domain=names, range=list(itertools.islice(itertools.cycle(values), len(names))))
        return {"shorthand": f"{field}:N", "scale": scale, "legend": legend, "sort": names}

    return {"color": alt.Color(**cycled(COLOURS)), "strokeDash": alt.StrokeDash(**cycled(DASHES))}


def _balanced(text: str, width: int) -> list[str]:
    """`text` in as few lines of `width` characters as possible, of about equal length, so the last is not one word."""
    lines = len(_wrapped(text, width))
    return next(found for limit in range(len(text) // lines, width + 1) if len(found := _wrapped(text, limit)) == lines)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def data_of(rows: Iterable[dict[str, Any]] | pd.DataFrame) -> alt.InlineData:
    """The data of a chart; the numbers of a frame pass through `finite`."""
    if isinstance(rows, pd.DataFrame):
        rows = [
            {name: finite(value) if isinstance(value, float) else value for name, value in row.items()}
            for row in rows.to_dict("records")
        ]
    # A list is copied, row by row, each time that a chart becomes a part of another one.
    return alt.InlineData(values=tuple(rows))


def finite(value: Any) -> float | None:
    """`value` for strict JSON: NaN and infinities become None. Six digits are kept, more than a drawing shows."""
    return float(f"{float(value):.6g}") if value is not None and np.isfinite(value) else None


VERSION = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])


@cache
def _vega() -> str:
    """The code that draws a chart in a page."""
    code: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VERSION)
    return code


def renumbered(svg: str) -> str:
    """`svg` with ids numbered from 0, since Vega continues its count from one figure of a process to the next."""
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        name = numbers.setdefault(match[2], f"id{len(numbers)}")
        return f"{match[1]}{name}{match[3]}"

    return re.sub(r"""( id="|url\(#)([^")]+)("|\))""", number, svg)


def write_chart(name: str, chart: alt.TopLevelMixin, output_dir: Path) -> None:
    """Write a chart as `<name>.json`, `.html`, `.svg` and `.pdf` into `output_dir`.

    The JSON is Vega-Lite with its data. The HTML page is self-contained; it shows the numbers under the pointer and
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
    with replacing(output_dir / f"{name}.pdf") as temporary:
        temporary.write_bytes(vl_convert.svg_to_pdf(svg))


def inline(chart: alt.TopLevelMixin) -> str:
    """The drawing of a chart as a part of a page, without XML namespaces, which a page does not need."""
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg_of(json.dumps(_drawn(chart), allow_nan=False)))


def _drawn(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """A chart as Vega-Lite. A chart without data becomes a text that says so, since it would have no size."""
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


# The loss of a step is noisy. Means over spans of steps show the trend and keep the figure of a long run small.
CURVE_POINTS = 40
# Points show where a curve was measured; a pointer on a point shows its numbers.
POINTS = {"size": 20, "filled": True}


def token_axis(ticks: int) -> alt.Axis:
    """The axis of tokens, with about `ticks` ticks."""
    return alt.Axis(tickCount=ticks, labelExpr="datum.value ? format(datum.value, '~s') : '0'")


def training_curves(metrics_dir: str | Path, run: Run, key: str = "loss", domains: Sequence[str] = ()) -> pd.DataFrame:
    """Loss (nats per token) by tokens, of the models that `run` trains: columns model, tokens, loss.

    `key` is `loss` (of the training batches) or `dev_loss` (if the run measures it): the mean over `domains` if a row
    has all of these, otherwise over the model's domains. Long runs are reduced to means over equal spans of steps.
    """

    def value(line: dict[str, Any]) -> Any:
        losses = [line[one] for name in domains if line.get(one := f"{key}/{name}") is not None]
        return np.mean(losses) if losses and len(losses) == len(domains) else line.get(key)

    frames = []
    for name in sorted(model.name for model in run.trained):
        path = Path(metrics_dir) / f"{name}.jsonl"
        rows = [(line["tokens"], found) for line in read_metrics(path) if (found := value(line)) is not None]
        frame = pd.DataFrame(rows, columns=["tokens", "loss"]).astype("float64")
        span = -(-len(frame) // CURVE_POINTS) or 1
        frame = frame.groupby(np.arange(len(frame)) // span).mean()
        frames.append(frame.assign(model=path.stem))
    columns = ["model", "tokens", "loss"]
    return pd.concat(frames)[columns] if frames else pd.DataFrame(columns=columns)


# The largest change, in percent, that is shown: larger ones would leave no room for the others.
MOST = 30
# The width of names in pixels that leaves room for dots on a telephone.
NARROW = 150


def ranked(ranking: Ranking, *, narrow: bool = False) -> alt.TopLevelMixin:
    """The changes of the main lines relative to Dense (Balanced), with intervals, in a panel for each kind of domains.

    Lines whose mean change exceeds `MOST` are left out. Models with experts are blue, baselines grey. The panels are
    side by side, or with `narrow` (for a telephone) one below the other.
    """
    shown = [one for one in ranking.main if not any(each.change > MOST for each in one.on.values())]
    beyond = (one for one in ranking.main if one not in shown)
    left_out = "".join(f" Beyond the axis: {one.label} ({one.first.change:+.0f}%)." for one in beyond)
    left_out += " Oracles, which are chosen on test data, are not shown." * any(one.oracle for one in shown)
    colours = alt.Scale(domain=["experts", "baseline"], range=[COLOURS[0], "#767676"])
    at_zero = alt.Chart(data_of([{"zero": 0}])).mark_rule(color="#888888").encode(x="zero:Q")
    panels = []
    for number, domains in enumerate(ranking.data.kinds):
        named = alt.Axis(labels=narrow or not number, labelLimit=NARROW if narrow else 0)
        chart = alt.Chart(data_of([_record(one, domains) for one in shown if not one.oracle_on(domains.kind)])).encode(
            y=alt.Y("system:N", title=None, scale=alt.Scale(domain=[one.label for one in shown]), axis=named),
            color=alt.Color("what:N", scale=colours, legend=None),
        )
        said = f"change from {ranking.dense.label} in %, {domains.said}"
        low, value = (
            alt.X(
                f"{name}:Q",
                title=["change in %,", domains.said] if narrow else said,
                scale=alt.Scale(zero=False),
                axis=alt.Axis(tickCount=5),
            )
            for name in ("low", "value")
        )
        # The dots have names for screen readers. The lines have none: without intervals, screen readers would find an
        # image without text.
        rule = chart.mark_rule(strokeWidth=1.5, aria=False).encode(x=low, x2="high:Q")
        layers = alt.layer(at_zero, rule, chart.mark_point(filled=True, size=30, opacity=1).encode(x=value))
        panels.append(layers.properties(width=120 if narrow else 420, height=alt.Step(20)))
    return finish(
        (alt.vconcat if narrow else alt.hconcat)(*panels, spacing=24),
        "Change, with 95% interval" if narrow else "Change from the dense model, with 95% interval",
        "Change of mean test perplexity; left of 0 is better. Blue: with experts, grey: without. Horizontal lines are "
        f"95% intervals, from resampling the test documents, the same ones for both models.{left_out}",
        characters=48 if narrow else 150,
    )


def _record(entry: Entry, domains: Domains) -> dict[str, Any]:
    measured = entry.on[domains.kind]
    low, high = measured.interval or (measured.change, measured.change)
    found = {"value": measured.change, "low": low, "high": high}
    return {"system": entry.label, "what": entry.what} | {name: finite(one) for name, one in found.items()}


CELL_WIDTH, CELL_HEIGHT = 50, 26
TRACE_WIDTH = 240
BLOCKS_SHOWN = 100
PROBABILITY_LEGEND = alt.Legend(title="probability", values=[0, 0.25, 0.5, 0.75, 1], format=".2f")
SHARE_LEGEND = alt.Legend(title="share", format=".0%", titlePadding=8)


def posterior_figure(data: RunData, kind: str, domains: list[str]) -> tuple[alt.FacetChart, str]:
    """Figures 7 (`kind` training) and 8 (novel): the posterior over training experts after each block of a domain."""
    rows = data.rows("posteriors").query(
        "model == 'demix' and experts == 'training' and weights == 'history' and split == 'dev' and seed == seed.min()"
    )
    experts, panels = data.training[:MAX_SHOWN], domains[:MAX_SHOWN]
    drawn = rows[rows["expert"].isin(experts) & rows["domain"].isin(panels) & (rows["block"] < BLOCKS_SHOWN)]
    blocks, axis = max([1, *drawn["block"] + 1]), alt.Axis(tickCount=5, tickMinStep=1, grid=False)
    chart = alt.Chart(data_of(_stretches(drawn))).mark_rect(strokeWidth=0)
    chart = chart.encode(
        x=alt.X("start:Q", title="blocks read", axis=axis, scale=alt.Scale(nice=False, zero=True)),
        x2="end:Q",
        y=alt.Y("expert:N", sort=experts, title="expert", scale=alt.Scale(domain=experts)),
        color=alt.Color("value:Q", scale=share_scale(), legend=PROBABILITY_LEGEND),
    ).properties(
        # The width is a multiple of the number of blocks: blocks that begin between two pixels would show seams.
        width=max(1, TRACE_WIDTH // blocks) * blocks,
        height=14 * len(experts),
        view=alt.ViewBackground(stroke="#cccccc", fill=CELL_RANGE[0]),
    )
    figure = by_panel(chart, "domain", panels, spacing=18)
    shown = which_shown(domains=domains, experts=data.training)
    said = f"Shown: {shown}. " * bool(shown) + "This run has no such numbers." * rows[rows["kind"] == kind].empty
    return figure, said


def which_shown(**named: list[str]) -> str:
    """The part of long lists of names that a figure shows, in words; empty if it shows all names."""
    more = {what: names for what, names in named.items() if len(names) > MAX_SHOWN}
    return ", ".join(f"the first {MAX_SHOWN} of {len(names)} {what}" for what, names in more.items())


def _stretches(found: pd.DataFrame) -> pd.DataFrame:
    """A row for each domain, expert and stretch of blocks with the same printed posterior, except 0.00."""
    same = ["domain", "expert", "value"]
    shown = (
        found.assign(value=found["posterior"].round(2)).query("value > 0").sort_values(["domain", "expert", "block"])
    )
    changes = shown["block"].diff().ne(1) | shown[same].ne(shown[same].shift()).any(axis=1)
    blocks = shown.groupby([changes.cumsum(), *same])["block"].agg(["min", "max"]).reset_index(same)
    return blocks.assign(start=blocks["min"], end=blocks["max"] + 1)[[*same, "start", "end"]]


def heat_maps(
    tables: Mapping[str, pd.DataFrame],
    scale: alt.Scale,
    *,
    legend: alt.Legend,
    heading: str = "{}",
    form: str = ".2f",
    over: str = "expert",
) -> alt.HConcatChart:
    """Heat maps of tables of domains (rows) and experts (columns), side by side, each under the name of its table.

    `over` is the title of the columns. Only the first `MAX_SHOWN` rows and columns are shown; “–” stands for NaN.
    """
    panels = []
    for name, table in tables.items():
        shown = which_shown(rows=[*table.index], columns=[*table.columns])
        table = table.iloc[:MAX_SHOWN, :MAX_SHOWN].rename_axis(index="domain", columns="expert")
        domains, columns = [*table.index], [*table.columns]
        values = table.stack(future_stack=True).rename("value").reset_index().assign(kind=name)
        base = alt.Chart(data_of(values[["kind", "domain", "expert", "value"]])).encode(
            x=alt.X(
                "expert:N", sort=columns, title=over, scale=alt.Scale(domain=columns), axis=alt.Axis(labelAngle=-40)
            ),
            y=alt.Y("domain:N", sort=domains, title=None, scale=alt.Scale(domain=domains)),
        )
        squares = base.mark_rect(stroke="white", strokeWidth=1).encode(
            color=alt.condition(
                "isValid(datum.value)",
                alt.Color("value:Q", scale=scale, legend=legend),
                alt.value("#eeeeee"),
            )
        )
        text = base.mark_text(fontSize=12).encode(
            text=alt.condition("isValid(datum.value)", alt.Text("value:Q", format=form), alt.value("–")),
            color=alt.value("#1a1a1a"),
        )
        panels.append(
            (squares + text).properties(
                width=CELL_WIDTH * len(columns),
                height=CELL_HEIGHT * len(domains),
                title=heading_of(heading.format(name) + f" ({shown})" * bool(shown)),
            )
        )
    return alt.hconcat(*panels, spacing=24)
