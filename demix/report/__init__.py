"""The report of a run: the paper's tables and figures, and which of its claims this run shows.

Importing this package is cheap: pandas, altair and jinja2 are loaded by the functions that need them.
"""

from pathlib import Path
from typing import Any

TABLES = ("table3", "table4", "table5", "table6", "table7", "table13")
FIGURES = ("figure2", "figure4", "figure6", "training")
REPORT_FILES = (
    *(f"tables/{name}.{suffix}" for name in TABLES for suffix in ("html", "md", "tex")),
    *(f"figures/{name}.{suffix}" for name in FIGURES for suffix in ("json", "svg", "png")),
    "claims.html",
    "claims.md",
)


def write_report(results: Path, priors: Path, metrics_dir: Path, config: dict[str, Any], output: Path) -> None:
    """Write every file of REPORT_FILES below `output`.

    `results` and `priors` are the evaluation's Parquet files, `metrics_dir` holds the `<model>.jsonl` files of
    training and adaptation, and `config` is the run's config, whose order of domains is the order shown.
    What the run did not make (a model not trained again, a domain not adapted to) is shown as "–".

    Raises DemixError if a file is missing, damaged or without a column, or if the rows of one domain were
    scored on different tokens.
    """
    from demix.report.claims import write_claims
    from demix.report.figures import write_figures
    from demix.report.results import read_priors, read_results
    from demix.report.tables import write_tables

    result_rows, prior_rows = read_results(results), read_priors(priors)
    write_tables(result_rows, prior_rows, config, Path(output) / "tables")
    write_figures(result_rows, prior_rows, metrics_dir, config, Path(output) / "figures")
    write_claims(result_rows, prior_rows, config, Path(output))
