"""The table of tasks: accuracy by model and routing, with intervals and chance."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from demix.report import left_out, title_of
from demix.report.read import read_tasks
from demix.report.render import Table, write_table
from demix.run.run import Run
from demix.run.systems import label_of

CHANCE, BEST = "chance", "best expert of the test (oracle)"
ORACLE = "test labels"


def write_tasks(run: Run, output: Path, note: str) -> None:
    """Write the table of tasks into tables/ below `output`, if the run has tasks; `note` tells of the run's scale."""
    if "tasks" not in left_out(run):
        write_table(tasks_table(read_tasks(run.folder / "tasks.parquet"), run).noted(note), output / "tables")


def tasks_table(rows: pd.DataFrame, run: Run) -> Table:
    """Accuracy in percent: a row per model and routing, a column per task, the 95% interval below each number."""
    names = list(run.config.tasks)
    kinds = {name: row.kind for name, row in run.rows.items()}
    rows = rows.assign(
        label=[_label(label_of(row.model, kinds[row.model]), row) for row in rows.itertuples()],
        # Cells without interval, or whose interval holds chance, say nothing.
        beneath=[_interval(row) for row in rows.itertuples()],
    )
    alone = rows[rows["routing"] == "one expert"]
    best = alone.loc[alone.groupby(["task", "model"], sort=False)["accuracy"].idxmax()] if len(alone) else alone
    shown = pd.concat([rows[rows["routing"] != "one expert"], best])
    shown = shown.assign(order=shown["model"].map({row: place for place, row in enumerate(kinds)}))
    shown = shown.sort_values("order", kind="stable")
    frame = (100 * shown.set_index(["label", "task"])["accuracy"]).unstack("task", sort=False).reindex(columns=names)
    beneath = shown.set_index(["label", "task"])["beneath"].unstack("task", sort=False).reindex(columns=names)
    told = shown["judged"] & (shown["accuracy"] > shown["chance"]) & (shown["reads"] != ORACLE)
    told &= shown["routing"] != "one expert"
    fair = (100 * shown["accuracy"].where(told)).set_axis(pd.MultiIndex.from_frame(shown[["label", "task"]]))
    fair = fair.unstack("task", sort=False).reindex(index=frame.index, columns=names)
    chances = 100 * rows.groupby("task")["chance"].first().reindex(names)
    frame.index.name, frame.columns.name = None, None
    frame = pd.concat([frame, chances.rename(CHANCE).to_frame().T])
    examples = rows.groupby("task")[["examples", "shots", "seeds"]].first()
    asked = "; ".join(
        f"{name}: {row.examples} examples, {row.shots} demonstrations"
        + (f" by {row.seeds} seeds" if row.seeds > 1 else "")
        for name, row in ((name, examples.loc[name]) for name in names if name in examples.index)
    )
    return Table(
        "tasks",
        title_of("tasks"),
        "Percent of the examples whose likeliest label is the right one (c-BTM, section 5 and appendix A.7), and below "
        "it the 95% interval: exact for one seed, else by a bootstrap over seeds and examples. “As chance” stands "
        "where the interval holds what chance gives, and such numbers are compared with none.",
        frame,
        notes=(
            f"{asked}.",
            "Bold: the highest of the numbers above chance that read no test label. Oracles read test labels: "
            "“updating” those of earlier examples, “own expert” where the domain is asked for, and the best expert.",
            "“fixed, 8 + 8” weights experts by their accuracy on 8 other examples after the demonstrations, “fixed, 8” "
            "on the demonstrations (the paper's names, which has 8 of these).",
        ),
        formats=dict.fromkeys(names, "{:.1f}"),
        summaries=frozenset({CHANCE}),
        best=fair.eq(fair.max()) & fair.notna(),
        beneath=beneath,
        long=len(frame) > 40,
    )


def _label(model: str, row: Any) -> str:
    if row.routing == "dense":
        return model
    if row.routing == "one expert":
        return f"{model} ({BEST})"
    kept = "" if pd.isna(row.top_k) else f", top-{row.top_k:.0f}"
    oracle = " (oracle)" if row.routing == "updating" else ""
    return f"{model} ({row.routing}{kept}){oracle}"


def _interval(row: Any) -> str:
    if row.accuracy_low is None or np.isnan(row.accuracy_low):
        return "too few examples"
    interval = f"{100 * row.accuracy_low:.1f} to {100 * row.accuracy_high:.1f}"
    told = ["oracle"] * (row.reads == ORACLE) + ["as chance"] * (not row.judged)
    return ", ".join([interval, *told])
