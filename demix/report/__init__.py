"""The report of a run: the paper's tables and figures, and which of its claims this run shows.

Importing this package is cheap: pandas, altair and jinja2 are loaded by the functions that need them.
"""

from pathlib import Path

from demix.progress import so_many
from demix.report.item import Item
from demix.report.items import ITEMS, all_items
from demix.report.needs import TOLD, missing
from demix.run.run import Run


def report_items(run: Run) -> list[Item]:
    """The tables, figures and pages that the report of a run has."""
    return [item for item in ITEMS if not missing(item.needs, run)]


def report_files(run: Run) -> tuple[str, ...]:
    """The files of the report of a run, below its folder."""
    return tuple(file for item in report_items(run) for file in item.files.values())


def left_out(run: Run) -> dict[str, str]:
    """What the report of a run has no table, figure or claim of: their names, each with what the run lacks."""
    from demix.report.claims import needs_of_claims

    needs = {name: item.needs for name, item in all_items().items()} | needs_of_claims()
    return {name: need.name for name, wanted in needs.items() if (need := missing(wanted, run))}


def left_out_notes(run: Run) -> list[str]:
    """One line for each thing that a run lacks: what the report leaves out for want of it."""
    absent, items, notes = left_out(run), all_items(), []
    for need in TOLD:
        names = [name for name, lacks in absent.items() if lacks == need.name]
        told = [items[name].title.partition(":")[0] for name in names if name in items]
        claims = len(names) - len(told)
        told = [title if title[-1].isdigit() else f"“{title}”" for title in told]
        told += [so_many(claims, "claim")] * bool(claims)
        if told:
            *others, last = told
            listed = f"{', '.join(others)} and {last}" if others else last
            notes.append(f"This run has no {need.name}: the report leaves out {listed}.")
    return notes


def write_report(run: Run, output: Path) -> None:
    """Write every file of `report_files` below `output`.

    The report reads results.parquet, priors.parquet, differences.parquet, posteriors.parquet, corpus/overlap.parquet,
    the cards of the corpora, the models' descriptions, tasks.parquet and benchmarks/ (if they exist),
    metrics/*.jsonl, the lineages of the experts, clusters/ and the losses by document of models that learn from
    clusters, and the losses by position where the config asks for lengths of blocks. "–" stands for what the run did
    not make: a domain that no model was trained without.

    Raises DemixError if a file is missing or damaged or lacks a column, or if the rows of one domain were scored on
    different tokens.
    """
    from altair.utils.schemapi import debug_mode

    from demix.report.run_data import RunData

    data = RunData(run).read()
    # A chart is checked when it is written, not each of its parts when it is made.
    with debug_mode(False):
        for item in report_items(run):
            item.write(data, output)


def report_of(run: Path, output: Path) -> None:
    """Make the tables, figures and claims of the run in the folder `run`."""
    write_report(Run.read(run), output)
