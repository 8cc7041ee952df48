"""Figures 2, 4, 6, 7, 8 of the paper and the training curves: Vega-Lite JSON with its data, SVG, PNG, made offline."""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import vl_convert

from demix.config.systems import trained
from demix.files import replacing, write_text
from demix.report.affinity import affinities, relations, with_overlap
from demix.report.page import render
from demix.report.read import (
    comparable,
    novel_domains,
    prior_table,
    read_metrics,
    training_domains,
)

FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
CELL_WIDTH, CELL_HEIGHT = 50, 26
CELL_RANGE = ["#f7fbff", "#6baed6", "#08306b"]
SHARE_RANGE = ["#f7fcf5", "#74c476", "#00441b"]
# Past this part of each, white text has the better contrast.
CELL_DARK, SHARE_DARK = 0.68, 0.76
# Okabe and Ito's colours, told apart with every common kind of colour blindness; dashes say the same again.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#56b4e9", "#e69f00", "#999999")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2], [4, 4], [10, 4], [1, 3], [6, 2, 1, 2])
PANEL_COLUMNS = 4
# A step's loss is noisy: means over spans of steps show the trend, and keep a long run's figure small.
CURVE_POINTS = 100
TRACE_COLUMNS = 4
BLOCKS_SHOWN = 100
PNG_SCALE = 2.0
# Not to be seen: what the pointer finds on a line, whose numbers are then told.
POINTS = {"opacity": 0, "size": 80}


def figure2(results: pd.DataFrame, overlap: pd.DataFrame, config: dict[str, Any]) -> alt.TopLevelMixin:
    """Figure 2: perplexity of each training expert on each domain, over that of the domain's own (or best) expert.

    Below it the bigrams that a domain shares with each training domain, and one against the other.
    """
    training, novel = training_domains(config), novel_domains(config)
    pairs = with_overlap(affinities(results, config), overlap)
    top = max([1.1, *pairs["ratio"].dropna()])
    scale = alt.Scale(type="log", domain=[1, top], range=CELL_RANGE, interpolate="lab", clamp=True)
    ratios = [
        {"kind": row.kind, "domain": row.domain, "expert": row.expert, "value": _number(row.ratio),
         "dark": bool(np.log(max(row.ratio, 1)) > CELL_DARK * np.log(top))}
        for row in pairs.itertuples()
    ]  # fmt: skip
    most = max([0.1, *pairs["overlap"].dropna()])
    shares = [
        {"kind": row.kind, "domain": row.domain, "expert": row.expert, "value": _number(row.overlap),
         "dark": bool(row.overlap > SHARE_DARK * most)}
        for row in pairs.itertuples()
    ]  # fmt: skip
    panels = [
        _heatmaps(
            ratios,
            {
                "training": (training, "Perplexity ratio, training domains"),
                "novel": (novel, "Perplexity ratio, novel domains"),
            },
            training,
            scale,
            legend=alt.Legend(
                title="perplexity ratio", values=[float(f"{x:.6g}") for x in np.geomspace(1, top, 5)], format=".2f"
            ),
        )
    ]
    if pairs["overlap"].notna().any():
        halves = {
            "training": (training, "Bigram overlap, training domains"),
            "novel": (novel, "Bigram overlap, novel domains"),
        }
        panels += [
            _heatmaps(
                shares,
                halves,
                training,
                alt.Scale(domain=[0, most], range=SHARE_RANGE, interpolate="lab"),
                legend=alt.Legend(title="bigrams shared", format=".0%", tickCount=5),
                form=".0%",
            ),
            _scatters(pairs),
        ]
    return _finish(
        alt.vconcat(*panels, spacing=28).resolve_scale(color="independent"),
        "Figure 2: how well each expert predicts each domain, and the bigrams that they share",
        "Top: test perplexity of an expert (column) on a domain (row), over that of the domain's own expert (training "
        "domains) or of the best expert (novel domains). 1 is best. Middle: share of the bigrams of a domain's test "
        "split that occur in the expert's training text. Bottom: the one against the other, a point a pair."
        + ("" if pairs["ratio"].notna().any() else " This run has none of these numbers."),
    )


