"""Table 6 of the paper: test perplexity with a cached prior, before and after DEMix-DAPT adds an expert for each novel
domain.
"""

from demix.progress import so_many
from demix.report.domains import mean_of, percent
from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import NOVEL
from demix.report.systems import ByDomain, before_adding, released
from demix.report.table import Table
from demix.run.main_systems import added

ITEM = TableItem("Table  6: adding experts", Group.PAPER, 6, needs=(NOVEL,))


def make(material: Material) -> Table:
    import numpy as np
    import pandas as pd

    from demix.report.cells import COUNTED, by_domain, lowest

    results = material.own
    few, many = "Training experts", "With the added experts"
    systems: dict[str, ByDomain] = {few: before_adding(material.run)[1], many: added(material.run)[1]}
    parts, lines, summaries = [], [], list[str]()
    notes: tuple[str, ...] = ()
    for domains in material.kinds:
        part, beneath, told = by_domain(results, systems, domains.names)
        means = {f"Mean of {domains.counted}": [mean_of(part[few]), mean_of(part[many])]}
        means[f"Mean of {domains.counted}, released weights"] = [
            results.mean(released(system), domains.names) for system in systems.values()
        ]
        for label, values in means.items():
            part.loc[label] = [*values, np.nan, np.nan]
        summaries += means
        parts.append(part)
        lines += [beneath] if beneath is not None else []
        # The note that no domain has an interval is kept only if it holds for both kinds.
        notes = told if beneath is not None or not notes else notes
    frame = pd.concat(parts)
    best = lowest(frame[[few, many]], axis=1)
    frame.insert(2, "Change, %", percent(frame[few], frame[many]))
    return Table(
        f"Test perplexity with a cached prior: of the mixture of {so_many(len(material.training), 'expert')} trained "
        f"together, and of the mixture of these and the {len(material.novel)} that DEMix-DAPT added. First come the "
        "training domains, then the novel ones. Lower is better.",
        frame,
        notes=notes,
        formats={"Change, %": "{:+.2f}"} | COUNTED,
        summaries=frozenset(summaries),
        best=best,
        beneath=pd.concat(lines) if lines else None,
    )
