"""Reading the files of a run that a report is made from."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from demix.errors import DemixError
from demix.evaluate.columns import COLUMNS, CONTEXTS, DIFFERENCES, HARNESS, POSTERIORS, PRIORS, TASKS
from demix.files import is_made, read_json, read_json_lines, read_parquet
from demix.launch.pace import elapsed
from demix.report.results import Results
from demix.run.models import Model
from demix.run.run import Run

_SYSTEM = ("model", "experts", "method", "weights")
_EXPERT = ("model", "experts", "weights", "domain", "expert", "seed")
_VARIANT = ("top_k", "variant", "decay", "dev_blocks", "context", "temperature", "expert", "domain", "split", "seed")
# By kind of file: the columns that a file has, and those that no two of its rows have alike.
_FILES: dict[str, tuple[Collection[str], tuple[str, ...]]] = {
    "results": (COLUMNS, (*_SYSTEM, *_VARIANT)),
    "priors": (PRIORS, _EXPERT),
    "posteriors": (POSTERIORS, (*_EXPERT, "decay", "split", "block")),
    "differences": (DIFFERENCES, (*_SYSTEM, "against", "domain", "seed")),
    "overlap": (("domain", "expert", "overlap", "train_tokens", "test_bigrams"), ("domain", "expert")),
    "audit": (("domain", "system", "model", "split", "document", "matched", "share", "nll"), ()),
    "tasks": (TASKS, ()),
    "harness": ((*TASKS, *HARNESS), ()),
    "contamination": (
        ("task", "domain", "documents", "long_documents", "found_documents", "ngrams", "found_ngrams"),
        (),
    ),
    "contexts": (CONTEXTS, ()),
}


def read_rows(path: str | Path, kind: str) -> pd.DataFrame:
    """The rows of a Parquet file of a run, of one of these kinds: results (also of suites), priors, posteriors, …

    Raises DemixError if a column is missing or a row is doubled.
    """
    columns, key = _FILES[kind]
    table = read_parquet(path)
    if missing := [name for name in columns if name not in table.column_names]:
        raise DemixError(path, f"has no column {', '.join(missing)}", "rerun the evaluation with this version of demix")
    rows = table.to_pandas()
    if key and (doubled := rows.duplicated([*key])).any():
        domain = rows.loc[doubled, "domain"].iloc[0]
        cause = f"holds rows of {domain} twice: the evaluation of one domain lies in the place of another's"
        raise DemixError(path, cause, f"delete {Path(path).parent / 'evaluations'} and the file, then rerun")
    return rows


def read_results(path: str | Path) -> Results:
    """The rows of `results.parquet` or `suites.parquet`. Raises DemixError also if they do not compare."""
    return Results(read_rows(path, "results"), path)


def read_tasks(path: str | Path) -> pd.DataFrame:
    """The rows of `tasks.parquet` that are not the harness's."""
    rows = read_rows(path, "tasks")
    return rows[rows["metric"].isna()] if "metric" in rows else rows


def read_harness(path: str | Path) -> pd.DataFrame:
    """The rows of the harness in `tasks.parquet`."""
    rows = read_rows(path, "harness")
    return rows[rows["metric"].notna()]


def read_metrics(path: str | Path) -> Iterable[dict[str, Any]]:
    """The rows of a metrics file; nothing if the run has no such file. Raises DemixError on a row without tokens."""
    path = Path(path)
    if not is_made(path):
        return
    for number, row in enumerate(read_json_lines(path), start=1):
        if "tokens" not in row:
            raise DemixError(f"{path}:{number}", "has no tokens", "rerun the stage that makes it")
        yield row


def step_seconds(metrics: Path) -> float:
    """The seconds that the steps of a training took."""
    return max(elapsed(read_metrics(metrics)), default=0.0)


def tokens_before(run: Run) -> dict[str, int | None]:
    """The tokens that the model in a folder had learned from when a row of `models` began with it, by row.

    None if they are not known.
    """
    files = {model.row: run.folder / "models" / model.name / "model.json" for model in _from_folders(run)}
    made = {row: read_json(path) if is_made(path) else {} for row, path in files.items()}
    return {row: (description.get("parent") or {}).get("tokens") for row, description in made.items()}


def parent_notes(run: Run, before: dict[str, int | None]) -> list[str]:
    """What stands below a table with the tokens of rows; `before` is that of `tokens_before`."""
    return ["Tokens of the model in a folder that a row began with count, too, and those of merged experts."] * any(
        before.values()
    ) + [
        f"Tokens of the parent {model.mixes or model.base.initial} of {model.row} are not known; the row's own "
        f"training took {model.settings.tokens:,}."
        for model in _from_folders(run)
        if before[model.row] is None
    ]


def _from_folders(run: Run) -> list[Model]:
    begun = [model for model in run.trained if model.base.initial or model.mixes]
    return [model for model in begun if model.name == model.row]


@dataclass(frozen=True)
class Parent:
    """What the expert of a novel domain began with: a copy of the training expert `likeliest`, that of highest
    posterior, or the average of all by posterior."""

    likeliest: str
    averaged: bool = False


def read_parents(experts: str | Path, novel: Iterable[str]) -> dict[str, Parent]:
    """The parent of each novel domain's expert, from `models/<model>/experts/<domain>.json`.

    Domains without such a file are left out.
    """
    files = {domain: Path(experts) / f"{domain}.json" for domain in novel}
    lineages = {domain: read_json(path) for domain, path in files.items() if is_made(path)}
    return {domain: _parent(lineage) for domain, lineage in lineages.items()}


def _parent(lineage: Mapping[str, Any]) -> Parent:
    weights = {name: origin["weight"] for name, origin in lineage.get("parents", {}).items()}
    return Parent(max(weights, key=weights.__getitem__), averaged=True) if weights else Parent(lineage["parent"])
