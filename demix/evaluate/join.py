"""Joining the tables of single domains. Each join is a process of its own, so this module loads little."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from demix.errors import DemixError
from demix.files import read_parquet, write_parquet


def join(inputs: Sequence[Path], output: Path) -> None:
    """Write the rows of all `inputs` to `output`, in their order. Raises DemixError if their columns differ."""
    tables = [read_parquet(path) for path in inputs]
    for path, table in zip(inputs, tables, strict=True):
        if table.schema != tables[0].schema:
            raise DemixError(path, f"has other columns than {inputs[0]}", "join tables of one kind")
    write_parquet(pa.concat_tables(tables), output)
