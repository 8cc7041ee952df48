"""Figure 6 of the paper, the adaptation to novel domains, and the loss of each model in training."""

from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd

from demix.report import title_of
from demix.report.cells import ends_lower
from demix.report.look import COLOURS, DASHES, finish, finite, heading_of
from demix.report.read import before_dense_dapt, novel_domains, read_metrics, training_domains
from demix.run.models import adapted
from demix.run.run import Run

PANEL_COLUMNS = 4
# The loss of a step is noisy: means over spans of steps show the trend and keep the figure of a long run small.
CURVE_POINTS = 40
SKIPPED = 0.1
# Invisible points give the pointer something to hit on a line, so that a tooltip shows the numbers.
POINTS = {"opacity": 0, "size": 80}


def adaptation_curves(metrics_dir: str | Path, run: Run) -> pd.DataFrame:
    """Dev perplexity over the tokens of adaptation, from `<row>-dapt-<domain>.jsonl`.

    Columns: domain (the target of adaptation), kind, tokens, and the perplexities training (plain mean over the
    training domains) and own (on the target). Raises DemixError if a line of a file is not a JSON object.
    """
    training = training_domains(run)
    rows = []
    for domain in novel_domains(run):
        for row, label in ((run.config.adaptation.dense, "Dense-DAPT"), (run.receiver.row, "DEMix-DAPT")):
            for line in read_metrics(Path(metrics_dir) / f"{adapted(row, domain)}.jsonl"):
                losses = [line.get(f"dev_loss/{name}") for name in training]
                own = line.get(f"dev_loss/{domain}")
                if own is None and None in losses:
                    continue
                mean = None if None in losses else finite(np.exp(np.array(losses, dtype="float64")).mean())
                perplexity = None if own is None else finite(np.exp(own))
                rows.append((domain, label, line["tokens"], mean, perplexity))
    return pd.DataFrame(rows, columns=["domain", "kind", "tokens", "training", "own"])


def figure6(metrics_dir: str | Path, run: Run) -> alt.TopLevelMixin:
    """Figure 6: dev perplexity of the training domains and of the novel domain during adaptation, dense and DEMix."""
    curves = adaptation_curves(metrics_dir, run)
    present = [domain for domain in novel_domains(run) if (curves["domain"] == domain).any()]
    parts = {
        "own": "Dev perplexity of the domain adapted to: a fall is adaptation",
        "training": "Mean dev perplexity of the training domains: a rise is forgetting",
    }
    last = curves.drop_duplicates(["domain", "kind"], keep="last").set_index("domain")
    own, old = (
        ends_lower(*(last.loc[last["kind"] == kind, part] for kind in ("Dense-DAPT", "DEMix-DAPT"))) for part in parts
    )
    whole = run.receiver.kind.expert_scope == "model"
    begun = "the average of all experts, by posterior, as one more" if whole else "a copy of one expert"
    return finish(
        alt.vconcat(*(_small_multiples(curves, part, present, heading) for part, heading in parts.items()), spacing=24),
        title_of("figure6"),
        f"Each panel is one novel domain. DEMix-DAPT trains {begun}; Dense-DAPT trains every parameter of "
        f"{before_dense_dapt(run).label} on the same data. The number at the end of a line is its last value. The "
        f"model kept is the best on dev. On the domain adapted to, {own}; on the training domains, {old}.",
    )


def _small_multiples(curves: pd.DataFrame, part: str, domains: list[str], heading: str) -> alt.ConcatChart:
    """One small chart per domain, all with the same scale of perplexity, which begins at zero."""
    kinds = ["DEMix-DAPT", "Dense-DAPT"]
    legend = alt.Legend(title=None, orient="right", symbolSize=300, symbolType="stroke")
    scale = alt.Scale(domain=[0, finite(curves[part].max()) or 1], nice=True)
    panels = []
    for index, domain in enumerate(domains or ["no adaptation in this run"]):
        own = curves[curves["domain"] == domain].dropna(subset=[part])
        ends = own.groupby("kind")["tokens"].transform("max") == own["tokens"]
        records = [
            {"kind": row.kind, "tokens": int(row.tokens), "perplexity": finite(getattr(row, part)), "last": bool(end)}
            for row, end in zip(own.itertuples(), ends, strict=True)
        ]
        base = alt.Chart(alt.InlineData(values=records)).encode(
            x=alt.X("tokens:Q", title="tokens of adaptation", axis=_token_axis(3), scale=alt.Scale(nice=False)),
            y=alt.Y(
                "perplexity:Q",
                title="dev perplexity" if index % PANEL_COLUMNS == 0 else None,
                scale=scale,
                axis=alt.Axis(tickCount=4),
            ),
            color=alt.Color("kind:N", scale=alt.Scale(domain=kinds, range=list(COLOURS[:2])), legend=legend),
        )
        lines = base.mark_line(strokeWidth=2, point=POINTS).encode(
            strokeDash=alt.StrokeDash("kind:N", scale=alt.Scale(domain=kinds, range=list(DASHES[:2])), legend=legend)
        )
        last = base.mark_text(align="left", dx=5, fontSize=11).encode(text=alt.Text("perplexity:Q", format=".0f"))
        panels.append(
            (lines + last.transform_filter("datum.last")).properties(
                width=160, height=120, title=alt.Title(domain, anchor="start", fontSize=12, fontWeight="normal")
            )
        )
    return alt.concat(*panels, columns=PANEL_COLUMNS, spacing=30, title=heading_of(heading))


