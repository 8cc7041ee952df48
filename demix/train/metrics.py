"""The metrics of a training: a row for each update and each evaluation, in memory and in a file for who watches."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from demix.errors import DemixError
from demix.files import cannot_be_written, write_text

Row = dict[str, Any]


class DivergedError(DemixError):
    """A loss or gradient is not finite in update `step` (from 1). `metrics` holds the rows of the earlier updates."""

    def __init__(self, step: int, cause: str, cure: str, metrics: list[Row]):
        self.step, self.metrics = step, metrics
        super().__init__(f"step {step}", cause, cure)

    @property
    def rows(self) -> list[Row]:
        """The rows of metrics, with one at the end that has the cause under `diverged`."""
        tokens = self.metrics[-1]["tokens"] if self.metrics else 0
        return [*self.metrics, {"step": self.step, "tokens": tokens, "diverged": self.cause}]


class Metrics:
    """The rows of a training so far. The file `path` holds the same rows; None writes no file."""

    def __init__(self, path: Path | None):
        self.path = path
        self.rows: list[Row] = []

    @property
    def tokens(self) -> int:
        """The tokens of all updates so far."""
        return int(self.rows[-1]["tokens"]) if self.rows else 0

    def begin(self, rows: Iterable[Row]) -> None:
        """Begin with `rows`, those of the updates before, and write the file anew."""
        self.rows = [*rows]
        if self.path is not None:
            write_text(self.path, lines_of(self.rows))

    def record(self, row: Row) -> None:
        """Append a row. Raises DemixError if the file cannot be written."""
        self.rows.append(row)
        if self.path is None:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(lines_of([row]))
        except OSError as error:
            raise cannot_be_written(self.path, error) from error


def lines_of(rows: Iterable[Row]) -> str:
    """Rows as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)