def _scatters(pairs: pd.DataFrame) -> alt.HConcatChart:
    """The perplexity ratio over the bigram overlap, a point a pair, and their correlation in words."""
    panels = []
    for relation in relations(pairs):
        points = pairs[pairs["kind"] == relation.kind].dropna()
        if relation.kind == "training":
            points = points[points["domain"] != points["expert"]]
        values = [
            {"domain": row.domain, "expert": row.expert, "overlap": _number(row.overlap), "ratio": _number(row.ratio)}
            for row in points.itertuples()
        ]
        told = f"{relation.kind} domains" + (", own expert left out" if relation.kind == "training" else "")
        if np.isfinite(relation.spearman):
            told += (
                (
                    f": Spearman {relation.spearman:+.2f} over {relation.pairs} pairs of {relation.domains} domains "
                    f"(p = {relation.permutation_p:.2g}, domains permuted)"
                )
                .replace("+-", "−")
                .replace("-0.", "−0.")
            )
        panels.append(
            alt.Chart(alt.InlineData(values=values))
            .mark_point(size=45, filled=True, opacity=0.75, color=COLOURS[0])
            .encode(
                x=alt.X(
                    "overlap:Q",
                    title="bigrams shared",
                    axis=alt.Axis(format=".0%", tickCount=6),
                    scale=alt.Scale(zero=False),
                ),
                y=alt.Y("ratio:Q", title="perplexity ratio (log)", scale=alt.Scale(type="log", nice=False)),
                tooltip=["domain:N", "expert:N", "overlap:Q", "ratio:Q"],
            )
            .properties(
                width=400,
                height=200,
                title=alt.Title(textwrap.wrap(told, 70), anchor="start", fontSize=12, fontWeight="normal"),
            )
        )
    return alt.hconcat(*panels, spacing=60)


def figure4(priors: pd.DataFrame, config: dict[str, Any]) -> alt.TopLevelMixin:
    """Figure 4: the cached prior over the training experts (`history`), on training and on novel domains."""
    training, novel = training_domains(config), novel_domains(config)
    rows = []
    for kind, domains in (("training", training), ("novel", novel)):
        for domain, row in prior_table(priors, "demix", training, domains).iterrows():
            for expert, prior in row.items():
                dark = bool(prior > CELL_DARK)
                rows.append({"kind": kind, "domain": domain, "expert": expert, "value": _number(prior), "dark": dark})
    scale = alt.Scale(domain=[0, 1], range=CELL_RANGE, interpolate="lab")
    chart = _heatmaps(
        rows,
        {"training": (training, "Training domains"), "novel": (novel, "Novel domains")},
        training,
        scale,
        legend=alt.Legend(title="probability", values=[0, 0.25, 0.5, 0.75, 1], format=".2f"),
    )
    return _finish(
        chart,
        "Figure 4: which experts the posterior chooses for each domain",
        "Cached prior: the posterior over the training experts (columns) after reading the domain's dev split (rows). "
        "Each row sums to 1."
        + ("" if any(row["value"] is not None for row in rows) else " This run has none of these numbers."),
    )


