"""Figures 2, 4, 7 and 8 of the paper: perplexities, bigrams and posteriors by domain and expert."""

import textwrap
from collections.abc import Iterable
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from demix.report import title_of
from demix.report.affinity import affinities, relations, with_overlap
from demix.report.cells import so_many
from demix.report.look import CELL_RANGE, COLOURS, finish, finite, heading_of
from demix.report.read import Results, novel_domains, prior_table, training_domains
from demix.run.run import Run

CELL_WIDTH, CELL_HEIGHT = 50, 26
SHARE_RANGE = ["#f7fcf5", "#a1d99b", "#41ab5d"]
TRACE_COLUMNS, TRACE_WIDTH = 4, 240
BLOCKS_SHOWN = 100
PROBABILITY_SCALE = alt.Scale(domain=[0, 1], range=CELL_RANGE, interpolate="lab")
PROBABILITY_LEGEND = alt.Legend(title="probability", values=[0, 0.25, 0.5, 0.75, 1], format=".2f")
DECAYS_SHOWN = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)


def figure2(results: Results, overlap: pd.DataFrame, run: Run) -> alt.TopLevelMixin:
    """Figure 2: perplexity of each training expert on each domain, over that of the domain's own (or best) expert.

    Below: the share of bigrams in common with each training domain, and a scatter plot of ratio against share.
    """
    training, novel = training_domains(run), novel_domains(run)
    pairs = with_overlap(affinities(results, run), overlap)
    top = max([1.1, *pairs["ratio"].dropna()])
    scale = alt.Scale(type="log", domain=[1, top], range=CELL_RANGE, interpolate="lab", clamp=True)
    ratios = [
        {"kind": row.kind, "domain": row.domain, "expert": row.expert, "value": finite(row.ratio)}
        for row in pairs.itertuples()
    ]
    most = max([0.1, *pairs["overlap"].dropna()])
    shares = [
        {"kind": row.kind, "domain": row.domain, "expert": row.expert, "value": finite(row.overlap)}
        for row in pairs.itertuples()
    ]
    panels = [
        heat_maps(
            ratios,
            {
                "training": (training, "Perplexity ratio, training domains"),
                "novel": (novel, "Perplexity ratio, novel domains"),
            },
            training,
            scale,
            legend=alt.Legend(
                title=["perplexity ratio", "(log scale)"],
                titlePadding=8,
                values=[float(f"{x:.6g}") for x in np.geomspace(1, top, 5)],
                format=".2f",
            ),
        )
    ]
    if pairs["overlap"].notna().any():
        halves = {
            "training": (training, "Bigram overlap, training domains"),
            "novel": (novel, "Bigram overlap, novel domains"),
        }
        panels += [
            heat_maps(
                shares,
                halves,
                training,
                alt.Scale(domain=[0, most], range=SHARE_RANGE, interpolate="lab"),
                legend=alt.Legend(title="bigrams shared", titlePadding=8, format=".0%", tickCount=5),
                form=".0%",
            ),
            _scatters(pairs),
        ]
    return finish(
        alt.vconcat(*panels, spacing=28).resolve_scale(color="independent"),
        title_of("figure2"),
        "Top: test perplexity of an expert (column) on a domain (row), over that of the domain's own expert (training "
        "domains) or of the best expert (novel domains). 1 is best; colours follow the logarithm. Middle: share of the "
        "bigrams of a domain's test split that occur in the expert's training text. Bottom: the one against the other, "
        "one point per pair." + ("" if pairs["ratio"].notna().any() else " This run has none of these numbers."),
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
            told += f": Spearman {relation.spearman:+.2f} over {so_many(relation.pairs, 'pair')} of "
            told += so_many(relation.domains, "domain")
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


def figure4(priors: pd.DataFrame, posteriors: pd.DataFrame, run: Run) -> alt.TopLevelMixin:
    """Figure 4: the cached prior over the training experts (`history`), on training and on novel domains.

    Below: the prior of each novel domain by the decay λ (Eq. 7), from the same posteriors.
    """
    training, novel = training_domains(run), novel_domains(run)
    settings = run.config.evaluation
    decay, blocks = settings.decay, settings.dev_blocks
    rows = []
    for kind, domains in (("training", training), ("novel", novel)):
        for domain, row in prior_table(priors, "demix", training, domains).iterrows():
            for expert, prior in row.items():
                rows.append({"kind": kind, "domain": domain, "expert": expert, "value": finite(prior)})
    parts: list[Any] = [
        heat_maps(
            rows,
            {"training": (training, "Training domains"), "novel": (novel, "Novel domains")},
            training,
            PROBABILITY_SCALE,
            legend=PROBABILITY_LEGEND,
        )
    ]
    found = _posteriors(posteriors, training).query("block < @blocks")
    panels = []
    for index, domain in enumerate(name for name in novel if (found["domain"] == name).any()):
        by_decay = priors_by_decay(found[found["domain"] == domain], (*DECAYS_SHOWN, decay))
        values = [
            {"decay": each, "expert": expert, "value": finite(prior)}
            for each, row in by_decay.iterrows()
            for expert, prior in row.items()
        ]
        panels.append(
            _panel(values, domain, training, index, gap=1, x=alt.X("decay:O", title="λ", axis=alt.Axis(labelAngle=0)))
        )
    if panels:
        heading = (
            "By λ, from the same posteriors: at λ = 0 the last dev block alone would count, at λ = 1 all count alike"
        )
        parts.append(alt.concat(*panels, columns=TRACE_COLUMNS, spacing=18, title=heading_of(heading)))
    return finish(
        alt.vconcat(*parts, spacing=28),
        title_of("figure4"),
        f"Cached prior over the training experts for each domain (rows; each sums to 1), as it stands after dev: after "
        f"the first {blocks} blocks of the domain's dev split have been read. It is the mean of the posteriors after "
        f"each of these blocks, in which a block weighs λ = {decay:g} times as much as the next"
        + (f", the last one alone {1 - decay:.2f}." if decay < 1 else ".")
        + ("" if any(row["value"] is not None for row in rows) else " This run has none of these numbers."),
    )


def priors_by_decay(posteriors: pd.DataFrame, decays: Iterable[float]) -> pd.DataFrame:
    """The cached prior of one domain by λ (Eq. 7), from its posteriors after each dev block: a row per λ.

    The posteriors are those of the run's own λ, which hardly touches them: a block outweighs its prior.
    """
    table = posteriors.pivot(index="block", columns="expert", values="posterior").sort_index()
    ages = np.arange(len(table))[::-1]
    weights = {decay: np.float64(decay) ** ages for decay in sorted(set(decays))}
    return pd.DataFrame({decay: (table.T * own / own.sum()).sum(axis=1) for decay, own in weights.items()}).T


def posterior_figure(posteriors: pd.DataFrame, run: Run, kind: str) -> alt.TopLevelMixin:
    """Figures 7 (`kind` training) and 8 (novel): the posterior over training experts after each block of a domain."""
    experts = training_domains(run)
    domains = experts if kind == "training" else novel_domains(run)
    rows = _posteriors(posteriors, experts).query("block < @BLOCKS_SHOWN")
    panels = []
    for index, domain in enumerate(domains):
        found = rows[rows["domain"] == domain]
        blocks = int(found["block"].max()) + 1 if len(found) else 1
        panels.append(
            _panel(
                _stretches(found),
                domain,
                experts,
                index,
                # Blocks that begin between two pixels would show seams.
                width=max(1, TRACE_WIDTH // blocks) * blocks,
                x=alt.X(
                    "start:Q",
                    title="blocks read",
                    axis=alt.Axis(tickCount=5, tickMinStep=1, grid=False),
                    scale=alt.Scale(nice=False, domain=[0, blocks]),
                ),
                x2="end:Q",
            )
        )
    return finish(
        alt.concat(*panels, columns=TRACE_COLUMNS, spacing=18),
        title_of("figure7" if kind == "training" else "figure8"),
        "Each panel is one domain: the probability of each training expert (rows) after each block of the domain's "
        f"dev split (the first {BLOCKS_SHOWN} at most), with the updating prior."
        + ("" if len(rows[rows["kind"] == kind]) else " This run has none of these numbers."),
    )


def _posteriors(posteriors: pd.DataFrame, experts: list[str]) -> pd.DataFrame:
    """The posteriors over the training experts of `demix` (`history`) on dev, of the run's first seed."""
    return posteriors.query(
        "model == 'demix' and experts == 'training' and weights == 'history' and split == 'dev' and seed == seed.min()"
        " and expert in @experts"
    )


def _stretches(found: pd.DataFrame) -> list[dict[str, Any]]:
    """One row per expert and stretch of blocks whose posteriors print alike; those that print 0.00 are left out."""
    shown = found.assign(value=found["posterior"].round(2)).query("value > 0").sort_values(["expert", "block"])
    changes = shown["block"].diff().ne(1) | shown["value"].diff().ne(0) | shown["expert"].ne(shown["expert"].shift())
    stretches = shown.groupby(changes.cumsum()).agg(
        start=("block", "min"), end=("block", "max"), expert=("expert", "first"), value=("value", "first")
    )
    return [
        {"start": int(row.start), "end": int(row.end) + 1, "expert": row.expert, "value": finite(row.value)}
        for row in stretches.itertuples()
    ]


def _panel(
    values: list[dict[str, Any]],
    domain: str,
    experts: list[str],
    index: int,
    *,
    width: int = TRACE_WIDTH,
    gap: int = 0,
    **x: Any,
) -> alt.Chart:
    """The `index`-th of several small heat maps: probabilities of experts (rows), against what `x` encodes."""
    first = index % TRACE_COLUMNS == 0
    panel: alt.Chart = (
        alt.Chart(alt.InlineData(values=values))
        .mark_rect(stroke="white", strokeWidth=gap)
        .encode(
            y=alt.Y(
                "expert:N",
                sort=experts,
                title="expert" if first else None,
                scale=alt.Scale(domain=experts),
                axis=alt.Axis(labels=first, ticks=first),
            ),
            color=alt.Color("value:Q", scale=PROBABILITY_SCALE, legend=PROBABILITY_LEGEND),
            **x,
        )
        .properties(
            width=width,
            height=14 * len(experts),
            title=alt.Title(domain, anchor="start", fontSize=12, fontWeight="normal"),
            view=alt.ViewBackground(stroke="#cccccc", fill=CELL_RANGE[0]),
        )
    )
    return panel


def heat_maps(
    rows: list[dict[str, Any]],
    halves: dict[str, tuple[list[str], str]],
    experts: list[str],
    scale: alt.Scale,
    *,
    legend: alt.Legend,
    form: str = ".2f",
    over: str = "expert",
) -> alt.HConcatChart:
    """Heat maps of domains (rows) and experts (columns), one per kind of domain, side by side.

    `rows` have kind, domain, expert and value. `halves` gives each kind its rows and its heading. `over` is the title
    of the columns.
    """
    panels = []
    for kind, (domains, heading) in halves.items():
        if not domains:
            continue
        base = alt.Chart(alt.InlineData(values=[row for row in rows if row["kind"] == kind])).encode(
            x=alt.X(
                "expert:N", sort=experts, title=over, scale=alt.Scale(domain=experts), axis=alt.Axis(labelAngle=-40)
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
        text = base.mark_text(fontSize=12).encode(
            text=alt.condition("isValid(datum.value)", alt.Text("value:Q", format=form), alt.value("–")),
            color=alt.value("#1a1a1a"),
        )
        panels.append(
            (cells + text).properties(
                width=CELL_WIDTH * len(experts),
                height=CELL_HEIGHT * len(domains),
                title=alt.Title(heading, anchor="start", fontSize=13, fontWeight="normal"),
            )
        )
    return alt.hconcat(*panels, spacing=24)
