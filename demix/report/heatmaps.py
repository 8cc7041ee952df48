"""Figures 2, 4, 7 and 8 of the paper: perplexities, bigrams and posteriors by domain and expert."""

import textwrap
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from demix.report.affinity import affinities, relations, with_overlap
from demix.report.look import CELL_RANGE, COLOURS, finish, finite
from demix.report.read import Results, novel_domains, prior_table, training_domains

CELL_WIDTH, CELL_HEIGHT = 50, 26
SHARE_RANGE = ["#f7fcf5", "#74c476", "#00441b"]
# White text has the better contrast above this fraction of each range.
CELL_DARK, SHARE_DARK = 0.68, 0.76
TRACE_COLUMNS = 4
BLOCKS_SHOWN = 100


def figure2(results: Results, overlap: pd.DataFrame, config: dict[str, Any]) -> alt.TopLevelMixin:
    """Figure 2: perplexity of each training expert on each domain, over that of the domain's own (or best) expert.

    Below: the share of bigrams in common with each training domain, and a scatter plot of ratio against share.
    """
    training, novel = training_domains(config), novel_domains(config)
    pairs = with_overlap(affinities(results, config), overlap)
    top = max([1.1, *pairs["ratio"].dropna()])
    scale = alt.Scale(type="log", domain=[1, top], range=CELL_RANGE, interpolate="lab", clamp=True)
    ratios = [
        {"kind": row.kind, "domain": row.domain, "expert": row.expert, "value": finite(row.ratio),
         "dark": bool(np.log(max(row.ratio, 1)) > CELL_DARK * np.log(top))}
        for row in pairs.itertuples()
    ]  # fmt: skip
    most = max([0.1, *pairs["overlap"].dropna()])
    shares = [
        {"kind": row.kind, "domain": row.domain, "expert": row.expert, "value": finite(row.overlap),
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
    return finish(
        alt.vconcat(*panels, spacing=28).resolve_scale(color="independent"),
        "Figure 2: how well each expert predicts each domain, and the bigrams that they share",
        "Top: test perplexity of an expert (column) on a domain (row), over that of the domain's own expert (training "
        "domains) or of the best expert (novel domains). 1 is best. Middle: share of the bigrams of a domain's test "
        "split that occur in the expert's training text. Bottom: the one against the other, one point per pair."
        + ("" if pairs["ratio"].notna().any() else " This run has none of these numbers."),
    )


def _scatters(pairs: pd.DataFrame) -> alt.HConcatChart:
    """Perplexity ratio against bigram overlap, one point per pair; the title of each panel states the correlation."""
    panels = []
    for relation in relations(pairs):
        points = pairs[pairs["kind"] == relation.kind].dropna()
        if relation.kind == "training":
            points = points[points["domain"] != points["expert"]]
        values = [
            {
                "domain": row.domain,
                "expert": row.expert,
                "overlap": finite(row.overlap),
                "ratio": finite(row.ratio),
            }
            for row in points.itertuples()
        ]
        told = f"{relation.kind} domains" + (", own expert left out" if relation.kind == "training" else "")
        if np.isfinite(relation.spearman):
            told += f": Spearman {relation.spearman:+.2f} over {relation.pairs} pairs of {relation.domains} domains"
            told = told.replace("-0.", "−0.")
        if np.isfinite(relation.permutation_p):
            told += f" (p = {relation.permutation_p:.2g}, domains permuted)"
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
                rows.append({"kind": kind, "domain": domain, "expert": expert, "value": finite(prior), "dark": dark})
    scale = alt.Scale(domain=[0, 1], range=CELL_RANGE, interpolate="lab")
    chart = _heatmaps(
        rows,
        {"training": (training, "Training domains"), "novel": (novel, "Novel domains")},
        training,
        scale,
        legend=alt.Legend(title="probability", values=[0, 0.25, 0.5, 0.75, 1], format=".2f"),
    )
    return finish(
        chart,
        "Figure 4: which experts the cached prior chooses for each domain",
        "Cached prior over the training experts (columns) for each domain (rows): the mean of the posteriors after "
        "each of the first dev blocks, in which a block weighs λ times as much as the next. Each row sums to 1."
        + ("" if any(row["value"] is not None for row in rows) else " This run has none of these numbers."),
    )


def posterior_figure(posteriors: pd.DataFrame, config: dict[str, Any], kind: str) -> alt.TopLevelMixin:
    """Figures 7 (`kind` training) and 8 (novel): the posterior over training experts after each block of a domain."""
    experts = training_domains(config)
    domains = experts if kind == "training" else novel_domains(config)
    rows = posteriors.query(
        "model == 'demix' and experts == 'training' and weights == 'history' and split == 'dev' and seed == seed.min()"
        " and block < @BLOCKS_SHOWN"
    )
    scale = alt.Scale(domain=[0, 1], range=CELL_RANGE, interpolate="lab")
    legend = alt.Legend(title="probability", values=[0, 0.25, 0.5, 0.75, 1], format=".2f")
    panels = []
    for index, domain in enumerate(domains):
        found = rows[(rows["domain"] == domain) & rows["expert"].isin(experts)]
        blocks = int(found["block"].max()) + 1 if len(found) else 1
        values = [
            # An overlap hides the seams between cells. A posterior that prints as 0.00 is left to the background.
            {"start": row.block, "end": min(row.block + 1.05, blocks), "expert": row.expert,
             "value": finite(row.posterior)}
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
    return finish(
        alt.concat(*panels, columns=TRACE_COLUMNS, spacing=18),
        f"Figure {number}: the posterior over experts, block by block, on the {what} domains",
        "Each panel is one domain: the probability of each training expert (rows) after each block of the domain's "
        f"dev split (the first {BLOCKS_SHOWN} at most), with the updating prior."
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
    """Heat maps of domains (rows) and experts (columns), one per kind of domain, side by side."""
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
