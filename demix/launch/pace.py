"""How far a training is, and how fast: from the rows of the metrics file that it writes while it runs."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

# Rows of metrics from which the speed of a training is taken.
MAX_ROWS = 20


def newest_metrics(checkpoints: Path, since: float) -> Path | None:
    """The metrics file below `checkpoints` that was changed last, at the time `since` or later; None if none was.

    Times are in seconds since 1970. Raises OSError if a file has just been removed, as at the end of a training.
    """
    written = {path: path.stat().st_mtime for path in checkpoints.glob("*/metrics.jsonl")}
    return max((path for path, changed in written.items() if changed >= since), key=written.__getitem__, default=None)


def last_rows(checkpoints: Path, since: float) -> list[dict[str, Any]]:
    """The last MAX_ROWS rows, or fewer, of `newest_metrics`, which raises OSError; none without it."""
    path = newest_metrics(checkpoints, since)
    if path is None:
        return []
    with open(path, "rb") as stream:
        stream.seek(0, os.SEEK_END)
        begin = stream.seek(max(0, stream.tell() - 4096 * MAX_ROWS))
        lines = stream.read().split(b"\n")
    rows = []
    # The first line is a part of one, unless it begins the file.
    for line in lines[bool(begin) : -1][-MAX_ROWS:]:
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def elapsed(rows: Iterable[Row]) -> list[float]:
    """The seconds that a training had taken at each row of its metrics, by their tokens and tokens per second."""
    seconds, tokens, after = 0.0, 0, []
    for row in rows:
        if speed := row.get("tokens_per_second"):
            seconds += (row["tokens"] - tokens) / speed
        tokens = row["tokens"]
        after.append(seconds)
    return after


def speed(updates: Sequence[Row]) -> float:
    """The tokens per second of several updates of one size: these tokens by the seconds that they took."""
    return float(len(updates) / sum(1 / row["tokens_per_second"] for row in updates))


def seconds_left(updates: Sequence[Row], steps: int) -> float:
    """The seconds from the last of several updates to update `steps`, as fast as these were."""
    return float((steps - updates[-1]["step"]) * tokens_of_update(updates) / speed(updates))


def tokens_of_update(updates: Sequence[Row]) -> float:
    """The tokens of one update, from the metrics of several; a seed phase may have had updates of other sizes."""
    first, last = updates[0], updates[-1]
    if last["step"] > first["step"]:
        return float((last["tokens"] - first["tokens"]) / (last["step"] - first["step"]))
    return float(last["tokens"] / last["step"])
