"""Accuracy on tasks of classification by model and routing, with 95% intervals and chance. Rows that are marked as
oracles read test labels.
"""

from typing import TYPE_CHECKING, Any

from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import TASKS
from demix.report.table import Table

if TYPE_CHECKING:
    import pandas as pd

ITEM = TableItem("Accuracy on tasks by routing", Group.TASKS, 1, needs=(TASKS,))
CHANCE, BEST = "chance", "best expert of the test (oracle)"
ORACLE, ALONE = "test labels", "one expert"


def make(material: Material) -> Table:
    import pandas as pd

    rows, names = material.tasks, list(material.run.config.tasks)
    shown = _shown(material)

    def table(values: "pd.Series") -> "pd.DataFrame":
        """`values` of the rows shown, a row per label and a column per task."""
        found = values.set_axis(pd.MultiIndex.from_frame(shown[["label", "task"]])).unstack("task", sort=False)
        found = found.reindex(columns=names)
        found.index.name, found.columns.name = None, None
        return found

    frame = table(100 * shown["accuracy"])
    told = shown["judged"] & (shown["accuracy"] > shown["chance"]) & (shown["reads"] != ORACLE)
    fair = table(100 * shown["accuracy"].where(told & (shown["routing"] != ALONE))).reindex(index=frame.index)
    chances = 100 * rows.groupby("task")["chance"].first().reindex(names)
    frame = pd.concat([frame, chances.rename(CHANCE).to_frame().T])
    examples = rows.groupby("task")[["examples", "shots", "seeds"]].first()
    asked = "; ".join(
        f"{name}: {row.examples} examples, {row.shots} demonstrations"
        + (f" by {row.seeds} seeds" if row.seeds > 1 else "")
        for name, row in ((name, examples.loc[name]) for name in names if name in examples.index)
    )
    return Table(
        "Percent of the examples whose likeliest label is the right one (c-BTM, section 5 and appendix A.7), and below "
        "it the 95% interval: exact for one seed, else by a bootstrap over seeds and examples. “As chance” stands "
        "where the interval contains what chance gives. Differences among such numbers mean nothing.",
        frame,
        notes=(
            f"{asked}.",
            "Bold: the highest of the numbers above chance that read no test label. Oracles read test labels: "
            "“updating” those of earlier examples, “own expert” where the domain is asked for, and the best expert.",
            "“fixed, 8 + 8” weights experts by their accuracy on 8 other examples after the demonstrations, “fixed, 8” "
            "by that on the demonstrations. The names are the paper's, which has 8 demonstrations. “released” mixes as "
            "the paper's code does, by the same weights: whole labels, after a softmax over labels of each expert.",
        ),
        formats=dict.fromkeys(names, "{:.1f}"),
        summaries=frozenset({CHANCE}),
        best=fair.eq(fair.max()) & fair.notna(),
        beneath=table(shown["beneath"]),
        long=len(frame) > 40,
    )


def _shown(material: Material) -> "pd.DataFrame":
    """The rows of the table with their labels and second lines, in the order of `models`."""
    import pandas as pd

    names = {name: row.label for name, row in material.run.rows.items()}
    rows = material.tasks.assign(
        label=[_label(names[row.model], row) for row in material.tasks.itertuples()],
        # Cells without interval, or whose interval holds chance, say nothing.
        beneath=[_interval(row) for row in material.tasks.itertuples()],
    )
    alone = rows[rows["routing"] == ALONE]
    best = alone.loc[alone.groupby(["task", "model"], sort=False)["accuracy"].idxmax()] if len(alone) else alone
    shown = pd.concat([rows[rows["routing"] != ALONE], best])
    shown = shown.assign(order=shown["model"].map({row: place for place, row in enumerate(names)}))
    return shown.sort_values("order", kind="stable")


def _label(model: str, row: Any) -> str:
    import pandas as pd

    if row.routing == "dense":
        return model
    if row.routing == ALONE:
        return f"{model} ({BEST})"
    kept = "" if pd.isna(row.top_k) else f", top-{row.top_k:.0f}"
    oracle = " (oracle)" if row.routing.startswith("updating") else ""
    return f"{model} ({row.routing}{kept}){oracle}"


def _interval(row: Any) -> str:
    import pandas as pd

    if pd.isna(row.accuracy_low):
        return "too few examples"
    interval = f"{100 * row.accuracy_low:.1f} to {100 * row.accuracy_high:.1f}"
    told = ["oracle"] * (row.reads == ORACLE) + ["as chance"] * (not row.judged)
    return ", ".join([interval, *told])