def posterior_figure(posteriors: pd.DataFrame, config: dict[str, Any], kind: str) -> alt.TopLevelMixin:
    """Figures 7 (`kind` training) and 8 (novel): the posterior over training experts after each block of a domain."""
    experts = training_domains(config)
    domains = experts if kind == "training" else novel_domains(config)
    rows = posteriors[
        (posteriors["model"] == "demix")
        & (posteriors["experts"] == "training")
        & (posteriors["weights"] == "history")
        & (posteriors["split"] == "test")
        & (posteriors["seed"] == posteriors["seed"].min())
        & (posteriors["block"] < BLOCKS_SHOWN)
    ]
    scale = alt.Scale(domain=[0, 1], range=CELL_RANGE, interpolate="lab")
    legend = alt.Legend(title="probability", values=[0, 0.25, 0.5, 0.75, 1], format=".2f")
    panels = []
    for index, domain in enumerate(domains):
        found = rows[(rows["domain"] == domain) & rows["expert"].isin(experts)]
        blocks = int(found["block"].max()) + 1 if len(found) else 1
        values = [
            # Overlapping hides the seams between cells; what would print as 0.00 is the panel's ground.
            {"start": row.block, "end": min(row.block + 1.05, blocks), "expert": row.expert,
             "value": _number(row.posterior)}
            for row in found[found["posterior"] >= 0.005].itertuples()
        ]  # fmt: skip
        first = index % TRACE_COLUMNS == 0
        panels.append(
            alt.Chart(alt.InlineData(values=values))
            .mark_rect()
            .encode(
                x=alt.X(
                    "start:Q", title="blocks read", axis=alt.Axis(tickCount=5, tickMinStep=1, grid=False),
                    scale=alt.Scale(nice=False, domain=[0, blocks]),
                ),
                x2="end:Q",
                y=alt.Y(
                    "expert:N", sort=experts, title="expert" if first else None, scale=alt.Scale(domain=experts),
                    axis=alt.Axis(labels=first, ticks=first),
                ),
                color=alt.Color("value:Q", scale=scale, legend=legend),
            )
            .properties(
                width=230,
                height=14 * len(experts),
                title=alt.Title(domain, anchor="start", fontSize=12, fontWeight="normal"),
                view=alt.ViewBackground(stroke="#cccccc", fill=CELL_RANGE[0]),
            )
        )  # fmt: skip
    number, what = ("7", "training") if kind == "training" else ("8", "novel")
    return _finish(
        alt.concat(*panels, columns=TRACE_COLUMNS, spacing=18),
        f"Figure {number}: the posterior over experts, block by block, on the {what} domains",
        "Each panel is one domain: the probability of each training expert (rows) after each block of the domain's "
        f"test split (the first {BLOCKS_SHOWN} at most), with the updating prior."
        + ("" if len(rows[rows["kind"] == kind]) else " This run has none of these numbers."),
    )


def _heatmaps(
    rows: list[dict[str, Any]],
    halves: dict[str, tuple[list[str], str]],
    experts: list[str],
    scale: alt.Scale,
    *,
    legend: alt.Legend,
    form: str = ".2f",
) -> alt.HConcatChart:
    """Cells of domains (rows) and experts (columns), the halves beside each other."""
    panels = []
    for kind, (domains, heading) in halves.items():
        if not domains:
            continue
        base = alt.Chart(alt.InlineData(values=[row for row in rows if row["kind"] == kind])).encode(
            x=alt.X(
                "expert:N", sort=experts, title="expert", scale=alt.Scale(domain=experts), axis=alt.Axis(labelAngle=-40)
            ),
            y=alt.Y("domain:N", sort=domains, title=None, scale=alt.Scale(domain=domains)),
        )
        cells = base.mark_rect(stroke="white", strokeWidth=1).encode(
            color=alt.condition(
                "isValid(datum.value)",
                alt.Color("value:Q", scale=scale, legend=legend),
                alt.value("#eeeeee"),
            )
        )
        text = base.mark_text(fontSize=11).encode(
            text=alt.condition("isValid(datum.value)", alt.Text("value:Q", format=form), alt.value("–")),
            color=alt.condition("datum.dark", alt.value("white"), alt.value("#1a1a1a")),
        )
        panels.append(
            (cells + text).properties(
                width=CELL_WIDTH * len(experts),
                height=CELL_HEIGHT * len(domains),
                title=alt.Title(heading, anchor="start", fontSize=13, fontWeight="normal"),
            )
        )
    return alt.hconcat(*panels, spacing=24)


def adaptation_curves(metrics_dir: str | Path, config: dict[str, Any]) -> pd.DataFrame:
    """Dev perplexity over the tokens of adaptation, from `<kind>-dapt-<domain>.jsonl`.

    Columns: domain (adapted to), kind, tokens, training (plain mean over the training domains), own; perplexities.
    Raises DemixError if a file's line is not a JSON object.
    """
    training = training_domains(config)
    rows = []
    for domain in novel_domains(config):
        for kind, label in (("dense", "Dense-DAPT"), ("demix", "DEMix-DAPT")):
            for line in read_metrics(Path(metrics_dir) / f"{kind}-dapt-{domain}.jsonl"):
                losses = [line.get(f"dev_loss/{name}") for name in training]
                own = line.get(f"dev_loss/{domain}")
                if own is None and None in losses:
                    continue
                mean = None if None in losses else _number(np.exp(np.array(losses, dtype="float64")).mean())
                perplexity = None if own is None else _number(np.exp(own))
                rows.append((domain, label, line["tokens"], mean, perplexity))
    return pd.DataFrame(rows, columns=["domain", "kind", "tokens", "training", "own"])


