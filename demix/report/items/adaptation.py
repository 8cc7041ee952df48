"""Figure 6: adapting to novel domains."""

from itertools import product
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from demix.report.cells import ends_lower
from demix.report.curves import POINTS, token_axis
from demix.report.look import coloured, dashed, data_of, finite, heading_of, small_heading
from demix.report.material import Material
from demix.report.read import read_metrics
from demix.report.systems import before_dense_dapt
from demix.run.models import adapted
from demix.run.run import Run

PARTS = {
    "own": "Dev perplexity of the domain adapted to: a fall is adaptation",
    "training": "Mean dev perplexity of the training domains: a rise is forgetting",
}
KINDS = ["DEMix-DAPT", "Dense-DAPT"]
PANEL_COLUMNS = 4


def figure6(material: Material) -> tuple[Any, str]:
    """Dev perplexity of the novel domain and of the training domains during adaptation; each panel is one novel domain.
    DEMix-DAPT trains one more expert, Dense-DAPT every parameter of a dense model on the same data. All panels of a
    part have one scale; the number at the end of a line is its last value. The model kept is the best on dev.
    """
    run, curves = material.run, _curves(material.metrics, material.run)
    last = curves.drop_duplicates(["domain", "kind"], keep="last").set_index("domain")
    own, old = (ends_lower(*(last.loc[last["kind"] == kind, part] for kind in reversed(KINDS))) for part in PARTS)
    whole = run.receiver.kind.expert_scope == "model"
    begun = "the average of all experts, by posterior" if whole else "a copy of one expert"
    return alt.vconcat(*(_small_multiples(curves, part, run.novel) for part in PARTS), spacing=24), (
        f"Here DEMix-DAPT began with {begun}, Dense-DAPT with {before_dense_dapt(run).label}. On the domain adapted "
        f"to, {own}; on the training domains, {old}."
    )


def _small_multiples(curves: pd.DataFrame, part: str, novel: tuple[str, ...]) -> alt.ConcatChart:
    """One small chart per domain, all with the same scale of perplexity, which begins at zero."""
    legend = alt.Legend(title=None, orient="right", symbolSize=300, symbolType="stroke")
    scale = alt.Scale(domain=[0, finite(curves[part].max()) or 1], nice=True)
    present = [domain for domain in novel if (curves["domain"] == domain).any()]
    panels = []
    for index, domain in enumerate(present or ["no adaptation in this run"]):
        own = curves[curves["domain"] == domain].dropna(subset=[part])
        ends = own.groupby("kind")["tokens"].transform("max") == own["tokens"]
        # Where a line ends: above the other or below it.
        places = own[part].eq(own.loc[ends, part].max()).map({True: "upper", False: "lower"}).where(ends, "")
        records = own.assign(perplexity=own[part], last=places)[["kind", "tokens", "perplexity", "last"]]
        title = "dev perplexity" if index % PANEL_COLUMNS == 0 else None
        base = alt.Chart(data_of(records)).encode(
            x=alt.X("tokens:Q", title="tokens of adaptation", axis=token_axis(3), scale=alt.Scale(nice=False)),
            y=alt.Y("perplexity:Q", title=title, scale=scale, axis=alt.Axis(tickCount=4)),
            color=coloured("kind", KINDS, legend),
        )
        lines = base.mark_line(strokeWidth=2, point=POINTS).encode(strokeDash=dashed("kind", KINDS, legend))
        # Lines that end close together have their numbers apart.
        numbers = [
            base.mark_text(align="left", dx=5, dy=dy, fontSize=11)
            .encode(text=alt.Text("perplexity:Q", format=".0f"))
            .transform_filter(f"datum.last == '{place}'")
            for place, dy in (("upper", -5), ("lower", 5))
        ]
        chart = alt.layer(lines, *numbers)
        panels.append(chart.properties(width=160, height=120, title=small_heading(domain)))
    return alt.concat(*panels, columns=PANEL_COLUMNS, spacing=30, title=heading_of(PARTS[part]))


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
