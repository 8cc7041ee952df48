"""Mean test perplexity of each row that learns from clusters minus that of the row of as many balanced clusters, and
minus that of the balanced dense model, on the same documents, with intervals over documents.
"""

from demix.report.domains import mean_of, percent
from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import CLUSTERS
from demix.report.systems import BALANCED
from demix.report.table import Table
from demix.run.compared import balanced_pairs
from demix.run.systems import by_distance, clustered, routed_weights

ITEM = TableItem("Clusters against balanced clusters and against one model", Group.FAMILIES, 2, needs=(CLUSTERS,))


def make(material: Material) -> Table:
    """Each row that learns from clusters less the balanced row of as many clusters, and less Dense (Balanced)."""
    import pandas as pd

    from demix.report.cells import WITHIN_NOTE
    from demix.report.results import paired
    from demix.report.verdict import mean_interval

    run, results = material.run, material.own
    weights, base_of = routed_weights(run), dict(balanced_pairs(run))
    systems = [by_distance(model, weights) for model in clustered(run)] if weights else []
    rows: dict[str, dict[str, float]] = {}
    beneath: dict[str, dict[str, str]] = {}
    pairs = [(system, base) for system in systems for base in (base_of.get(system), BALANCED) if base]
    for system, base in pairs:
        label = f"{system.label} less {base.label}"
        row, lines = rows.setdefault(label, {}), beneath.setdefault(label, {})
        for domains in material.kinds:
            own, other = (results.perplexities(one, domains.names) for one in (system, base))
            bounds = paired(material.bounds, system, base, domains.names)
            interval, name = mean_interval(own - other, bounds), domains.heading
            row[name] = mean_of(own - other)
            row[f"{name}, %"] = percent(mean_of(other), mean_of(own))
            row[f"{name}: lower"] = float((own < other).sum())
            row[f"{name}: surely lower"] = float((bounds["high"] < 0).sum())
            row[f"{name}: surely higher"] = float((bounds["low"] > 0).sum())
            lines[name] = f"[{interval[0]:+.2f}, {interval[1]:+.2f}]".replace("-", "−") if interval else ""
    frame = pd.DataFrame.from_dict(rows, orient="index", dtype="float64")
    return Table(
        "The mean test perplexity of each row that learns from clusters, minus that of another: of the row of as many "
        "balanced clusters and tokens, or of Dense (Balanced). Negative: better than the other. Below it the 95% "
        "interval from resampling test documents, the same ones for both. Experts are weighted by the distance of the "
        "text so far to each cluster. Then the number of domains where perplexity is lower, and of those where it is "
        "surely lower or surely higher: the whole interval of the domain is below zero, or above.",
        frame,
        notes=(
            "The interval of a mean is there where every domain has one. Where a domain has fewer than 20 test "
            f"documents, blocks of their text are resampled, within these documents. {WITHIN_NOTE} Intervals are of "
            "one training and say nothing of seeds.",
        ),
        formats={name: "{:+.1f}" if name.endswith("%") else "{:.0f}" if ":" in name else "{:+.2f}" for name in frame},
        beneath=pd.DataFrame.from_dict(beneath, orient="index"),
    )
