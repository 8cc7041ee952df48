"""Perplexity by the length of a block and by the position in it: what models gain from text beyond their training's."""

import altair as alt
import numpy as np
import pandas as pd

from demix.errors import DemixError
from demix.evaluate.columns import CONTEXTS
from demix.files import read_parquet
from demix.report import title_of
from demix.report.cells import kinds_of_domains, lowest, mean_of
from demix.report.look import COLOURS, DASHES, finish, finite, heading_of
from demix.report.render import Table
from demix.run.contexts import asked_contexts, labels
from demix.run.run import Run

MIXED = (
    "Each row by one rule: a dense model as it is; a domain-token model under the domain's own token, and so on "
    "training domains alone; experts by the cached prior, from dev text in blocks of the length of training, with "
    "weights by the block's history."
)


def read_contexts(run: Run) -> pd.DataFrame:
    """The rows of all evaluations/<domain>.contexts.parquet of a run; none where the config asks for no lengths.

    Raises DemixError if a file is missing or lacks a column.
    """
    found = [pd.DataFrame(columns=list(CONTEXTS))]
    for domain in run.domains if asked_contexts(run) else ():
        path = run.folder / "evaluations" / f"{domain}.contexts.parquet"
        table = read_parquet(path)
        if missing := [name for name in CONTEXTS if name not in table.column_names]:
            cause = f"has no column {', '.join(missing)}"
            raise DemixError(path, cause, "rerun the evaluation with this version of demix")
        found.append(table.to_pandas())
    return pd.concat(found[1:] or found, ignore_index=True)


def contexts_table(rows: pd.DataFrame, run: Run) -> Table:
    """Mean test perplexity of each row of `models` by the length of the blocks."""
    sums = rows.groupby(["model", "domain", "context"])[["nll", "tokens"]].sum()
    perplexity = np.exp(sums["nll"] / sums["tokens"])
    kinds = [(kind.capitalize(), domains) for kind, domains in kinds_of_domains(run) if domains]
    frame = pd.DataFrame.from_dict(
        {
            label: {
                f"{kind}, {context}": mean_of(perplexity.get((model, domain, context), np.nan) for domain in domains)
                for kind, domains in kinds
                for context in asked_contexts(run)
            }
            for model, label in labels(run).items()
        },
        orient="index",
    )
    trained = run.context
    return Table(
        "contexts",
        title_of("contexts"),
        "Mean test perplexity over the training and over the novel domains, of the same tokens in blocks of so many "
        f"tokens. All models were trained on blocks of {trained:,}. Lower is better.",
        frame,
        notes=(
            MIXED,
            "Learned positions end at the length of training. In a longer block tokens have more text before them, so "
            "that perplexity falls for a model that can use it. Of the run's own seed.",
        ),
        best=lowest(frame, axis=0),
    )


def positions_points(rows: pd.DataFrame, run: Run) -> pd.DataFrame:
    """Mean perplexity by bin of positions, of each row of `models` in its longest blocks.

    Columns row, label, kind, context, begin, end, perplexity. A bin has a point where every domain has tokens in it.
    """
    longest = rows[rows["context"] == rows.groupby("model")["context"].transform("max")]
    longest = longest.assign(perplexity=np.exp((longest["nll"] / longest["tokens"]).astype("float64")))
    points = []
    for model, label in labels(run).items():
        own = longest[longest["model"] == model]
        for kind, domains in kinds_of_domains(run):
            by_domain = own.pivot_table("perplexity", ["context", "begin", "end"], "domain").reindex(columns=domains)
            for (context, begin, end), perplexity in by_domain.dropna().mean(axis=1).items():
                points.append((model, label, kind, context, begin, end, perplexity))
    names = ["row", "label", "kind", "context", "begin", "end", "perplexity"]
    return pd.DataFrame(points, columns=names).dropna()


def positions(rows: pd.DataFrame, run: Run) -> alt.TopLevelMixin:
    """Perplexity by the position in the block, one line per row of `models`, one panel per kind of domain."""
    points = positions_points(rows, run)
    series = list(dict.fromkeys(points["label"]))
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(series))]
    dashes = [DASHES[index % len(DASHES)] for index in range(len(series))]
    legend = alt.Legend(title=None, symbolSize=200, symbolType="stroke")
    trained = run.context
    panels = []
    for kind, domains in kinds_of_domains(run):
        own = points[points["kind"] == kind]
        if not domains or own.empty:
            continue
        values = [
            {
                "row": row.label,
                "positions": f"{row.begin} to {row.end - 1}",
                "position": (row.begin + row.end) / 2,
                "block": row.context,
                "perplexity": finite(row.perplexity),
            }
            for row in own.itertuples()
        ]
        lines = (
            alt.Chart(alt.InlineData(values=values))
            .mark_line(strokeWidth=2, point=alt.OverlayMarkDef(size=30, filled=True))
            .encode(
                x=alt.X("position:Q", title="position in the block", axis=alt.Axis(grid=False)),
                y=alt.Y("perplexity:Q", title="test perplexity", scale=alt.Scale(zero=False)),
                color=alt.Color("row:N", sort=series, scale=alt.Scale(domain=series, range=colours), legend=legend),
                strokeDash=alt.StrokeDash(
                    "row:N", sort=series, scale=alt.Scale(domain=series, range=dashes), legend=legend
                ),
                tooltip=["row:N", "block:Q", "positions:N", "perplexity:Q"],
            )
        )
        end = (
            alt.Chart(alt.InlineData(values=[{"position": trained}]))
            .mark_rule(color="#666666", strokeDash=[2, 2])
            .encode(x="position:Q")
        )
        panels.append((end + lines).properties(width=380, height=280, title=heading_of(f"{kind.capitalize()} domains")))
    return finish(
        alt.hconcat(*panels, spacing=30),
        title_of("positions"),
        "Mean test perplexity of tokens by their position, in bins, each row of models in its longest blocks. The "
        f"dotted line is the length of a block in training ({trained:,}), where learned positions end. {MIXED}",
    )
