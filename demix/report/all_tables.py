"""All tables of a report as files, with the paper's numbers beside them; the main table for the terminal."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from demix.report import left_out, read
from demix.report.cells import PRINTED_MIXTURES, kinds_of_domains, mean_of, so_many
from demix.report.masked import masked_table
from demix.report.own_tables import (
    audit_table,
    decay_table,
    dev_blocks_table,
    differences_table,
    full_table,
    overlap_table,
    rates_table,
    seeds_table,
    weights_table,
)
from demix.report.paper import SIZES, nearest, printed, size_of
from demix.report.paper_tables import table3, table4, table5, table6, table7, table13
from demix.report.read import Parent, Results, novel_domains, perplexities, training_domains
from demix.report.render import Table, cell, write_table
from demix.run.run import Run
from demix.run.systems import System
from demix.settings import written

if TYPE_CHECKING:
    import rich.table


def scale_note(results: Results, run: Run) -> str:
    """The differences between this run and the paper in data, budget and scale, in a few sentences."""
    given = written(run.config.architecture)
    parts = [f"{len(training_domains(run))} training and {so_many(len(novel_domains(run)), 'novel domain')}"]
    if "preset" in given:
        parts.append(f"architecture {given['preset']}")
    else:
        parts.append(f"{given['layers']} layers of width {given['width']}")
    parts += [
        f"blocks of {run.context:,} tokens",
        f"a vocabulary of {run.config.tokenizer.vocab_size:,}",
        f"{run.config.training.tokens:,} training tokens a model",
    ]
    for column, noun in (("tokens", "test tokens a domain"), ("documents", "test documents a domain")):
        numbers = results.rows.loc[results.rows["split"] == "test", column]
        if len(numbers):
            low, high = int(numbers.min()), int(numbers.max())
            parts.append(f"{low:,} {noun}" if low == high else f"{low:,} to {high:,} {noun}")
    return (
        f"Differs from the paper in data, budget and scale. This run ({run.name}): "
        + ", ".join(parts)
        + (f", {seeds} seeds" if (seeds := len(results.by_seed)) > 1 else ", one seed")
        + ". The paper: its own 8 and 8 domains, 125M to 1.3B parameters a dense model, blocks of 1,024 "
        "tokens, a vocabulary of 50,264, about two days on 32 to 128 GPUs a model. Compare the order, not the values."
    )


def beside_paper(table: Table, run: Run) -> Table:
    """`table` with what the paper prints in the table of the same name, for the run's size or the smallest there is.

    The paper's numbers stand in a column beside the same systems, or in rows below the run's own.
    """
    preset = size_of(run)
    entry = nearest(table.name, preset)
    if entry is None:
        return table
    frame, label = table.frame.copy(), entry.label
    if entry.column:
        frame[label] = pd.Series(entry.column, dtype="float64")
    for name, values in entry.rows.items():
        # An empty cell prints as "–", which means that the run lacks the number: columns of text get a blank.
        blank = [np.nan if frame[column].dtype.kind in "fi" else " " for column in frame]
        frame.loc[f"{label}: {name}"] = [values.get(column, empty) for column, empty in zip(frame, blank, strict=True)]
    means = {f"{label}: {name}" for name in entry.rows if name.startswith("mean")}
    which = (
        f"the paper's {SIZES[entry.preset]} model"
        if entry.preset == preset
        else f"its {SIZES[entry.preset]} model, the only size of this table in the paper"
        if len({one.preset for one in printed() if one.table == table.name}) == 1
        else f"its {SIZES[entry.preset]} model, the smallest, since this run has none of its sizes"
    )
    formats = table.formats | ({label: "{:.1f}"} if entry.column else {})
    return replace(table, frame=frame, summaries=table.summaries | means, formats=formats).noted(
        f"“{label}” is what the paper prints for {which}: on its own domains, of which some here are later or other "
        "releases, trained for about two days on 32 to 128 GPUs, one seed.",
        *([PRINTED_MIXTURES] if table.name != "table13" else []),
    )


def all_tables(
    results: Results,
    differences: pd.DataFrame,
    overlap: pd.DataFrame,
    audit: pd.DataFrame,
    parents: dict[str, Parent],
    trials: pd.DataFrame,
    run: Run,
) -> list[Table]:
    """The paper's tables, then the others."""
    # Experts are added, removed and varied for the run's own seed alone: such tables must not mix in other seeds.
    own = read.of_seed(results, run)
    makers: list[Callable[[Results, Run], Table]] = [table3, table4, table5]
    paper = [*(make(results, run) for make in makers), table6(own, run), table7(own, run)]
    made = [
        *paper,
        table13(own, run, parents),
        weights_table(own, run),
        decay_table(own, run),
        dev_blocks_table(own, run),
        overlap_table(own, overlap, run),
        seeds_table(results, run),
        rates_table(trials),
        full_table(results, run),
        differences_table(differences, run),
        audit_table(audit, run),
    ]
    absent = left_out(run)
    made += [] if "masked" in absent else [masked_table(results, run)]
    return [beside_paper(filled(table), run) for table in made if table.name not in absent]


