"""Losses by the length of a block and by the position in it."""

import pandas as pd

from demix.errors import DemixError
from demix.evaluate.columns import CONTEXTS
from demix.files import read_parquet
from demix.run.contexts import asked_contexts
from demix.run.run import Run


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