def _token_axis(ticks: int) -> alt.Axis:
    return alt.Axis(tickCount=ticks, labelExpr="datum.value ? format(datum.value, '~s') : '0'")


def training_curves(metrics_dir: str | Path, run: Run, key: str = "loss") -> pd.DataFrame:
    """Loss (nats per token) by tokens, of the models that `config` trains: columns model, tokens, loss.

    `key` is `loss`, of the batches trained on, or `dev_loss`, the mean over the model's domains, of the runs that
    measure it. Long runs are thinned to means over equal spans of steps.
    """
    frames = []
    for name in sorted(model.name for model in run.trained):
        path = Path(metrics_dir) / f"{name}.jsonl"
        rows = [(line["tokens"], line[key]) for line in read_metrics(path) if line.get(key) is not None]
        frame = pd.DataFrame(rows, columns=["tokens", "loss"]).astype("float64")
        span = -(-len(frame) // CURVE_POINTS) or 1
        frame = frame.groupby(np.arange(len(frame)) // span).mean()
        frames.append(frame.assign(model=path.stem))
    columns = ["model", "tokens", "loss"]
    return pd.concat(frames)[columns] if frames else pd.DataFrame(columns=columns)


def training_figure(metrics_dir: str | Path, run: Run) -> alt.TopLevelMixin:
    """Loss by tokens, one line per model of the run's own seed: on dev if all models measure it, else of training."""
    # The loss of masked tokens is no loss of next tokens.
    own = [model for model in run.trained if model.seed == run.seed and not model.masked]
    steps, dev = (training_curves(metrics_dir, run, key) for key in ("loss", "dev_loss"))
    measured = len(dev) and {model.name for model in own} <= set(dev["model"])
    curves, what = (dev, "Dev loss") if measured else (steps, "Training loss")
    # All models fall alike at first, and so steeply that later differences could not be seen.
    curves = curves[curves["tokens"] >= SKIPPED * curves.groupby("model")["tokens"].transform("max")]
    names = {
        "demix": "DEMix",
        "dense": "Dense (Balanced)",
        "dense_unbalanced": "Dense",
        "domain_token": "+ Domain Token",
    }
    names |= {model.name: f"DEMix without {model.removed}" for model in own if model.removed}
    names |= {model.name: model.name for model in own if model.name not in names}
    models = [label for name, label in names.items() if (curves["model"] == name).any()]
    records = [
        {"model": names[row.model], "tokens": row.tokens, "loss": finite(row.loss)}
        for row in curves[curves["model"].isin(names)].itertuples()
    ]
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(models))]
    dashes = [DASHES[index % len(DASHES)] for index in range(len(models))]
    legend = alt.Legend(title="model", symbolSize=300, symbolType="stroke")
    chart = (
        alt.Chart(alt.InlineData(values=records))
        .mark_line(strokeWidth=1.6, point=POINTS)
        .encode(
            x=alt.X("tokens:Q", title="training tokens", axis=_token_axis(6)),
            y=alt.Y("loss:Q", title=f"{what.lower()} (nats a token)", scale=alt.Scale(zero=False)),
            color=alt.Color("model:N", sort=models, scale=alt.Scale(domain=models, range=colours), legend=legend),
            strokeDash=alt.StrokeDash(
                "model:N", sort=models, scale=alt.Scale(domain=models, range=dashes), legend=legend
            ),
        )
        .properties(width=620, height=340)
    )
    return finish(
        alt.vconcat(chart),
        title_of("training"),
        (
            "Mean over the dev splits of the domains that a model trains on, by the tokens trained on so far."
            if measured
            else "Mean loss of the batches by the tokens trained on so far; models see different mixes of domains."
        )
        + f" The first {SKIPPED:.0%} of the tokens and other seeds are left out.",
    )
