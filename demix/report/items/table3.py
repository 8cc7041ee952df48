"""Table 3 of the paper: mean test perplexity over the training domains of two dense baselines, of a dense model with
domain tokens, and of DEMix with the domain known (naive) or mixed with a cached prior.
"""

from demix.report.domains import mean_of, percent
from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.systems import BALANCED, in_domain
from demix.report.table import Table

ITEM = TableItem("Table  3: perplexity on the training domains", Group.PAPER, 3)


def make(material: Material) -> Table:
    import numpy as np
    import pandas as pd

    from demix.report.cells import MEAN_NOTE, beneath_mean, lowest
    from demix.report.results import paired
    from demix.report.verdict import mean_interval

    domains, results = material.kinds[0], material.results
    systems = list(in_domain(material.run))
    columns = {system.label: results.perplexities(system, domains.names) for system in systems}
    balanced = columns[BALANCED.label]
    rows, beneath = {}, {}
    for (label, values), system in zip(columns.items(), systems, strict=True):
        both = values.notna() & balanced.notna()
        other = label != BALANCED.label and both.any()
        rows[label] = {
            "Perplexity": mean_of(values),
            "Against Dense (Balanced), %": percent(mean_of(balanced), mean_of(values)) if other else np.nan,
            "Domains better than Dense (Balanced)": f"{(values < balanced)[both].sum()} of {both.sum()}"
            if other
            else "",
        }
        beneath[label] = {"Perplexity": beneath_mean(results, system, domains.names)}
        bounds = paired(material.bounds, system, BALANCED, domains.names)
        if len(results.by_seed) == 1 and (interval := mean_interval(values - balanced, bounds)):
            low, high = (100 * bound / mean_of(balanced) for bound in interval)
            beneath[label]["Against Dense (Balanced), %"] = f"{low:+.1f} to {high:+.1f}".replace("-", "−")
    frame = pd.DataFrame.from_dict(rows, orient="index")
    seeds = len(results.by_seed)
    return Table(
        f"Test perplexity averaged over {domains.said}, for two dense baselines, a dense "
        "model with domain tokens, and DEMix with the domain known (naive) or mixed with a cached prior. Lower is "
        "better.",
        frame,
        notes=(f"Means over {seeds} seeds, ± the standard deviation of a seed's mean." if seeds > 1 else MEAN_NOTE,),
        formats={"Against Dense (Balanced), %": "{:+.1f}"},
        best=lowest(frame[["Perplexity"]], axis=0),
        beneath=pd.DataFrame.from_dict(beneath, orient="index"),
    )
