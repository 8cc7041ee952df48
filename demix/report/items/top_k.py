"""Mean test perplexity by the number of experts that are mixed at each token, the likeliest ones; as in Figure 9 and
Table 9 of the c-BTM paper.
"""

from dataclasses import replace

from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import FAMILIES
from demix.report.table import Table

ITEM = TableItem("How many experts a token needs", Group.FAMILIES, 4, needs=(FAMILIES,))


def make(material: Material) -> Table:
    import pandas as pd

    from demix.report.cells import lowest
    from demix.report.families import families, tried_top_k

    run, results, known = material.run, material.results, families(material.run).values()
    rows: dict[str, dict[str, float]] = {}
    for family in known:
        lines = rows[family.system.label] = {}
        for domains in material.kinds:
            for k in tried_top_k(run, family.experts) if family.model.kind.has_experts else ():
                lines[f"{domains.heading}, top-{k}"] = results.mean(replace(family.system, top_k=k), domains.names)
            lines[f"{domains.heading}, all"] = results.mean(family.system, domains.names)
    ks = tried_top_k(run, max((family.experts for family in known), default=1))
    columns = [f"{domains.heading}, {k}" for domains in material.kinds for k in (*(f"top-{k}" for k in ks), "all")]
    frame = pd.DataFrame.from_dict(rows, orient="index").reindex(columns=columns)
    return Table(
        "Mean test perplexity by the number of experts that are mixed at each token, the likeliest ones (as in Figure "
        "9 and Table 9 of the c-BTM paper). Lower is better.",
        frame,
        notes=("A model without domain experts is under “all”.",),
        best=lowest(frame, axis=0),
    )
