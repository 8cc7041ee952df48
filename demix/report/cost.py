"""What the stages of a run cost: jobs, time, memory."""

import pandas as pd

from demix.query.ask import Answers
from demix.query.views import AskedRun
from demix.report.read import step_seconds
from demix.run.run import Run

# The stages of pages/pipeline.svg, each with its rules, by the folders below benchmarks/.
STAGES = {
    "data": (
        *("read", "download", "divide", "source_card", "import_parent", "anonymize"),
        *("deduplicate", "novel_duplicates", "split", "hold_out"),
    ),
    "tokenizer": ("tokenizer",),
    "shards": (
        *("tokenize", "tokenize_suite", "overlap", "fit_clusters", "assign", "cluster_shards", "examples"),
        *("harness_documents", "contamination"),
    ),
    "train": ("sweep", "choose_rate", "seed", "train", "join"),
    "adapt": ("adapt", "adapt-dense"),
    "score": ("score", "score_ngrams", "merge_routed", "route", "fewshot", "harness"),
    "remove": ("audit",),
    "mix, evaluate": ("average", "choose_mixing", "evaluate", "contexts", "results", "suites", "classify"),
    "report, track": ("run_config", "report", "card", "track"),
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
    rows = [_cost_of(stage, jobs[jobs["rule"].isin(rules)]) for stage, rules in [*STAGES.items()][:-1]]
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
