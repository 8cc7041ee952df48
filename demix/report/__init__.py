"""The report of a run: the paper's tables and figures, and which of its claims this run shows.

Importing this package is cheap: pandas, altair and jinja2 are loaded by the functions that need them.
"""

from pathlib import Path

from demix.run.run import Run
from demix.run.variants import variant_rows

PAPER_TABLES = ("table3", "table4", "table5", "table6", "table7", "table13")
TABLES = (*PAPER_TABLES, "weights", "decay", "dev_blocks", "overlap", "seeds", "rates", "full", "differences", "audit")
FIGURES = ("figure2", "figure4", "figure6", "figure7", "figure8", "training")
# Families of models and clusters of documents (docs/families.md).
FAMILY_TABLES = ("families", "family_differences", "family_costs", "top_k", "temperatures", "clusters", "routers")
FAMILY_FIGURES = ("by_clusters", "cluster_experts", "cluster_sizes", "router_loads")
# Variants of the architecture (docs/variants.md).
VARIANT_TABLES, VARIANT_FIGURES = ("variants", "contexts", "masked"), ("positions",)
# Classification by routing (docs/tasks.md).
TASK_TABLES = ("tasks",)
# The titles of the pages, under which the first page and `snakemake --report` list them. Sorting gives the order of the
# paper: hence the second blank in some, which no page shows.
SHOWS = {
    "index": "The run on one page",
    "claims": "Claims of the paper, judged on this run",
    "table3": "Table  3: perplexity on the training domains",
    "table4": "Table  4: perplexity by training domain",
    "table5": "Table  5: perplexity on the novel domains",
    "table6": "Table  6: adding experts",
    "table7": "Table  7: removing experts",
    "table13": "Table 13: adapting to a novel domain, and forgetting",
    "audit": "What is left of a removed domain, word for word",
    "decay": "The decay λ of the prior",
    "dev_blocks": "How much dev text the cached prior needs",
    "differences": "Differences between systems on the same documents",
    "full": "Every system on every domain",
    "overlap": "Affinity of experts and overlap of bigrams",
    "rates": "Learning rates of adaptation",
    "masked": "Masked language models: perplexity in seven folds",
    "seeds": "Against Dense (Balanced), seed by seed",
    "weights": "How experts are weighted: by all earlier text, by the last tokens, or as released",
    "figure2": "Figure 2: how well each expert predicts each domain, and the bigrams that they share",
    "figure4": "Figure 4: which experts the cached prior chooses for each domain",
    "figure6": "Figure 6: adapting to a novel domain with and without forgetting",
    "figure7": "Figure 7: the posterior over experts, block by block, on the training domains",
    "figure8": "Figure 8: the posterior over experts, block by block, on the novel domains",
    "training": "Loss of each model in training",
    "by_clusters": "Perplexity by the number of clusters",
    "cluster_experts": "Experts of clusters on clusters, and clusters against domains",
    "cluster_sizes": "How unequal the clusters of held-out documents are",
    "clusters": "The clusters of documents",
    "contexts": "Perplexity by the length of a block",
    "families": "Families of models: perplexity at equal tokens",
    "family_differences": "Clusters against balanced clusters and against one model",
    "family_costs": "Families of models: parameters, FLOPs, bytes and seconds",
    "router_loads": "Which experts the tokens of each domain choose",
    "routers": "Routers of tokens: what an expert tells of the domain, and loads",
    "positions": "Perplexity by the position in the block",
    "temperatures": "Temperature and number of experts",
    "top_k": "How many experts a token needs",
    "tasks": "Accuracy on tasks by routing",
    "variants": "Variants of the architecture",
}
REPORT_FILES = (
    *(
        f"tables/{name}.{suffix}"
        for name in (*TABLES, *FAMILY_TABLES, *VARIANT_TABLES, *TASK_TABLES)
        for suffix in ("html", "md", "tex")
    ),
    *(
        f"figures/{name}.{suffix}"
        for name in (*FIGURES, *FAMILY_FIGURES, *VARIANT_FIGURES)
        for suffix in ("json", "html", "svg", "png")
    ),
    "claims.html",
    "claims.md",
    "index.html",
)
# What tables, figures and claims are about: a run that has none of it has none of them.
NEEDS = {
    "novel domains": (
        *("table5", "table6", "table13", "rates", "figure6", "figure8"),
        *("novel_against_best_expert", "novel_against_dense", "novel_untold_against_dense"),
        *("novel_against_domain_token", "order_of_priors"),
        *("demix_dapt", "demix_dapt_against_dense_dapt", "dense_dapt_forgets", "one_added_expert_reduces"),
        *("added_experts_help", "added_experts_reduce", "added_experts_do_no_harm"),
    ),
    "second training domain": (
        *("table7", "own_expert_best", "overlap_correlates", "cached_against_naive"),
        *("removal_hurts", "removal_like_never_trained"),
    ),
    "model trained without a domain": ("audit", "removal_like_never_trained"),
    "model dense_unbalanced": ("balancing_helps",),
    "model domain_token": ("novel_against_domain_token",),
}
# The same, of which nothing is told where a run lacks it: few runs are meant to have it.
NEEDS_UNTOLD = {
    "several families": ("families", "family_costs", "top_k"),
    "model that learns from clusters": (
        *("family_differences", "clusters", "by_clusters", "cluster_experts", "cluster_sizes"),
    ),
    "further temperature or context": ("temperatures",),
    "model whose tokens choose experts": ("routers", "router_loads"),
    "masked language model": ("masked",),
    "blocks of other lengths": ("contexts", "positions"),
    "row of other options": ("variants",),
    "task": ("tasks",),
}


