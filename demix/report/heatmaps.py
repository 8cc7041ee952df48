"""Heat maps of domains and experts, and the posterior over experts block by block (Figures 7 and 8 of the paper)."""

from typing import Any

import altair as alt
import pandas as pd

from demix.report.look import CELL_RANGE, data_of, heading_of, share_scale, small_heading
from demix.report.material import Material

CELL_WIDTH, CELL_HEIGHT = 50, 26
TRACE_COLUMNS, TRACE_WIDTH = 4, 240
BLOCKS_SHOWN = 100
# So many domains and so many experts a figure shows at most: more are no cells that an eye could tell apart.
MOST_SHOWN = 64
PROBABILITY_LEGEND = alt.Legend(title="probability", values=[0, 0.25, 0.5, 0.75, 1], format=".2f")
SHARE_LEGEND = alt.Legend(title="share", format=".0%", titlePadding=8)


def posterior_figure(material: Material, kind: str, domains: list[str]) -> tuple[alt.ConcatChart, str]:
    """Figures 7 (`kind` training) and 8 (novel): the posterior over training experts after each block of a domain."""
    experts, rows, panels = material.training, posteriors_on_dev(material, BLOCKS_SHOWN), []
    for index, domain in enumerate(domains[:MOST_SHOWN]):
        found = rows[rows["domain"] == domain]
        blocks = int(found["block"].max()) + 1 if len(found) else 1
        x = alt.X(
            "start:Q",
            title="blocks read",
            axis=alt.Axis(tickCount=5, tickMinStep=1, grid=False),
            scale=alt.Scale(nice=False, domain=[0, blocks]),
        )
        # Blocks that begin between two pixels would show seams.
        width = max(1, TRACE_WIDTH // blocks) * blocks
        panels.append(panel(_stretches(found), domain, experts, index, width=width, x=x, x2="end:Q"))
    shown = which_shown(domains=domains, experts=experts)
    said = [f"Shown: {shown}."] * bool(shown) + ["This run has none of these numbers."] * rows[
        rows["kind"] == kind
    ].empty
    return alt.concat(*panels, columns=TRACE_COLUMNS, spacing=18), " ".join(said)


def which_shown(**named: list[str]) -> str:
    """Which of several lists of names a figure shows, in words; empty where it shows all of them."""
    more = {what: names for what, names in named.items() if len(names) > MOST_SHOWN}
    return ", ".join(f"the first {MOST_SHOWN} of {len(names)} {what}" for what, names in more.items())


def posteriors_on_dev(material: Material, blocks: int) -> pd.DataFrame:
    """The posteriors over the training experts of `demix` (`history`) after the first `blocks` of dev, of the run's
    first seed."""
    rows = material.posteriors.query(
        "model == 'demix' and experts == 'training' and weights == 'history' and split == 'dev' and seed == seed.min()"
    )
    return rows[rows["expert"].isin(material.training) & (rows["block"] < blocks)]


def _stretches(found: pd.DataFrame) -> pd.DataFrame:
    """One row per expert and stretch of blocks whose posteriors print alike; those that print 0.00 are left out."""
    shown = found.assign(value=found["posterior"].round(2)).query("value > 0").sort_values(["expert", "block"])
    changes = shown["block"].diff().ne(1) | shown["value"].diff().ne(0) | shown["expert"].ne(shown["expert"].shift())
    stretches = shown.groupby(changes.cumsum()).agg(
        start=("block", "min"), end=("block", "max"), expert=("expert", "first"), value=("value", "first")
    )
    return stretches.assign(end=stretches["end"] + 1)


def panel(
    values: pd.DataFrame,
    domain: str,
    experts: list[str],
    index: int,
    *,
    width: int = TRACE_WIDTH,
    gap: int = 0,
    **x: Any,
) -> alt.Chart:
    """The `index`-th of several small heat maps: probabilities of experts (rows), against what `x` encodes."""
    first, experts = index % TRACE_COLUMNS == 0, experts[:MOST_SHOWN]
    chart: alt.Chart = (
        alt.Chart(data_of(values[values["expert"].isin(experts)]))
        .mark_rect(stroke="white", strokeWidth=gap)
        .encode(
            y=alt.Y(
                "expert:N",
                sort=experts,
                title="expert" if first else None,
                scale=alt.Scale(domain=experts),
                axis=alt.Axis(labels=first, ticks=first),
            ),
            color=alt.Color("value:Q", scale=share_scale(), legend=PROBABILITY_LEGEND),
            **x,
        )
        .properties(
            width=width,
            height=14 * len(experts),
            title=small_heading(domain),
            view=alt.ViewBackground(stroke="#cccccc", fill=CELL_RANGE[0]),
        )
    )
    return chart


def cells_of(table: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The cells of a table of domains (rows) and experts (columns) as `heat_maps` takes them."""
    cells = table.rename_axis(index="domain", columns="expert").stack(future_stack=True).rename("value").reset_index()
    return cells.assign(kind=kind)[["kind", "domain", "expert", "value"]]


def heat_maps(
    cells: pd.DataFrame,
    halves: dict[str, tuple[list[str], str]],
    experts: list[str],
    scale: alt.Scale,
    *,
    legend: alt.Legend,
    form: str = ".2f",
    over: str = "expert",
) -> alt.HConcatChart:
    """Heat maps of domains (rows) and experts (columns), one per kind of domain, side by side.

    `cells` have kind, domain, expert and value. `halves` gives each kind its rows and its heading. `over` is the title
    of the columns. The first `MOST_SHOWN` of the domains of a kind and of the experts are shown.
    """
    panels, columns = [], experts[:MOST_SHOWN]
    for kind, (names, heading) in halves.items():
        domains, shown = names[:MOST_SHOWN], which_shown(rows=names, columns=experts)
        values = cells[(cells["kind"] == kind) & cells["domain"].isin(domains) & cells["expert"].isin(columns)]
        base = alt.Chart(data_of(values)).encode(
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
                title=heading_of(heading + (f" ({shown})" if shown else "")),
            )
        )
    return alt.hconcat(*panels, spacing=24)
