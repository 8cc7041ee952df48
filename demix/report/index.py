"""The first page of a run: main table, claims, all that the report has, settings, time and versions."""

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import pandas as pd

from demix.files import write_text
from demix.query.ask import Answers
from demix.query.views import AskedRun
from demix.report import (
    FAMILY_FIGURES,
    FAMILY_TABLES,
    FIGURES,
    PAPER_TABLES,
    SHOWS,
    TABLES,
    TASK_TABLES,
    VARIANT_FIGURES,
    VARIANT_TABLES,
    left_out_notes,
    report_files,
)
from demix.report.all_tables import main_table, scale_note
from demix.report.page import render
from demix.report.read import Results, step_seconds
from demix.report.stages import STAGES, drawing
from demix.report.verdict import Claim, Verdict
from demix.run.kept import config_fingerprint, kept
from demix.run.run import Run

GROUPS = {
    "Tables of the paper": PAPER_TABLES,
    "Further tables": tuple(name for name in TABLES if name not in PAPER_TABLES),
    "Figures": FIGURES,
    "Families": (*FAMILY_TABLES, *FAMILY_FIGURES),
    "Variants": (*VARIANT_TABLES, *VARIANT_FIGURES),
    "Tasks": TASK_TABLES,
}
PACKAGES = ("demix", "torch", "numpy", "pyarrow", "duckdb", "snakemake", "altair", "mlflow")


def write_index(results: Results, judged: list[Claim], cost: list[dict[str, str]], run: Run, output: Path) -> None:
    """Write `index.html` into `output`, beside the other files of the report. `cost` is that of `cost_by_stage`."""
    table = main_table(results, run)
    html = render(
        "index",
        title=f"Run {run.name}",
        paragraphs=[scale_note(results, run)],
        notes=left_out_notes(run),
        main={
            "title": table.title,
            "caption": table.caption,
            "columns": [
                {"heading": column.header, "class": "" if column.justify == "right" else "text"}
                for column in table.columns
            ],
            "rows": list(zip(*(column.cells for column in table.columns), strict=True)),
        },
        claims=sorted(judged, key=lambda claim: get_args(Verdict).index(claim.verdict)),
        groups=_groups(run),
        cards=[model.name for model in run.planned],
        stages=drawing(),
        cost=cost,
        settings=json.dumps(kept(run.config), indent=1, ensure_ascii=False),
        digest=config_fingerprint(run.config),
        versions={"Python": platform.python_version()} | {name: version(name) for name in PACKAGES},
    )
    write_text(output / "index.html", html)


def _groups(run: Run) -> dict[str, list[dict[str, Any]]]:
    """The tables and figures of the report by group: what each shows, and its files, the HTML first."""
    files: dict[str, dict[str, str]] = {}
    for file in report_files(run):
        stem, _, suffix = file.rpartition("/")[2].rpartition(".")
        files.setdefault(stem, {})[suffix] = file
    return {
        group: [{"shows": SHOWS[name], "files": files[name]} for name in names if name in files]
        for group, names in GROUPS.items()
        if files.keys() & {*names}
    }


def cost_by_stage(run: Run) -> list[dict[str, str]]:
    """One row per stage before the report: its jobs, their time and memory, and the time of training steps.

    Without rows for a run whose stages were not started by Snakemake. Raises DemixError for a record that is damaged.
    """
    if not any(run.folder.glob("benchmarks/**/*.tsv")):
        return []
    with (
        Answers([AskedRun(run.name, run)]) as answers,
        answers.ask("select rule, seconds, cpu_seconds, max_rss_mib from benchmarks") as found,
    ):
        jobs = found.read_pandas()
    ranks = {
        "train": {model.name: model.settings.ranks for model in run.trained},
        "adapt": {one.name: run.config.adaptation.ranks for one in run.adaptations},
    }
    # The report is made while the last stage is under way.
    rows = [_cost_of(stage.name, jobs[jobs["rule"].isin(stage.rules)]) for stage in STAGES[:-1]]
    for row in rows:
        steps = [
            count * step_seconds(run.folder / "metrics" / f"{name}.jsonl")
            for name, count in ranks.get(row["stage"], {}).items()
        ]
        row["steps"] = _clock(sum(steps)) if steps else ""
    return rows


def _cost_of(name: str, jobs: pd.DataFrame) -> dict[str, str]:
    return {
        "stage": name,
        "jobs": f"{len(jobs):,}",
        "time": _clock(jobs["seconds"].sum()),
        "cpu": _clock(jobs["cpu_seconds"].sum()),
        "memory": f"{jobs['max_rss_mib'].max():,.0f} MiB" if len(jobs) else "",
    }


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
