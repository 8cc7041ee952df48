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


def write_report(run: Path, config: dict[str, Any], output: Path) -> None:
    """Write every file of REPORT_FILES below `output`.

    `run` is the run's folder, of which results.parquet, priors.parquet, metrics/*.jsonl and the lineages of the
    experts are read. `config` is the run's config, whose order of domains is the order shown.
    What the run did not make (a model not trained again, a domain not adapted to) is shown as "–".

    Raises DemixError if a file is missing, damaged or without a column, or if the rows of one domain were
    scored on different tokens.
    """
    from demix.report.claims import write_claims
    from demix.report.figures import write_figures
    from demix.report.results import novel_domains, read_overlap, read_parents, read_priors, read_results
    from demix.report.tables import write_tables

    results, priors = read_results(run / "results.parquet"), read_priors(run / "priors.parquet")
    parents = read_parents(run / "models" / "demix" / "experts", novel_domains(config))
    write_tables(results, parents, config, output / "tables")
    overlap = read_overlap(run / "corpus" / "overlap.parquet")
    write_figures(results, priors, overlap, run / "metrics", config, output / "figures")
    write_claims(results, parents, config, output)
