"""All tables and figures of families, and of variants of the architecture, as files."""

from collections.abc import Callable
from pathlib import Path

import altair as alt
import pandas as pd

from demix.report import left_out, read
from demix.report.all_tables import filled, scale_note
from demix.report.clusters import Clusters, cluster_experts, cluster_sizes, clusters_table
from demix.report.contexts import contexts_table, positions
from demix.report.families import by_clusters, families_table, temperatures_table, top_k_table
from demix.report.family_costs import family_costs_table
from demix.report.family_differences import family_differences_table
from demix.report.figures import write_charts
from demix.report.read import Results
from demix.report.render import Table, write_table
from demix.report.routers import router_loads, routers_table
from demix.report.variants import variants_table
from demix.run.run import Run


def write_families(
    run: Run,
    results: Results,
    differences: pd.DataFrame,
    clusters: Clusters,
    loads: dict[str, pd.DataFrame],
    output: Path,
) -> None:
    """Write the tables and figures of families that the run has into tables/ and figures/ below `output`.

    `loads` are those of `demix.report.routers.read_loads`.
    """
    own, absent = read.of_seed(results, run), left_out(run)
    tables: dict[str, Callable[[], Table]] = {
        "families": lambda: families_table(results, run, read.tokens_before(run)),
        "family_differences": lambda: family_differences_table(own, differences, run),
        "family_costs": lambda: family_costs_table(run),
        "top_k": lambda: top_k_table(results, run),
        "temperatures": lambda: temperatures_table(own, run),
        "clusters": lambda: clusters_table(clusters),
        "routers": lambda: routers_table(loads, run),
    }
    charts: dict[str, Callable[[], alt.TopLevelMixin]] = {
        "by_clusters": lambda: by_clusters(own, run),
        "cluster_experts": lambda: cluster_experts(clusters, run),
        "cluster_sizes": lambda: cluster_sizes(clusters),
        "router_loads": lambda: router_loads(loads, run),
    }
    for name, make in tables.items():
        if name not in absent:
            write_table(filled(make()).noted(scale_note(results, run)), output / "tables")
    write_charts({name: draw() for name, draw in charts.items() if name not in absent}, output / "figures")


def write_variants(results: Results, contexts: pd.DataFrame, run: Run, output: Path) -> None:
    """Write the tables and the figure of variants of the architecture that the run has, as `write_families` does."""
    if "variants" not in left_out(run):
        write_table(filled(variants_table(results, run)).noted(scale_note(results, run)), output / "tables")
    if not contexts.empty:
        write_table(filled(contexts_table(contexts, run)).noted(scale_note(results, run)), output / "tables")
        write_charts({"positions": positions(contexts, run)}, output / "figures")