def figure6(metrics_dir: str | Path, config: dict[str, Any]) -> alt.TopLevelMixin:
    """Figure 6: dev perplexity of the training domains and of the new domain while adapting, dense against DEMix."""
    curves = adaptation_curves(metrics_dir, config)
    present = [domain for domain in novel_domains(config) if (curves["domain"] == domain).any()]
    parts = [
        _small_multiples(
            curves, "training", present, "Mean dev perplexity of the training domains: a rise is forgetting"
        ),
        _small_multiples(curves, "own", present, "Dev perplexity of the domain adapted to: a fall is adaptation"),
    ]
    return _finish(
        alt.vconcat(*parts, spacing=24),
        "Figure 6: adapting to a novel domain with and without forgetting",
        "Each panel is one novel domain. DEMix-DAPT trains a copy of one expert; Dense-DAPT trains every parameter of "
        "the dense (balanced) model on the same data.",
    )


def _small_multiples(curves: pd.DataFrame, part: str, domains: list[str], heading: str) -> alt.ConcatChart:
    """One small chart a domain; all of `training` on one scale of perplexity, `own` each on its own."""
    kinds = ["DEMix-DAPT", "Dense-DAPT"]
    legend = alt.Legend(title=None, orient="right", symbolSize=300, symbolType="stroke")
    values = curves[part].dropna()
    span = [_number(values.min() * 0.98), _number(values.max() * 1.02)] if part == "training" and len(values) else None
    panels = []
    for index, domain in enumerate(domains or ["no adaptation in this run"]):
        records = [
            {"kind": row.kind, "tokens": int(row.tokens), "perplexity": _number(getattr(row, part))}
            for row in curves[curves["domain"] == domain].itertuples()
        ]
        scale = alt.Scale(zero=False, domain=span, nice=False) if span else alt.Scale(zero=False)
        y_title = "dev perplexity" if index % PANEL_COLUMNS == 0 else None
        panels.append(
            alt.Chart(alt.InlineData(values=records))
            .mark_line(strokeWidth=2, point=POINTS)
            .encode(
                x=alt.X("tokens:Q", title="tokens of adaptation", axis=_token_axis(3)),
                y=alt.Y("perplexity:Q", title=y_title, scale=scale, axis=alt.Axis(tickCount=4, labelBound=True)),
                color=alt.Color("kind:N", scale=alt.Scale(domain=kinds, range=list(COLOURS[:2])), legend=legend),
                strokeDash=alt.StrokeDash(
                    "kind:N", scale=alt.Scale(domain=kinds, range=list(DASHES[:2])), legend=legend
                ),
            )
            .properties(
                width=170, height=110, title=alt.Title(domain, anchor="start", fontSize=12, fontWeight="normal")
            )
        )
    title = alt.Title(heading, anchor="start", fontSize=13, fontWeight="normal", offset=8)
    return alt.concat(*panels, columns=PANEL_COLUMNS, title=title)


def _token_axis(ticks: int) -> alt.Axis:
    return alt.Axis(tickCount=ticks, labelExpr="datum.value ? format(datum.value, '~s') : '0'")


