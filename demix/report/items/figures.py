"""Figures of the domains: experts and domains, priors, posteriors block by block, changes, training and adaptation."""

import textwrap
from itertools import product
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from demix.progress import so_many
from demix.report.charts import (
    CELL_RANGE,
    COLOURS,
    POINTS,
    PROBABILITY_LEGEND,
    by_line,
    by_panel,
    data_of,
    finite,
    heading_of,
    heat_maps,
    posterior_figure,
    share_scale,
    small_heading,
    token_axis,
    training_curves,
)
from demix.report.read import MAX_SHOWN, read_metrics
from demix.report.run_data import Pairs, RunData, relation
from demix.report.systems import before_dense_dapt
from demix.run.models import adapted
from demix.run.run import Run

SHARE_RANGE = ("#f7fcf5", "#a1d99b", "#41ab5d")
NOTHING = "This run has no such numbers."
# The first share of a training, which no curve shows.
SKIPPED = 0.1


def training(data: RunData) -> tuple[Any, str]:
    """Mean loss of each model (nats per token; lower is better) by the number of tokens it has trained on. The first
    10% of the tokens are left out. Only models of the run's own random seed are shown.
    """
    # The loss of masked tokens is not a loss of next tokens.
    own = [model for model in data.run.trained if model.seed == data.run.seed and not model.masked]
    # A model trained without a domain is no better for what it need not predict.
    common = [name for name in data.training if all(name in model.domains for model in own)]
    steps = training_curves(data.metrics, data.run)
    dev = training_curves(data.metrics, data.run, "dev_loss", common)
    measured = len(dev) and {model.name for model in own} <= set(dev["model"])
    curves, what = (dev, "dev loss") if measured else (steps, "training loss")
    # All models fall alike at first, and so steeply that later differences could not be seen.
    curves = curves[curves["tokens"] >= SKIPPED * curves.groupby("model")["tokens"].transform("max")]
    names = {model.name: model.label for model in own}
    curves = curves[curves["model"].isin(names)]
    models = [label for name, label in names.items() if (curves["model"] == name).any()]
    records = [
        {"model": names[row.model], "tokens": row.tokens, "loss": finite(row.loss)} for row in curves.itertuples()
    ]
    legend = alt.Legend(title="model", symbolSize=300, symbolType="stroke")
    chart = (
        alt.Chart(data_of(records))
        .mark_line(point=POINTS)
        .encode(
            x=alt.X("tokens:Q", title="training tokens", axis=token_axis(6)),
            y=alt.Y("loss:Q", title=f"{what} (nats per token)", scale=alt.Scale(zero=False)),
            **by_line("model", models, legend),
        )
        .properties(width=620, height=340)
    )
    shown = "The loss is that of the training batches; models train on different mixes of domains."
    if measured:
        which = f"{so_many(len(common), 'domain')} that all models train on" if common else "domains of each model"
        shown = f"The loss is the mean over the dev splits of the {which}."
    return alt.vconcat(chart), shown


def figure2(data: RunData) -> tuple[Any, str]:
    """Top: the test perplexity of each expert (column) on each domain (row), divided by that of the domain's own expert
    (training domains) or of the domain's best expert (novel domains). Lower is better; colours follow the logarithm.
    Middle: the share of the bigrams of a domain's test split that occur in the expert's training text. Only the first
    tokens of both are read. Bottom: the perplexity ratio by the share of bigrams, one point for each pair of a domain
    and an expert; own experts of training domains are left out.
    """
    ratio = {kind: pairs.ratio for kind, pairs in data.pairs.items()}
    overlap = {kind: pairs.overlap for kind, pairs in data.pairs.items()}
    top = _largest(1.1, ratio)
    ticks = [float(f"{x:.6g}") for x in np.geomspace(1, top, 5)]
    panels: list[Any] = [
        heat_maps(
            ratio,
            alt.Scale(type="log", domain=[1, top], range=CELL_RANGE, interpolate="lab", clamp=True),
            legend=alt.Legend(title=["perplexity ratio", "(log scale)"], titlePadding=8, values=ticks, format=".2f"),
            heading="Perplexity ratio, {} domains",
        )
    ]
    if any(table.notna().any(axis=None) for table in overlap.values()):
        legend = alt.Legend(title="bigrams shared", titlePadding=8, format=".0%", tickCount=5)
        scale = share_scale(SHARE_RANGE, _largest(0.1, overlap))
        panels.append(heat_maps(overlap, scale, legend=legend, heading="Bigram overlap, {} domains", form=".0%"))
        panels.append(alt.hconcat(*(_scatter(pairs, kind) for kind, pairs in data.pairs.items()), spacing=60))
    chart = alt.vconcat(*panels, spacing=28).resolve_scale(color="independent")
    return chart, "" if any(table.notna().any(axis=None) for table in ratio.values()) else NOTHING


