"""The main table of a run, for the terminal and for the first page."""

import numpy as np
import rich.table

from demix.report.domains import Domains
from demix.report.material import Material
from demix.report.table import cell
from demix.run.main_systems import main_systems, ngram_lines


def main_table(material: Material) -> rich.table.Table:
    """Mean test perplexity of every system on the training and on the novel domains.

    Each mixture of the paper has one row per rule of weights: all earlier tokens of the block (`history`, the paper)
    and the previous token only (`released`, the code released with the paper). The rules beyond the paper come last,
    and n-grams after them, with a line below the table of what does not beat them.
    """
    table = rich.table.Table(title="Mean test perplexity (lower is better)", title_justify="left")
    table.add_column("system")
    table.add_column("weights")
    for domains in material.kinds:
        table.add_column(domains.said, justify="right")
    for named, system in main_systems(material.run):
        means = [material.own.mean(system, domains.names) for domains in material.kinds]
        # The config may ask for some of the rules alone.
        if np.isnan(means).all():
            continue
        oracle = [domains.kind == "novel" and system.method == "naive" for domains in material.kinds]
        cells = [cell(mean, "{:.2f}") + (" *" if marked else "  ") for mean, marked in zip(means, oracle, strict=True)]
        table.add_row(named.label, system.weights, *cells)
    notes = ["* oracle: the best single token or expert, chosen on the test data"] if material.novel else []
    notes += beside_ngrams(material)
    table.caption = ".\n".join(notes) or None
    return table


def beside_ngrams(material: Material) -> list[str]:
    """For each kind of domains which lines of the main table are not better than the best n-grams of the run."""
    return [_beside_ngrams(material, domains) for domains in material.kinds if ngram_lines(material.run)]


def _beside_ngrams(material: Material, domains: Domains) -> str:
    """Which lines of the main table are not better than the best n-grams on `domains`, by the means that it shows."""
    means = {system: material.own.mean(system, domains.names) for system in ngram_lines(material.run)}
    baselines = [system for system, mean in means.items() if not np.isnan(mean)]
    if not baselines:
        return f"On {domains.said}, no n-grams"
    best = min(baselines, key=lambda system: means[system])
    lines = [(named.label, system) for named, system in main_systems(material.run) if system not in baselines]
    found = [(label, system.weights, material.own.mean(system, domains.names)) for label, system in lines]
    names = [
        f"{label}, {weights}" if weights not in ("", "history") and weights not in label else label
        for label, weights, mean in found
        if mean >= means[best]
    ]
    every = len(names) == sum(not np.isnan(mean) for *_, mean in found)
    told = "every other row" if every else ", ".join(names) or "no row"
    return f"On {domains.said}, not better than {best.label} ({means[best]:.2f}): {told}"