def training_curves(metrics_dir: str | Path, config: dict[str, Any]) -> pd.DataFrame:
    """Training loss (nats a token) over tokens of the models that `config` trains: columns model, tokens, loss.

    Long runs are thinned to means over equal spans of steps.
    """
    frames = []
    for name in sorted(model.name for model in trained(config)):
        path = Path(metrics_dir) / f"{name}.jsonl"
        rows = [(line["tokens"], line["loss"]) for line in read_metrics(path) if line.get("loss") is not None]
        frame = pd.DataFrame(rows, columns=["tokens", "loss"]).astype("float64")
        span = -(-len(frame) // CURVE_POINTS) or 1
        frame = frame.groupby(np.arange(len(frame)) // span).mean()
        frames.append(frame.assign(model=path.stem))
    columns = ["model", "tokens", "loss"]
    return pd.concat(frames)[columns] if frames else pd.DataFrame(columns=columns)


def training_figure(metrics_dir: str | Path, config: dict[str, Any]) -> alt.TopLevelMixin:
    """Training loss over tokens, one line a model."""
    curves = training_curves(metrics_dir, config)
    names = {
        "demix": "DEMix",
        "dense": "Dense (Balanced)",
        "dense_unbalanced": "Dense",
        "domain_token": "+ Domain Token",
    }
    others = [name for name in dict.fromkeys(curves["model"]) if name not in names]
    names |= {name: name.replace("without-", "DEMix without ") for name in others}
    models = [label for name, label in names.items() if (curves["model"] == name).any()]
    records = [
        {"model": names[row.model], "tokens": row.tokens, "loss": _number(row.loss)} for row in curves.itertuples()
    ]
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(models))]
    dashes = [DASHES[index % len(DASHES)] for index in range(len(models))]
    legend = alt.Legend(title="model", symbolSize=300, symbolType="stroke")
    chart = (
        alt.Chart(alt.InlineData(values=records))
        .mark_line(strokeWidth=1.6, point=POINTS)
        .encode(
            x=alt.X("tokens:Q", title="training tokens", axis=_token_axis(6)),
            y=alt.Y("loss:Q", title="training loss (nats a token)", scale=alt.Scale(zero=False)),
            color=alt.Color("model:N", sort=models, scale=alt.Scale(domain=models, range=colours), legend=legend),
            strokeDash=alt.StrokeDash(
                "model:N", sort=models, scale=alt.Scale(domain=models, range=dashes), legend=legend
            ),
        )
        .properties(width=620, height=340)
    )
    return _finish(
        alt.vconcat(chart),
        "Training loss of each model",
        "Mean loss of a step's batch over the tokens trained on so far; models see different mixes of domains.",
    )


def _finish(chart: Any, title: str, subtitle: str) -> alt.TopLevelMixin:
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


def _number(value: Any) -> float | None:
    """A number that strict JSON can hold: NaN and infinities become None, digits beyond drawing are dropped."""
    return float(f"{float(value):.6g}") if value is not None and np.isfinite(value) else None


def _renumbered(svg: str) -> str:
    """`svg` with its ids numbered from 0: Vega counts them on from one figure of a process to the next."""
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        name = numbers.setdefault(match[2], f"id{len(numbers)}")
        return f"{match[1]}{name}{match[3]}"

    return re.sub(r"""( id="|url\(#)([^")]+)("|\))""", number, svg)


def write_figures(
    results: pd.DataFrame,
    priors: pd.DataFrame,
    overlap: pd.DataFrame,
    posteriors: pd.DataFrame,
    metrics_dir: str | Path,
    config: dict[str, Any],
    output_dir: str | Path,
) -> None:
    """Write each figure as `<name>.json` (Vega-Lite, data included), `.html`, `.svg` and `.png` into `output_dir`.

    The page needs nothing but itself: it tells the numbers under the pointer, and saves what it shows.
    """
    comparable(results)
    charts = {
        "figure2": figure2(results, overlap, config),
        "figure4": figure4(priors, config),
        "figure6": figure6(metrics_dir, config),
        "figure7": posterior_figure(posteriors, config, "training"),
        "figure8": posterior_figure(posteriors, config, "novel"),
        "training": training_figure(metrics_dir, config),
    }
    version = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    vega = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=version)
    for name, chart in charts.items():
        drawn = chart.to_dict()
        text = json.dumps(drawn, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"
        write_text(Path(output_dir) / f"{name}.json", text)
        write_text(
            Path(output_dir) / f"{name}.html",
            render("figure", title=drawn["title"]["text"], vega=vega, chart=text.replace("<", "\\u003c")),
        )
        svg = _renumbered(vl_convert.vegalite_to_svg(text, vl_version=version))
        write_text(Path(output_dir) / f"{name}.svg", svg)
        with replacing(Path(output_dir) / f"{name}.png") as temporary:
            temporary.write_bytes(vl_convert.svg_to_png(svg, scale=PNG_SCALE))