def _largest(least: float, tables: dict[str, pd.DataFrame]) -> float:
    """The largest number of the tables, at least `least`."""
    return max(least, *(float(table.max(axis=None)) for table in tables.values()))


def _scatter(pairs: Pairs, kind: str) -> alt.Chart:
    """Perplexity ratio against bigram overlap, one point per pair; the title states the correlation."""
    # Of domains and experts there may be many more than an eye could tell apart.
    shown = {name: table.iloc[:MAX_SHOWN, :MAX_SHOWN].stack() for name, table in vars(pairs).items()}
    points = pd.DataFrame(shown).dropna().rename_axis(["domain", "expert"]).reset_index()
    if kind == "training":
        points = points[points["domain"] != points["expert"]]
    found = relation(pairs, kind)
    heading = f"{kind} domains" + (", without own experts" if kind == "training" else "")
    if np.isfinite(found.spearman):
        correlation = f"{found.spearman:+.2f}".replace("-", "−")
        pairs_of_domains = f"{so_many(found.pairs, 'pair')} of {so_many(found.domains, 'domain')}"
        heading += f": Spearman {correlation} over {pairs_of_domains}"
    if np.isfinite(found.permutation_p):
        heading += f" (p = {found.permutation_p:.2g} by permuting domains)"
    percents = alt.Axis(format=".0%", tickCount=6)
    chart: alt.Chart = (
        alt.Chart(data_of(points[["domain", "expert", "overlap", "ratio"]]))
        .mark_point(size=45, filled=True, opacity=0.75, color=COLOURS[0])
        .encode(
            x=alt.X("overlap:Q", title="bigrams shared", axis=percents, scale=alt.Scale(zero=False)),
            y=alt.Y("ratio:Q", title="perplexity ratio (log)", scale=alt.Scale(type="log", nice=False)),
            tooltip=["domain:N", "expert:N", "overlap:Q", "ratio:Q"],
        )
        .properties(width=400, height=200, title=small_heading(textwrap.wrap(heading, 70)))
    )
    return chart


def figure4(data: RunData) -> tuple[Any, str]:
    """The cached prior: the fixed weights of the experts (columns) at the start of every block (context window) of a
    domain (rows). Each row sums to 1 over all experts. The prior is estimated on the first blocks of the domain's dev
    split. It is a weighted mean: each block gives the posterior probabilities of the experts at its end, and has λ
    times the weight of the next block.
    """
    settings = data.run.config.evaluation
    priors = data.rows("priors").query(
        "seed == @data.run.seed and model == 'demix' and experts == 'training' and weights == 'history'"
    )
    tables = {one.kind: _wide(priors, "prior", one.names, data.training) for one in data.kinds}
    maps = heat_maps(tables, share_scale(), legend=PROBABILITY_LEGEND, heading="Cached prior, {} domains")
    said = f"Here: {settings.dev_blocks} blocks, λ = {settings.decay:g}"
    said += f"; the weight of the last block is {1 - settings.decay:.2f}." if settings.decay < 1 else "."
    return alt.vconcat(maps), said if any(table.notna().to_numpy().any() for table in tables.values()) else NOTHING


def _wide(rows: pd.DataFrame, column: str, domains: list[str], experts: list[str]) -> pd.DataFrame:
    """A column of `rows` by domain (rows) and expert (columns), NaN where there is none."""
    table = rows[rows["domain"].isin(domains)].pivot(index="domain", columns="expert", values=column)
    return table.reindex(index=domains, columns=experts).astype("float64")


