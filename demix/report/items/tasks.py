"""Tables of tasks: accuracy on labels, the tasks of the standard harness, and perplexity suites."""

from typing import Any

import pandas as pd

from demix.report.cells import lowest
from demix.report.material import Material
from demix.report.table import Table
from demix.run.systems import row_systems, table_rows

CHANCE, BEST = "chance", "best expert of the test (oracle)"
ORACLE, ALONE = "test labels", "one expert"
COUNTS = {"Documents": "examples", "Demonstrations": "shots"}


def _wide(rows: pd.DataFrame, values: pd.Series, line: str, column: str) -> pd.DataFrame:
    """`values` of `rows`, a row for each `line` and a column for each `column`, both in their order."""
    found = values.set_axis(pd.MultiIndex.from_frame(rows[[line, column]])).unstack(column)
    found = found.reindex(index=rows[line].unique(), columns=rows[column].unique())
    return found.rename_axis(index=None, columns=None)


def tasks(material: Material) -> Table:
    """Percent of the examples of a classification task whose likeliest label is the right one, by model and routing
    (c-BTM, section 5 and appendix A.7), and below it the 95% interval: exact for one seed, else by a bootstrap over
    seeds and examples. “As chance” stands where the interval contains what chance gives. Differences among such numbers
    mean nothing.

    Bold: the highest of the numbers above chance that read no test label. Oracles read test labels: “updating” those of
    earlier examples, “own expert” where the domain is asked for, and the best expert.

    “fixed, 8 + 8” weights experts by their accuracy on 8 other examples after the demonstrations, “fixed, 8” by that on
    the demonstrations. The names are the paper's, which has 8 demonstrations. “released” mixes as the paper's code
    does, by the same weights: whole labels, after a softmax over labels of each expert.
    """
    models, names = {name: row.label for name, row in material.run.rows.items()}, list(material.run.config.tasks)
    rows = material.tasks
    alone = rows[rows["routing"] == ALONE].sort_values("accuracy", ascending=False, kind="stable")
    rows = pd.concat([rows[rows["routing"] != ALONE], alone.drop_duplicates(["task", "model"])])
    rows = rows.sort_values("model", key=lambda found: found.map([*models].index), kind="stable")
    rows["label"] = [_label(models[row.model], row) for row in rows.itertuples()]
    # Cells without interval, or whose interval holds chance, say nothing.
    beneath = pd.Series([_interval(row) for row in rows.itertuples()], rows.index)
    frame = _wide(rows, 100 * rows["accuracy"], "label", "task").reindex(columns=names)
    told = rows["judged"] & (rows["accuracy"] > rows["chance"]) & (rows["reads"] != ORACLE) & (rows["routing"] != ALONE)
    fair = _wide(rows, rows["accuracy"].where(told), "label", "task")
    by_task = material.tasks.groupby("task")[["chance", "examples", "shots", "seeds"]].first()
    asked = "; ".join(
        f"{name}: {row.examples} examples, {row.shots} demonstrations"
        + (f" by {row.seeds} seeds" if row.seeds > 1 else "")
        for name, row in ((name, by_task.loc[name]) for name in names if name in by_task.index)
    )
    frame.loc[CHANCE] = 100 * by_task["chance"].reindex(names)
    return Table(
        frame,
        notes=(f"{asked}.",),
        formats=dict.fromkeys(names, "{:.1f}"),
        summaries=frozenset({CHANCE}),
        best=fair.eq(fair.max()) & fair.notna(),
        beneath=_wide(rows, beneath, "label", "task"),
        long=len(frame) > 40,
    )


def _label(model: str, row: Any) -> str:
    if row.routing == "dense":
        return model
    if row.routing == ALONE:
        return f"{model} ({BEST})"
    kept = "" if pd.isna(row.top_k) else f", top-{row.top_k:.0f}"
    oracle = " (oracle)" if row.routing.startswith("updating") else ""
    return f"{model} ({row.routing}{kept}){oracle}"


