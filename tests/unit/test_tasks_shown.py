"""The report's table of tasks: what is bold, what is marked, and when there is one."""

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from demix.evaluate.columns import TASKS, table_schema
from demix.files import write_parquet
from demix.report import report_files
from demix.report.clusters import Clusters
from demix.report.items import all_items
from demix.report.material import Material
from demix.run.run import Run
from support.configs import domains, small_run
from support.report import table_of

SECTIONS: dict[str, Any] = {
    "domains": domains(("law", "news")), "models": {"btm": {"kind": "branched"}},
    "tasks": {"topics": {"path": "x.jsonl", "shots": 8, "seeds": [1, 2]}, "domain": {"made": "domains"}},
}  # fmt: skip


def row(task: str, model: str, routing: str, accuracy: float, **more: Any) -> dict[str, Any]:
    return {
        "task": task, "model": model, "n_experts": 2, "routing": routing, "clustering": "", "temperature": None,
        "top_k": None, "expert": "", "reads": "", "shots": 8 if task == "topics" else 0, "calibrated": False,
        "seeds": 2 if task == "topics" else 1, "examples": 100, "accuracy": accuracy, "accuracy_low": accuracy - 0.1,
        "accuracy_high": accuracy + 0.1, "chance": 0.5, "judged": abs(accuracy - 0.5) > 0.1, "seed": 1,
    } | more  # fmt: skip


ROWS = [
    row("topics", "btm", "average", 0.7),
    row("topics", "btm", "cluster", 0.8),
    row("topics", "btm", "cluster", 0.55, top_k=1),
    row("topics", "btm", "cluster, released", 0.75, top_k=1),
    row("topics", "btm", "updating", 0.95, reads="test labels"),
    row("topics", "btm", "one expert", 0.6, expert="law"),
    row("topics", "btm", "one expert", 0.9, expert="news"),
    row("topics", "dense", "dense", 0.1),
    row("domain", "btm", "own expert", 0.99, reads="test labels"),
    row("domain", "btm", "cluster", 0.58),
    row("domain", "dense", "dense", 0.3, accuracy_low=None, accuracy_high=None, judged=False, examples=9),
]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    write_parquet(pa.Table.from_pylist(ROWS, table_schema(TASKS)), tmp_path / "tasks.parquet")
    return small_run(tmp_path, **SECTIONS)


def test_numbers_stand_with_intervals_and_chance(run: Run) -> None:
    table = table_of("tasks", Material(run))
    assert list(table.frame.columns) == ["topics", "domain"]
    assert list(table.frame.index) == [
        "Dense (Balanced)", "BTM (average)", "BTM (cluster)", "BTM (cluster, top-1)",
        "BTM (cluster, released, top-1)", "BTM (updating) (oracle)",
        "BTM (own expert)", "BTM (best expert of the test (oracle))", "chance",
    ]  # fmt: skip
    assert table.frame.loc["BTM (cluster)"].tolist() == pytest.approx([80, 58])
    assert table.frame.loc["BTM (best expert of the test (oracle))", "topics"] == pytest.approx(90)
    assert table.frame.loc["chance"].tolist() == [50, 50]
    below = table.second_lines()
    assert below.loc["BTM (cluster)"].tolist() == ["70.0 to 90.0", "48.0 to 68.0, as chance"]
    assert below.loc["BTM (cluster, top-1)", "topics"] == "45.0 to 65.0, as chance"
    assert below.loc["Dense (Balanced)"].tolist() == ["0.0 to 20.0", "too few examples"]
    assert "topics: 100 examples, 8 demonstrations by 2 seeds; domain: " in table.notes[0]


def test_bold_is_the_best_above_chance_that_reads_no_test_label(run: Run) -> None:
    bold = table_of("tasks", Material(run)).bold()
    assert list(bold.index[bold["topics"]]) == ["BTM (cluster)"]
    assert not bold["domain"].any(), "neither oracles nor numbers as chance"


def test_the_clusters_that_a_task_uses_most_stand_with_their_terms(tmp_path: Path) -> None:
    models = {"cbtm": {"kind": "branched", "data": "k4"}, "btm": {"kind": "branched"}}
    clusterings = {"k4": {"clusters": 4}}
    run = small_run(tmp_path, **SECTIONS | {"models": models, "clusterings": clusterings, "training": {"sequences": 2}})
    of_topics = {"cluster": (0.1, 0.5, 0.0, 0.4), "updating": (0.2, 0.2, 0.3, 0.3)}
    rows = [
        {"task": task, "model": "cbtm", "routing": routing, "expert": f"c{number:02d}", "weight": weight}
        for task, order in (("topics", 1), ("domain", -1))
        for routing, weights in of_topics.items()
        for number, weight in enumerate(weights[::order])
    ]
    others = [{"task": "topics", "model": "btm", "routing": "cluster", "expert": "law", "weight": 1.0}]
    names = [f"c{number:02d}" for number in range(4)]
    clusters = Clusters({"k4": {name: [name, "word"] for name in names}}, pd.DataFrame(), pd.DataFrame())
    table = table_of(
        "task_clusters", Material(run, {"task_weights": pd.DataFrame(rows + others), "clusters": clusters})
    )
    label = run.rows["cbtm"].label
    asked = [("topics", ("c01", "c03", "c00")), ("domain", ("c02", "c00", "c03"))]
    assert list(table.frame.index) == [f"{label}, {task}: {name}" for task, found in asked for name in found]
    assert table.frame["cluster"].tolist() == pytest.approx([50, 40, 10, 50, 40, 10])
    assert table.frame["updating"].tolist() == pytest.approx([20, 30, 20, 20, 30, 20])
    assert table.frame["Terms"].iloc[0] == "c01, word"
    assert "tables/task_clusters.html" in report_files(run)
    assert "tables/task_clusters.html" not in report_files(small_run(tmp_path, **SECTIONS))


def test_only_a_run_with_tasks_has_the_table(run: Run) -> None:
    without = small_run(run.folder, **SECTIONS | {"tasks": {}})
    assert not any("tasks" in name for name in report_files(without))
    assert {"tables/tasks.html", "tables/tasks.md", "tables/tasks.tex"} <= {*report_files(run)}
    all_items()["tasks"].write(Material(run, {"scale_note": "This run is small."}), run.folder / "report")
    text = (run.folder / "report" / "tables" / "tasks.md").read_text()
    assert "**80.0**<br>70.0 to 90.0" in text
    assert "This run is small." in text
    assert pd.read_parquet(run.folder / "tasks.parquet").shape[0] == len(ROWS)