def figure7(data: RunData) -> tuple[Any, str]:
    """The posterior probability of each training expert (rows) after each block (context window) of a domain's dev
    split, for at most 100 blocks. Each panel is one training domain. The prior at the start of a block is the updating
    prior, a decayed average of the posteriors after earlier blocks.
    """
    return posterior_figure(data, "training", data.training)


def figure8(data: RunData) -> tuple[Any, str]:
    """The posterior probability of each training expert (rows) after each block (context window) of a domain's dev
    split, for at most 100 blocks. Each panel is one novel domain. The prior at the start of a block is the updating
    prior, a decayed average of the posteriors after earlier blocks.
    """
    return posterior_figure(data, "novel", data.novel)


PARTS = {
    "own": "Dev perplexity of the novel domain: a fall is adaptation",
    "training": "Mean dev perplexity of the training domains: a rise is forgetting",
}
KINDS = ["DEMix-DAPT", "Dense-DAPT"]


def figure6(data: RunData) -> tuple[Any, str]:
    """Perplexity on dev splits during adaptation (domain-adaptive pretraining, DAPT) to a novel domain; lower is
    better. Each panel is one novel domain. Top: on the novel domain. Bottom: the mean over the training domains.
    DEMix-DAPT trains one more expert; Dense-DAPT trains a dense model on the same data. The top panels share one
    scale, and so do the bottom panels. The checkpoint with the best dev perplexity is kept.
    """
    run, curves = data.run, _curves(data.metrics, data.run)
    whole = run.receiver.kind.expert_scope == "model"
    begun = "the average of all experts, weighted by posterior" if whole else "a copy of one expert"
    chart = alt.vconcat(*(_small_multiples(curves, part, run.novel) for part in PARTS), spacing=24)
    return chart, f"Here DEMix-DAPT starts from {begun}, Dense-DAPT from {before_dense_dapt(run).label}."


def _small_multiples(curves: pd.DataFrame, part: str, novel: tuple[str, ...]) -> alt.FacetChart:
    """One small chart per domain, all with the same scale of perplexity, which begins at zero."""
    records = curves.assign(perplexity=curves[part]).dropna(subset=["perplexity"])
    scale = alt.Scale(domain=[0, finite(curves[part].max()) or 1], nice=True)
    legend = alt.Legend(title=None, orient="right", symbolSize=300, symbolType="stroke")
    chart = alt.Chart(data_of(records[["domain", "kind", "tokens", "perplexity"]]))
    chart = chart.mark_line(strokeWidth=2, point=POINTS).encode(
        x=alt.X("tokens:Q", title="tokens of adaptation", axis=token_axis(3), scale=alt.Scale(nice=False)),
        y=alt.Y("perplexity:Q", title="dev perplexity", scale=scale, axis=alt.Axis(tickCount=4)),
        **by_line("kind", KINDS, legend),
    )
    panels = by_panel(chart.properties(width=160, height=120), "domain", novel, spacing=30)
    return panels.properties(title=heading_of(PARTS[part]))


def _curves(metrics: Path, run: Run) -> pd.DataFrame:
    """Dev perplexity over the tokens of adaptation, from `<row>-dapt-<domain>.jsonl`.

    Columns: domain (the target of adaptation), kind, tokens, and the perplexities training (plain mean over the
    training domains) and own (on the target). Raises DemixError if a line of a file is not a JSON object.
    """
    rows = []
    models = ((run.config.adaptation.dense, "Dense-DAPT"), (run.receiver.row, "DEMix-DAPT"))
    for domain, (row, kind) in product(run.novel, models):
        for line in read_metrics(metrics / f"{adapted(row, domain)}.jsonl"):
            losses = [line.get(f"dev_loss/{name}") for name in (*run.training, domain)]
            *old, own = np.exp(np.array(losses, dtype="float64"))
            if not np.isnan([np.mean(old), own]).all():
                rows.append((domain, kind, line["tokens"], finite(np.mean(old)), finite(own)))
    return pd.DataFrame(rows, columns=["domain", "kind", "tokens", "training", "own"])
