"""Tasks of EleutherAI's lm-evaluation-harness by model and rule that mixes its experts, with standard errors."""

from typing import TYPE_CHECKING

from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import HARNESS
from demix.report.table import Table

if TYPE_CHECKING:
    import pandas as pd

ITEM = TableItem("Tasks of the standard harness", Group.TASKS, 3, needs=(HARNESS,))
COUNTS = {"Documents": "examples", "Demonstrations": "shots"}


def make(material: Material) -> Table:
    import pandas as pd

    labels = {name: row.label for name, row in material.run.rows.items()}
    rows = material.harness.assign(
        line=material.harness["task"] + ", " + material.harness["metric"],
        system=[
            labels[model] if routing == "dense" else f"{labels[model]} ({routing})"
            for model, routing in zip(material.harness["model"], material.harness["routing"], strict=True)
        ],
    )
    lines, systems = list(dict.fromkeys(rows["line"])), list(dict.fromkeys(rows["system"]))

    def table(values: "pd.Series") -> "pd.DataFrame":
        """`values` of the rows, a row per task and metric and a column per system."""
        found = values.set_axis(pd.MultiIndex.from_frame(rows[["line", "system"]])).unstack("system")
        found = found.reindex(index=lines, columns=systems)
        found.index.name, found.columns.name = None, None
        return found

    values, first = table(rows["value"]), rows.groupby("line").first().reindex(lines)
    higher = first["higher_is_better"]
    best = values.eq(values.max(axis=1).where(higher.eq(True), values.min(axis=1)), axis=0)
    counts = pd.DataFrame({name: first[column].astype(float) for name, column in COUNTS.items()})
    versions = ", ".join(sorted(set(rows["harness_version"])))
    tasks = rows[rows["task_version"] != ""].groupby("task", sort=False)["task_version"].first()
    return Table(
        f"Values as EleutherAI's lm-evaluation-harness {versions} gives them, with ± its standard error below. A row "
        "is a task, or a group of tasks, and a metric.",
        pd.concat([counts, values], axis=1),
        notes=(
            f"Versions of the tasks: {', '.join(f'{name} {version}' for name, version in tasks.items())}. Documents "
            "are those that were asked. tasks.parquet has the digest of each task's documents.",
            _contaminated(material.contamination),
            "Bold: the best value of a row, where the harness says whether higher is better. All values are of the "
            "run's own seed; the rule in parentheses mixed the experts of the training domains.",
        ),
        formats=dict.fromkeys(systems, "{:.4g}") | dict.fromkeys(COUNTS, "{:,.0f}"),
        best=best.where(higher.notna(), False, axis=0),
        beneath=table(rows["stderr"].map(lambda error: "" if pd.isna(error) else f"± {error:.2g}")),
        long=len(values) > 40,
    )


def _contaminated(found: "pd.DataFrame") -> str:
    """By task, how many of its documents the training text of each domain holds, in words."""
    tasks = []
    for task, rows in found.groupby("task", sort=False):
        held = rows[rows["found_documents"] > 0].sort_values("found_documents", ascending=False, kind="stable")
        named = [f"{row.domain} {row.found_documents:,}" for row in held.itertuples()]
        tasks.append(f"{task} {', '.join(named) or 'none'} (of {rows['long_documents'].iloc[0]:,})")
    return (
        "Contamination: documents of a task that share a 13-gram of words with the training text of a domain, whose "
        f"expert may know them, of those documents that have 13 words: {'; '.join(tasks)}."
    )