def title_of(name: str) -> str:
    """The title of the page of a table, a figure or the claims."""
    return " ".join(SHOWS[name].split())


def left_out(run: Run) -> dict[str, str]:
    """What the report of a run has no table, figure or claim of: their names, each with what the run lacks."""
    evaluation = run.config.evaluation
    rows = {name: row for name, row in run.rows.items() if not row.masked}
    clusters = any(row.settings.data for row in rows.values())
    routers = any(row.kind.routed or row.settings.merged_routed for row in rows.values())
    has = {
        "several families": clusters or routers or any(row.kind.expert_scope == "model" for row in rows.values()),
        "model whose tokens choose experts": routers,
        "model that learns from clusters": clusters,
        "further temperature or context": clusters
        and len(evaluation.temperatures) + len(evaluation.routing_context) > 1,
        "masked language model": any(row.masked for row in run.rows.values()),
        "blocks of other lengths": bool(evaluation.contexts),
        "row of other options": bool(variant_rows(run)),
        "task": bool(run.config.tasks),
        "novel domains": bool(run.novel),
        "second training domain": len(run.training) > 1,
        "model trained without a domain": bool(run.config.removal.retrain_without),
        "model dense_unbalanced": "dense_unbalanced" in rows,
        "model domain_token": "domain_token" in rows,
    }
    needs = NEEDS | NEEDS_UNTOLD
    return {name: need for need in reversed(needs) if not has[need] for name in needs[need]}


def left_out_notes(run: Run) -> list[str]:
    """One line for each thing that a run lacks: what the report leaves out for want of it."""
    absent, notes = left_out(run), []
    for need, about in NEEDS.items():
        names = [name for name in about if absent.get(name) == need]
        claims = sum(name not in SHOWS for name in names)
        told = [name for name in names if name in SHOWS] + [f"{claims} claim{'s' * (claims > 1)}"] * bool(claims)
        if told:
            notes.append(f"This run has no {need}: the report leaves out {', '.join(told)}.")
    return notes


def report_files(run: Run) -> tuple[str, ...]:
    """The files of `REPORT_FILES` that the report of a run has."""
    return tuple(name for name in REPORT_FILES if Path(name).stem not in left_out(run))


def write_report(run: Run, output: Path) -> None:
    """Write every file of `report_files` below `output`.

    The report reads results.parquet, priors.parquet, differences.parquet,
    posteriors.parquet, corpus/overlap.parquet, audit.parquet, tasks.parquet and benchmarks/ (if they exist),
    metrics/*.jsonl, the lineages of the experts, clusters/ and the losses by document of models that learn from
    clusters, loads/ of models whose tokens choose experts, and the losses by position where the config asks for lengths
    of blocks. "–" stands for what the run did not make: a domain that no model was trained without.

    Raises DemixError if a file is missing or damaged or lacks a column, or if the rows of one domain were scored on
    different tokens.
    """
    from demix.files import check_sealed
    from demix.report import read
    from demix.report.all_tables import scale_note, write_tables
    from demix.report.claims import write_claims
    from demix.report.clusters import read_clusters
    from demix.report.contexts import read_contexts
    from demix.report.family_pages import write_families, write_variants
    from demix.report.figures import write_figures
    from demix.report.index import cost_by_stage, write_index
    from demix.report.routers import read_loads
    from demix.report.tasks import write_tasks

    results = read.read_results(run.folder / "results.parquet")
    priors = read.read_priors(run.folder / "priors.parquet").query("seed == @run.seed")
    differences = read.read_differences(run.folder / "differences.parquet")
    overlap = read.read_overlap(run.folder / "corpus" / "overlap.parquet")
    audit = read.read_audit(run.folder / "audit.parquet")
    posteriors = read.read_posteriors(run.folder / "posteriors.parquet")
    parents = read.read_parents(run.folder / "models" / read.added(run)[0].model / "experts", read.novel_domains(run))
    trials = read.read_trials(run.folder / "models", run)
    # The curves are drawn long after the tables; a damaged file must be refused before anything is written.
    for path in sorted((run.folder / "metrics").glob("*.jsonl")):
        check_sealed(path)
    cost, clusters, loads = cost_by_stage(run), read_clusters(run), read_loads(run)
    contexts = read_contexts(run)
    write_tables(results, differences, overlap, audit, parents, trials, run, output / "tables")
    own = read.of_seed(results, run)
    write_figures(own, priors, overlap, posteriors, run.folder / "metrics", run, output / "figures")
    write_families(run, results, differences, clusters, loads, output)
    write_variants(results, contexts, run, output)
    write_tasks(run, output, scale_note(results, run))
    judged = write_claims(results, overlap, differences, parents, run, output, clusters)
    write_index(results, judged, cost, run, output)