def _interval(row: Any) -> str:
    if pd.isna(row.accuracy_low):
        return "too few examples"
    oracle, chance = ", oracle" if row.reads == ORACLE else "", "" if row.judged else ", as chance"
    return f"{100 * row.accuracy_low:.1f} to {100 * row.accuracy_high:.1f}{oracle}{chance}"


def harness(material: Material) -> Table:
    """Values as EleutherAI's lm-evaluation-harness gives them, by model and rule that mixes its experts, with ± its
    standard error below. A row is a task, or a group of tasks, and a metric.

    Bold: the best value of a row, where the harness says whether higher is better. All values are of the run's own
    seed; the rule in parentheses mixed the experts of the training domains. Documents are those that were asked.
    tasks.parquet has the digest of each task's documents.
    """
    models, rows = {name: row.label for name, row in material.run.rows.items()}, material.harness
    rows = rows.assign(
        line=rows["task"] + ", " + rows["metric"],
        system=[
            models[model] + f" ({routing})" * (routing != "dense")
            for model, routing in zip(rows["model"], rows["routing"], strict=True)
        ],
    )
    values, first = _wide(rows, rows["value"], "line", "system"), rows.groupby("line", sort=False).first()
    higher = first["higher_is_better"]
    best = values.eq(values.max(axis=1).where(higher.eq(True), values.min(axis=1)), axis=0)
    counts = pd.DataFrame({name: first[column].astype(float) for name, column in COUNTS.items()})
    versions = rows[rows["task_version"] != ""].groupby("task", sort=False)["task_version"].first()
    errors = rows["stderr"].map(lambda error: "" if pd.isna(error) else f"± {error:.2g}")
    return Table(
        pd.concat([counts, values], axis=1),
        notes=(
            f"Version of the harness: {', '.join(sorted(set(rows['harness_version'])))}; of the tasks: "
            f"{', '.join(f'{name} {version}' for name, version in versions.items())}.",
            _contaminated(material.contamination),
        ),
        formats=dict.fromkeys(values, "{:.4g}") | {"Demonstrations": "{:,.0f}"},
        best=best.where(higher.notna(), False, axis=0),
        beneath=_wide(rows, errors, "line", "system"),
        long=len(values) > 40,
    )


def _contaminated(found: pd.DataFrame) -> str:
    """By task, how many of its documents the training text of each domain holds, in words."""
    told = []
    for task, rows in found.groupby("task", sort=False):
        held = rows[rows["found_documents"] > 0].sort_values("found_documents", ascending=False, kind="stable")
        named = [f"{row.domain} {row.found_documents:,}" for row in held.itertuples()]
        told.append(f"{task} {', '.join(named) or 'none'} (of {rows['long_documents'].iloc[0]:,})")
    return (
        "Contamination: documents of a task that share a 13-gram of words with the training text of a domain, whose "
        f"expert may know them, of those documents that have 13 words: {'; '.join(told)}."
    )


def suites(material: Material) -> Table:
    """Test perplexity on each source of a suite, and below it bits per byte, which compare across tokenizers. Lower is
    better. No model learned from these texts or was adapted to them, and nothing was chosen on them.

    Texts that a training domain holds are left out. Experts are those of the training domains, by rules that need no
    dev text and no clusters; an oracle is the best expert or domain token of the test text itself. Bold: the lowest of
    a row that is no oracle.
    """
    run, found = material.run, material.suites.of_seed(material.run.seed)
    names = [f"{suite}: {name}" for suite, sources in (run.config.evaluation.suites or {}).items() for name in sources]
    shown = {}
    for system in (one for row in table_rows(run).values() for one in row_systems(row, run)):
        of = found.of(system, run.suites).set_axis(names)
        if of["perplexity"].notna().any():
            shown[system.label + " (oracle)" * (system.method == "naive")] = of
    values = pd.DataFrame({label: of["perplexity"] for label, of in shown.items()})
    frame = pd.concat([next(iter(shown.values()))["tokens"].rename("Tokens"), values], axis=1)
    return Table(
        frame,
        best=lowest(values[[label for label in values if not label.endswith("(oracle)")]], axis=1),
        beneath=pd.DataFrame({label: of["bits_per_byte"].map("{:.3f}".format) for label, of in shown.items()}),
        long=len(values) > 40,
    )
