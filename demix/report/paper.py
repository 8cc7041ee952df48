"""The numbers of Tables 3 to 7 and 13 of Gururangan et al. 2021 (arXiv:2108.05036), as printed."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from demix.config.architecture import PRESETS
from demix.progress import so_many
from demix.report.read import Results
from demix.report.table import Table
from demix.run.run import Run
from demix.settings import written

# The paper's names of the sizes in Table 2, by preset.
SIZES = {"gpt3-small": "125M", "gpt3-medium": "350M", "gpt3-large": "760M", "gpt3-xl": "1.3B"}


def size_of(run: Run) -> str | None:
    """The preset of a run, if it is a size of the paper; None for other presets and for a preset with changed sizes."""
    given = written(run.config.architecture)
    changed = given.keys() - {"preset", "context"} or run.context != 1024
    return given["preset"] if given.get("preset") in SIZES and not changed else None


@cache
def _printed() -> dict[str, dict[str, dict[str, Any]]]:
    """The paper's printed numbers by table and preset, with the labels of our table of the same name.

    The keys in `column` and `columns` are rows of our table. `rows` are rows of numbers by column of our table; such a
    row is a domain of the paper, or the paper's mean over domains, whose name begins with "mean".
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for entry in json.loads(Path(__file__).with_name("paper.json").read_text("utf-8")):
        found.setdefault(entry["table"], {})[entry["preset"]] = entry
    return found


def scale_note(results: Results, run: Run) -> str:
    """The differences between the run and the paper in data, budget and scale, in a few sentences."""
    given = written(run.config.architecture)
    parts = [f"{len(run.training)} training and {so_many(len(run.novel), 'novel domain')}"]
    if given.get("preset") in PRESETS:
        parts.append(f"architecture {given['preset']}")
    else:
        parts.append(f"{given['layers']} layers of width {given['width']}")
    parts += [
        f"blocks of {run.context:,} tokens",
        f"a vocabulary of {run.types:,}",
        f"{run.config.training.tokens:,} training tokens per model",
    ]
    return (
        "This run differs from the paper in data, budget and scale. Architecture and optimizer are the paper's unless "
        f"the config sets others. This run ({run.name}): "
        + ", ".join(parts)
        + (f", {seeds} seeds" if (seeds := len(results.by_seed)) > 1 else ", one seed")
        + ". The paper: 8 training and 8 novel domains (its own), dense models of 125M to 1.3B parameters, blocks of "
        "1,024 tokens, a vocabulary of 50,264, about two days on 32 to 128 GPUs per model, one seed. So compare only "
        "the order of methods with the paper, not values."
    )


def with_paper(table: Table, run: Run) -> Table:
    """`table` with the paper's numbers of the table of the same name, for the run's size or else the smallest size.

    The paper's numbers are in columns next to the same systems, or in rows below the run's own rows.
    """
    preset, printed = size_of(run), _printed().get(table.name, {})
    if not printed:
        return table
    size = preset if preset in printed else next(iter(printed))
    entry, label, frame = printed[size], f"Paper, {SIZES[size]}", table.frame.copy()
    columns = {f"{label}: {name}": one for name, one in entry.get("columns", {}).items()}
    columns |= {label: entry["column"]} if "column" in entry else {}
    rows = {f"{label}: {name}": one for name, one in entry.get("rows", {}).items()}
    for name, values in columns.items():
        frame[name] = pd.Series(values, dtype="float64")
    for name, values in rows.items():
        # An empty cell prints as "–", which means that the run lacks the number: columns of text get a blank.
        blank = [np.nan if frame[column].dtype.kind in "fi" else " " for column in frame]
        frame.loc[name] = [values.get(column, empty) for column, empty in zip(frame, blank, strict=True)]
    means = {name for name in rows if name.startswith(f"{label}: mean")}
    which = "" if size == preset else f" (the {'smallest' if len(printed) > 1 else 'only one'} in its table)"
    formats = table.formats | dict.fromkeys(columns, "{:.1f}")
    return replace(table, frame=frame, summaries=table.summaries | means, formats=formats).noted(
        f"“{label}”: the paper's {SIZES[size]} model{which}, on the paper's own text, with one random seed."
    )
