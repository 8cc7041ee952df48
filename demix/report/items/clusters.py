"""The terms that weigh most in the centre of each cluster, its documents, and the domain that most of these are of; as
in Tables 2 to 7 of the c-BTM paper.
"""

from typing import Any

from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import CLUSTERS
from demix.report.table import Table

ITEM = TableItem("The clusters of documents", Group.FAMILIES, 6, needs=(CLUSTERS,))


def make(material: Material) -> Table:
    import pandas as pd

    from demix.report.clusters import SPLITS, TOP_TERMS

    clusters, rows = material.clusters, dict[str, dict[str, Any]]()
    for data, terms in clusters.terms.items():
        own = clusters.documents[clusters.documents["clustering"] == data]
        for cluster, most in terms.items():
            found = own[own["cluster"] == cluster]
            trained_on, held_out = (found[found["split"] == split].set_index("domain")["documents"] for split in SPLITS)
            domain = str(trained_on.idxmax())
            rows[f"{data} {cluster}"] = {
                "Terms": ", ".join(most),
                "Training documents": float(trained_on.sum()),
                "Test documents": float(held_out.sum()),
                "Most are of": domain,
                "of which, %": 100 * trained_on[domain] / max(1, trained_on.sum()),
            }
    return Table(
        f"The {TOP_TERMS} terms that weigh most in each cluster's centre (mapped back by the inverse of the SVD, as in "
        "Tables 2 to 7 of the c-BTM paper), the cluster's documents, and the domain of most of its training documents.",
        pd.DataFrame.from_dict(rows, orient="index"),
        notes=("A balanced clustering has equal clusters in its sample; every document then goes to the nearest one.",),
        formats=dict.fromkeys(("Training documents", "Test documents", "of which, %"), "{:,.0f}"),
    )
