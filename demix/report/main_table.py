"""The main table of a run for the terminal, and which of its lines do not beat n-grams, for the first page."""

import math

import rich.table

from demix.report.ranking import Entry, Ranking
from demix.report.table import cell


def main_table(ranking: Ranking) -> rich.table.Table:
    """The lines of `ranking` that matter, for the terminal: the lowest mean test perplexity first, oracles last.

    The best model at equal FLOPs is marked. A dagger marks what does not beat the best n-grams.
    """
    material = ranking.material
    counted = {one.kind: _best_ngrams(ranking, one.kind) for one in material.kinds}
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
            beaten = counts is not None and not entry.counts and measured.mean >= counts.on[domains.kind].mean
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
        f"† not better than {counts.label} ({counts.on[one.kind].mean:.2f}) on the {one.said}"
        for one in material.kinds
        if (counts := counted[one.kind])
    ]
    table.caption, table.caption_justify = "\n".join(notes), "left"
    return table


def beside_ngrams(ranking: Ranking) -> list[str]:
    """For each kind of domains which lines of the main table are not better than the best n-grams of the run."""
    told = []
    for domains in ranking.material.kinds:
        best, kind = _best_ngrams(ranking, domains.kind), domains.kind
        lines = [one for one in ranking.entries if not (one.counts or math.isnan(one.on[kind].mean))]
        names = [one.label for one in lines if best and one.on[kind].mean >= best.on[kind].mean]
        listed = "every other row" if len(names) == len(lines) else ", ".join(names) or "no row"
        if best:
            told.append(f"On {domains.said}, not better than {best.label} ({best.on[kind].mean:.2f}): {listed}")
    return told


def _best_ngrams(ranking: Ranking, kind: str) -> Entry | None:
    """The line of n-grams with the lowest mean on a kind of domains."""
    known = (one for one in ranking.entries if one.counts and not math.isnan(one.on[kind].mean))
    return min(known, key=lambda one: one.on[kind].mean, default=None)
