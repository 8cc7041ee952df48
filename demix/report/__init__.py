"""The report of a run: the paper's tables and figures, and which of its claims this run shows.

Importing this package is cheap: pandas, altair and jinja2 are loaded by the functions that need them.
"""

from pathlib import Path

from demix.report.item import Item
from demix.report.items import ITEMS
from demix.report.needs import STATED, missing
from demix.run.run import Run


def report_items(run: Run) -> list[Item]:
    """The tables, figures and pages that the report of a run has."""
    return [item for item in ITEMS if not missing(item.needs, run)]


def report_files(run: Run) -> tuple[str, ...]:
    """The files of the report of a run, below its folder."""
    return tuple(file for item in report_items(run) for file in item.files.values())


def left_out_notes(run: Run) -> list[str]:
    """One sentence that names what the run lacks, so that the report leaves parts out; none for a complete run."""
    lacking = [need.name for need in STATED if not need.met(run)]
    sentence = f"This run has no {', no '.join(lacking)}; tables, figures and claims that need them are left out."
    return [sentence] if lacking else []


def write_report(run: Run, output: Path) -> None:
    """Write every file of `report_files` below `output`.

    The report reads results.parquet, priors.parquet, differences.parquet, posteriors.parquet, corpus/overlap.parquet,
    the corpus cards, the models' descriptions, tasks.parquet and benchmarks/ (if they exist), metrics/*.jsonl, the
    lineages of the experts, clusters/ and the losses by document of models that train on clusters, and the losses by
    position if the config has other block lengths. "–" is printed for a number that the run does not have, such as the
    perplexity of a model without a domain if no such model was trained.

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
