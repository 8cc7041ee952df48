"""The report of a run: the paper's tables and figures, and which of its claims this run shows.

Importing this package is cheap: pandas, altair and jinja2 are loaded by the functions that need them.
"""

from pathlib import Path
from typing import Any

PAPER_TABLES = ("table3", "table4", "table5", "table6", "table7", "table13")
TABLES = (*PAPER_TABLES, "weights", "decay", "dev_blocks", "overlap", "seeds", "rates", "full", "differences", "audit")
FIGURES = ("figure2", "figure4", "figure6", "figure7", "figure8", "training")
# The entries of `snakemake --report`, worded so that sorting gives the order of the paper.
SHOWS = {
    "claims": "Each claim of the paper, and whether this run shows it",
    "table3": "Table  3: training domains, baselines against DEMix",
    "table4": "Table  4: each training domain, baselines against DEMix",
    "table5": "Table  5: novel domains, baselines against every mixture",
    "table6": "Table  6: before and after experts are added",
    "table7": "Table  7: a domain with its expert, without it, never trained on",
    "table13": "Table 13: forgetting, Dense-DAPT against DEMix-DAPT",
    "audit": "What is left of a removed domain's documents",
    "decay": "Decays of the prior against one another",
    "dev_blocks": "Cached prior by the dev text it is taken from",
    "differences": "Systems less Dense (Balanced) and less cached DEMix, with intervals",
    "full": "Every system on every domain",
    "overlap": "Bigram overlap against perplexity: correlations",
    "rates": "Learning rates of adaptation, DEMix-DAPT against Dense-DAPT",
    "seeds": "Systems against Dense (Balanced) within each seed",
    "weights": "Weights by all earlier tokens against the last few",
    "figure2": "Figure 2: each expert on each domain",
    "figure4": "Figure 4: cached prior of each domain",
    "figure6": "Figure 6: adaptation, Dense-DAPT against DEMix-DAPT",
    "figure7": "Figure 7: posterior over blocks, training domains",
    "figure8": "Figure 8: posterior over blocks, novel domains",
    "training": "Training loss of all models",
}
REPORT_FILES = (
    *(f"tables/{name}.{suffix}" for name in TABLES for suffix in ("html", "md", "tex")),
    *(f"figures/{name}.{suffix}" for name in FIGURES for suffix in ("json", "html", "svg", "png")),
    "claims.html",
    "claims.md",
)


def write_report(run: Path, config: dict[str, Any], output: Path) -> None:
    """Write every file of REPORT_FILES below `output`.

    `run` is the run's folder. The report reads results.parquet, priors.parquet, differences.parquet,
    posteriors.parquet, corpus/overlap.parquet, audit.parquet (if it exists), metrics/*.jsonl and the lineages of the
    experts. `config` is the run's config; the report shows domains in the config's order. "–" stands for what the run
    did not make: a model that was not trained again, a domain without adaptation.

    Raises DemixError if a file is missing or damaged or lacks a column, or if the rows of one domain were scored on
    different tokens.
    """
    from demix.files import check_sealed
    from demix.report import read
    from demix.report.all_tables import write_tables
    from demix.report.claims import write_claims
    from demix.report.figures import write_figures

    results = read.read_results(run / "results.parquet")
    priors = read.read_priors(run / "priors.parquet").query("seed == @config['seed']")
    differences = read.read_differences(run / "differences.parquet")
    overlap = read.read_overlap(run / "corpus" / "overlap.parquet")
    audit = read.read_audit(run / "audit.parquet")
    posteriors = read.read_posteriors(run / "posteriors.parquet")
    parents = read.read_parents(run / "models" / read.added(config)[0].model / "experts", read.novel_domains(config))
    trials = read.read_trials(run / "models", config)
    # The curves are drawn long after the tables; a damaged file must be refused before anything is written.
    for path in sorted((run / "metrics").glob("*.jsonl")):
        check_sealed(path)
    write_tables(results, differences, overlap, audit, parents, trials, config, output / "tables")
    own = read.of_seed(results, config)
    write_figures(own, priors, overlap, posteriors, run / "metrics", config, output / "figures")
    write_claims(own, overlap, differences, parents, config, output)
