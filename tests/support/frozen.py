"""The run of tests/frozen/run.tar.xz, which the workflow made: one model of each type, on a few thousand words."""

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from demix.config.evaluation import MixingRecipe
from demix.config.models import PAPER
from demix.config.training import selected
from demix.evaluate.domain import Evaluation, evaluate
from demix.files import read_json, read_parquet, write_parquet
from demix.report.read import Results
from demix.report.run_data import RunData
from demix.run.evaluated import comparisons, evaluated
from demix.run.run import FORMAT, Run
from support.configs import with_keys

ARCHIVE = Path(__file__).parents[1] / "frozen" / "run.tar.xz"


def unpack(folder: Path) -> None:
    """Unpack the run into `folder`."""
    with tarfile.open(ARCHIVE) as archive:
        # Python before 3.11.4 has no such filter.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    if read_json(folder / "config.json")["format"] != FORMAT:
        raise RuntimeError(f"{ARCHIVE}: has another format than demix writes, {FORMAT}; run `make frozen`")


def rows_of(run: Run, name: str = "results") -> pd.DataFrame:
    """The rows of a Parquet file of the run, as pandas reads it: `results`, `differences`, `corpus/overlap`, …"""
    return pd.read_parquet(run.folder / f"{name}.parquet")


def run_data(run: Run, **given: Any) -> RunData:
    """What the report reads of a run, but for the values `given`, by the names of properties of `RunData`.

    `results` and `suites` may be data frames.
    """
    frames = {name: Results(value) for name, value in given.items() if name in ("results", "suites")}
    frames = {name: frame for name, frame in frames.items() if isinstance(given[name], pd.DataFrame)}
    return RunData(run, given | frames)


def copied(run: Run, folder: Path) -> Run:
    """A copy of a run in `folder`, which must not exist."""
    return Run.read(shutil.copytree(run.folder, folder))


def rewrite(run: Run, name: str, change: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    """Change the rows of a Parquet file of the run. Columns keep their types."""
    path = run.folder / f"{name}.parquet"
    table = read_parquet(path)
    frame = change(table.to_pandas(integer_object_nulls=True))
    write_parquet(pa.Table.from_pandas(frame, table.schema, preserve_index=False), path)


def evaluate_again(run: Run) -> list[Path]:
    """Evaluate what the run has score tables of, by the stage; returns the files of results."""
    results, recipe = [], selected(MixingRecipe, run.config.evaluation)
    for domain in run.domains:
        tables = tuple(one for one in evaluated(run, domain) if (run.folder / "scores" / one.folder).exists())
        pairs = tuple(comparisons(run, domain))
        evaluation = Evaluation(**recipe, kind=run.kind_of(domain), tables=tables, pairs=pairs, seed=run.seed)
        results.append(run.folder / "evaluations" / f"{domain}.parquet")
        evaluate(domain, run.folder / "scores", evaluation, results[-1], run.folder / "tokenizer.json")
    return results


def with_models(run: Run, folder: Path, *models: str, **sections: Any) -> Run:
    """A copy in `folder` as if the run had had only these rows of `models`, and neither clusters, tasks nor suites.

    `sections` replace sections of its config.
    """
    shutil.copytree(run.folder, folder, ignore=shutil.ignore_patterns("clusters", "harness", "*.contexts.*"))
    keys = {name: given for name, given in run.config.values.items() if name not in ("tasks", "lm_eval", "clusterings")}
    keys["models"] = {name: row for name, row in keys["models"].items() if name in models}
    keys["models"] |= {"demix": {}} | dict.fromkeys({*PAPER} - {*models})
    plain = {name: keys["evaluation"][name] for name in ("dev_blocks", "test_tokens", "decays", "prior_blocks")}
    keys["evaluation"] = plain | {"weights": ["history", "released", "tempered", "switching"]}
    keys["removal"] = keys["removal"] | {"merged": []}
    made = with_keys(folder, keys | sections)
    gone, seeds = {*run.rows} - {*made.rows}, {made.seed, *made.config.further_seeds}
    for kind in ("metrics", "models", "scores"):
        for path in (folder / kind).iterdir():
            row, seed = run.row_of(path.stem)
            if row in gone or seed not in seeds or "@" in row:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in ("tasks", "task_weights", "suites"):
        (folder / f"{name}.parquet").unlink()
    for name in ("results", "differences", "priors", "posteriors"):
        rewrite(made, name, lambda rows: rows[rows["seed"].isin(seeds) & _is_of(rows, gone)])
    return made


def _is_of(rows: pd.DataFrame, gone: set[str]) -> pd.Series:
    """Which rows are of none of the models that are `gone`, of n-grams, of merged models or of clusters."""
    kept = ~rows["model"].isin(gone) & ~rows["model"].str.startswith("ngram")
    kept &= ~rows["method"].eq("merged") if "method" in rows else True
    return kept & ~rows["weights"].str.startswith("cluster")
