"""Figure 6 of the paper, the adaptation to novel domains, and the training loss of each model."""

from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from demix.config.systems import adapted, adapted_model, dense_adapted_row, trained
from demix.report.look import COLOURS, DASHES, finish, finite
from demix.report.read import before_dense_dapt, novel_domains, read_metrics, training_domains

PANEL_COLUMNS = 4
# The loss of a step is noisy: means over spans of steps show the trend and keep the figure of a long run small.
CURVE_POINTS = 100
# Invisible points give the pointer something to hit on a line, so that a tooltip shows the numbers.
POINTS = {"opacity": 0, "size": 80}


def adaptation_curves(metrics_dir: str | Path, config: dict[str, Any]) -> pd.DataFrame:
    """Dev perplexity over the tokens of adaptation, from `<row>-dapt-<domain>.jsonl`.

    Columns: domain (the target of adaptation), kind, tokens, and the perplexities training (plain mean over the
    training domains) and own (on the target). Raises DemixError if a line of a file is not a JSON object.
    """
    training = training_domains(config)
    rows = []
    for domain in novel_domains(config):
        for row, label in ((dense_adapted_row(config), "Dense-DAPT"), (adapted_model(config).row, "DEMix-DAPT")):
            for line in read_metrics(Path(metrics_dir) / f"{adapted(row, domain)}.jsonl"):
                losses = [line.get(f"dev_loss/{name}") for name in training]
                own = line.get(f"dev_loss/{domain}")
                if own is None and None in losses:
                    continue
                mean = None if None in losses else finite(np.exp(np.array(losses, dtype="float64")).mean())
                perplexity = None if own is None else finite(np.exp(own))
                rows.append((domain, label, line["tokens"], mean, perplexity))
    return pd.DataFrame(rows, columns=["domain", "kind", "tokens", "training", "own"])


def figure6(metrics_dir: str | Path, config: dict[str, Any]) -> alt.TopLevelMixin:
    """Figure 6: dev perplexity of the training domains and of the novel domain during adaptation, dense and DEMix."""
    curves = adaptation_curves(metrics_dir, config)
    present = [domain for domain in novel_domains(config) if (curves["domain"] == domain).any()]
    parts = [
        _small_multiples(
            curves, "training", present, "Mean dev perplexity of the training domains: a rise is forgetting"
        ),
        _small_multiples(curves, "own", present, "Dev perplexity of the domain adapted to: a fall is adaptation"),
    ]
    return finish(
        alt.vconcat(*parts, spacing=24),
        "Figure 6: adapting to a novel domain with and without forgetting",
        "Each panel is one novel domain. DEMix-DAPT trains a copy of one expert; Dense-DAPT trains every parameter of "
        f"{before_dense_dapt(config).label} on the same data.",
    )


def _small_multiples(curves: pd.DataFrame, part: str, domains: list[str], heading: str) -> alt.ConcatChart:
    """One small chart per domain. Charts of `training` share one scale of perplexity; charts of `own` do not."""
    kinds = ["DEMix-DAPT", "Dense-DAPT"]
    legend = alt.Legend(title=None, orient="right", symbolSize=300, symbolType="stroke")
    values = curves[part].dropna()
    span = [finite(values.min() * 0.98), finite(values.max() * 1.02)] if part == "training" and len(values) else None
    panels = []
    for index, domain in enumerate(domains or ["no adaptation in this run"]):
        records = [
            {"kind": row.kind, "tokens": int(row.tokens), "perplexity": finite(getattr(row, part))}
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
    """Training loss (nats per token) by tokens, of the models that `config` trains: columns model, tokens, loss.

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
    """Training loss by tokens, one line per model."""
    curves = training_curves(metrics_dir, config)
    names = {
        "demix": "DEMix",
        "dense": "Dense (Balanced)",
        "dense_unbalanced": "Dense",
        "domain_token": "+ Domain Token",
    }
    others = [name for name in dict.fromkeys(curves["model"]) if name not in names]
    removed = {model.name: f"DEMix without {model.removed}" for model in trained(config) if model.removed}
    names |= {name: removed.get(name, name) for name in others}
    models = [label for name, label in names.items() if (curves["model"] == name).any()]
    records = [
        {"model": names[row.model], "tokens": row.tokens, "loss": finite(row.loss)} for row in curves.itertuples()
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
    return finish(
        alt.vconcat(chart),
        "Training loss of each model",
        "Mean loss of a step's batch over the tokens trained on so far; models see different mixes of domains.",
    )
