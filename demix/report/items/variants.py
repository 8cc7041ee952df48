"""Mean test perplexity of rows with options of the architecture of their own (ALiBi, CLAP), beside the rows of the same
kind without them.
"""

from typing import Any

from demix.config.architecture import USUAL
from demix.report.domains import mean_of, percent
from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import VARIANTS
from demix.report.table import Table
from demix.run.run import Run
from demix.run.systems import System, systems_of, table_rows
from demix.run.variants import variant_rows

ITEM = TableItem("Variants of the architecture", Group.VARIANTS, 1, needs=(VARIANTS,))


def make(material: Material) -> Table:
    import numpy as np
    import pandas as pd

    run, results, kinds = material.run, material.results, table_rows(material.run)
    pairs = variant_rows(run)
    rows: dict[str, dict[str, Any]] = {}
    beneath: dict[str, dict[str, str]] = {}
    bases = dict.fromkeys(pairs.values())
    for row in (row for base in bases for row in (base, *pairs) if row == base or pairs[row] == base):
        label, base, system = kinds[row].label, pairs.get(row), _system(row, run)
        line: dict[str, Any] = {"Options": _named(run.rows[row].options)}
        spreads = beneath[label] = {}
        for domains in material.kinds:
            name, own = domains.heading, results.perplexities(system, domains.names)
            line[name], spreads[name] = mean_of(own), results.spread(system, domains.names)
            other = results.perplexities(_system(base, run), domains.names) if base else own
            line[f"{name}, %"] = percent(mean_of(other), mean_of(own)) if base else np.nan
            line[f"{name}: lower"] = float((own < other).sum()) if base else np.nan
        rows[label] = line
    frame = pd.DataFrame.from_dict(rows, orient="index")
    return Table(
        "Mean test perplexity of rows with options of architecture of their own, over the training and over the novel "
        "domains, in blocks of the length of training. Lower is better. % is the change from the row of the same kind "
        "without the options, which has the same tokens and updates. Lower: the number of domains where perplexity is "
        "below that row's. Experts are mixed by the cached prior.",
        frame,
        notes=("Masked language models are not here: their numbers compare with no others.",),
        formats={name: "{:+.1f}" for name in frame if name.endswith("%")}
        | {name: "{:.0f}" for name in frame if name.endswith("lower")},
        beneath=pd.DataFrame.from_dict(beneath, orient="index"),
    )


def _system(row: str, run: Run) -> System:
    """The row as tables of families show it: the model, or its experts by the cached prior."""
    found = table_rows(run)[row]
    return systems_of(row, found.kind, found.label)[-1]


def _named(options: dict[str, Any]) -> str:
    given = [f"{name} {value}" for name, value in options.items() if value != USUAL[name]]
    return ", ".join(given) or "learned positions, tied head"
