"""The main table of a run for the terminal, and which of its lines do not beat n-grams, for the first page."""

import numpy as np
import rich.table

from demix.report.domains import Domains
from demix.report.material import Material
from demix.report.ranking import Ranking
from demix.report.table import cell
from demix.run.main_systems import main_systems, ngram_lines
from demix.run.systems import System


def main_table(ranking: Ranking) -> rich.table.Table:
    """The lines of `ranking` that matter, for the terminal: the lowest mean test perplexity first, oracles last.

    The best model at equal FLOPs is marked. A dagger marks what does not beat the best n-grams.
    """
    material = ranking.material
    counted = {one.kind: _best_ngrams(material, one) for one in material.kinds}
    table = rich.table.Table(title="Mean test perplexity (lower is better)", title_justify="left")
    table.add_column("")
    for domains in material.kinds:
        table.add_column(domains.counted, justify="right")
        table.add_column("change", justify="right")
    table.add_column("passes", justify="right")
    for entry in ranking.main:
        cells = []
        for domains in material.kinds:
            measured, counts = entry.on[domains.kind], counted[domains.kind]
            beaten = counts is not None and not entry.counts and measured.mean >= counts[1]
            mark = ("*" if entry.oracle_on(domains.kind) else "") + ("†" if beaten else "")
            cells += [f"{cell(measured.mean, '{:.2f}')}{mark:<2}", cell(measured.change, "{:+.1f}%")]
        best = entry is ranking.best
        table.add_row(entry.label + " ◀" * best, *cells, str(entry.passes), style="bold" if best else "")
    notes = [
        f"change: from {ranking.dense.label}; passes: models or experts run for each token",
        "◀ best at equal FLOPs of training, oracles and n-grams left out",
    ]
    notes += ["* oracle: the best expert or token, chosen on the test data"] if material.novel else []
    notes += [
        f"† not better than {counts[0].label} ({counts[1]:.2f}) on the {one.said}"
        for one in material.kinds
        if (counts := counted[one.kind])
    ]
    table.caption, table.caption_justify = "\n".join(notes), "left"
    return table


def beside_ngrams(material: Material) -> list[str]:
    """For each kind of domains which lines of the main table are not better than the best n-grams of the run."""
    return [_beside_ngrams(material, domains) for domains in material.kinds if ngram_lines(material.run)]


def _best_ngrams(material: Material, domains: Domains) -> tuple[System, float] | None:
    """The n-grams of the lowest mean test perplexity on `domains`, with that mean."""
    means = {system: material.own.mean(system, domains.names) for system in ngram_lines(material.run)}
    known = {system: mean for system, mean in means.items() if not np.isnan(mean)}
    return min(known.items(), key=lambda one: one[1]) if known else None


def _beside_ngrams(material: Material, domains: Domains) -> str:
    """Which lines of the main table are not better than the best n-grams on `domains`, by the means that it shows."""
    counts = _best_ngrams(material, domains)
    if counts is None:
        return f"On {domains.said}, no n-grams"
    best, least = counts
    baselines = ngram_lines(material.run)
    lines = [(named.label, system) for named, system in main_systems(material.run) if system not in baselines]
    found = [(label, system.weights, material.own.mean(system, domains.names)) for label, system in lines]
    names = [
        f"{label}, {weights}" if weights not in ("", "history") and weights not in label else label
        for label, weights, mean in found
        if mean >= least
    ]
    every = len(names) == sum(not np.isnan(mean) for *_, mean in found)
    listed = "every other row" if every else ", ".join(names) or "no row"
    return f"On {domains.said}, not better than {best.label} ({least:.2f}): {listed}"
