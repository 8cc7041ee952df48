"""Rows of `models` with options of `architecture` of their own, and the rows that they are compared with."""

from demix.run.rows import Row
from demix.run.run import Run
from demix.settings import written


def variant_rows(run: Run) -> dict[str, str]:
    """The causal rows that differ from the row named like their kind in options alone, and the names of those rows."""
    rows = {name: row for name, row in run.rows.items() if not row.masked}
    rest = {name: _rest(row) for name, row in rows.items()}
    return {
        name: row.kind.name
        for name, row in rows.items()
        if rest[name] == rest.get(row.kind.name) and row.options != rows[row.kind.name].options
    }


def _rest(row: Row) -> dict[str, object]:
    """The settings of a row but its options of `architecture`."""
    return {key: value for key, value in written(row.settings).items() if key != "architecture"} | {
        "initial": row.initial
    }