def filled(table: Table) -> Table:
    """`table` without the rows and columns that have no numbers, and a note that names them."""
    numbers = table.frame.select_dtypes("number").notna()
    if not numbers.to_numpy().any():
        return replace(table, notes=("This run has no rows for this table.", *table.notes))
    rows = [str(label) for label in numbers.index[~numbers.any(axis=1)]]
    columns = list(numbers.columns[~numbers.any(axis=0)])
    kept = replace(table, frame=table.frame.drop(index=rows, columns=columns))
    return kept.noted(f"Without numbers in this run: {', '.join([*rows, *columns])}.") if rows or columns else kept


def write_tables(
    results: Results,
    differences: pd.DataFrame,
    overlap: pd.DataFrame,
    audit: pd.DataFrame,
    parents: dict[str, Parent],
    trials: pd.DataFrame,
    run: Run,
    output_dir: str | Path,
) -> None:
    """Write each table as `<name>.html`, `.md` and `.tex` into `output_dir`."""
    note = scale_note(results, run)
    for table in all_tables(results, differences, overlap, audit, parents, trials, run):
        write_table(table.noted(note), Path(output_dir))


def main_systems(run: Run) -> list[tuple[System, System]]:
    """The lines of `main_table`: each system after the one whose name it has there."""
    systems = [system for row in read.trained_systems(run).values() for system in row]
    lines = [(system, system) for system in systems if not system.weights]
    lines += [
        (system, variant)
        for system in (*(system for system in systems if system.weights == "history"), read.added(run)[1])
        for variant in (system, system.with_weights("released"))
    ]
    return lines + [(system, system) for system in systems if system.weights not in ("", "history")]


def main_table(results: Results, run: Run) -> "rich.table.Table":
    """Mean test perplexity of every system on the training and on the novel domains, for the terminal.

    Each mixture of the paper has one row per rule of weights: all earlier tokens of the block (`history`, the paper)
    and the previous token only (`released`, the code released with the paper). The rules beyond the paper come last.
    """
    import rich.table

    results = read.of_seed(results, run)
    groups = [(kind, domains) for kind, domains in kinds_of_domains(run) if domains]
    table = rich.table.Table(title="Mean test perplexity (lower is better)", title_justify="left")
    table.add_column("system")
    table.add_column("weights")
    for kind, domains in groups:
        table.add_column(so_many(len(domains), f"{kind} domain"), justify="right")
    for named, system in main_systems(run):
        means = [mean_of(perplexities(results, system, domains)) for _, domains in groups]
        # The config may ask for some of the rules alone.
        if np.isnan(means).all():
            continue
        oracle = [kind == "novel" and system.method == "naive" for kind, _ in groups]
        cells = [cell(mean, "{:.2f}") + (" *" if marked else "  ") for mean, marked in zip(means, oracle, strict=True)]
        table.add_row(named.label, system.weights, *cells)
    if novel_domains(run):
        table.caption = "* oracle: the best single token or expert, chosen on the test data"
    return table
