"""Mean test perplexity of experts of clusters by the temperature of their weights and by the number of experts a token;
as in Table 9 of the c-BTM paper.
"""

from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import TEMPERATURES
from demix.report.table import Table
from demix.run.systems import routed_weights

ITEM = TableItem("Temperature and number of experts", Group.FAMILIES, 5, needs=(TEMPERATURES,))


def make(material: Material) -> Table:
    import pandas as pd

    from demix.report.families import families

    evaluation, rows = material.run.config.evaluation, dict[str, dict[str, float]]()
    tried = material.own.rows.query("split == 'test' and variant == 'routing' and method == 'uniform'")
    tried = tried.assign(k=[f"top-{k:.0f}" if pd.notna(k) else "all" for k in tried["top_k"]])
    for family in families(material.run).values():
        found = tried[(tried["model"] == family.model.row) & (tried["weights"] == routed_weights(material.run))]
        for domains in material.kinds:
            by_domain = found.pivot_table("perplexity", ["context", "temperature", "k"], "domain")
            means = by_domain.reindex(columns=domains.names).dropna().mean(axis=1)
            for (context, temperature, k), mean in means.items():
                row = rows.setdefault(f"{family.model.label}, {context}, τ = {temperature:g}", {})
                row[f"{domains.heading}, {k}"] = mean
    ks = (*(f"top-{k}" for k in sorted(evaluation.top_k)), "all")
    columns = [f"{domains.heading}, {k}" for domains in material.kinds for k in ks]
    return Table(
        "Mean test perplexity of experts that are weighted by the distance of a context to their clusters. Rows differ "
        "in the context (the document so far, what of it is in the block, or no more of it than its first half) and in "
        "the temperature τ, columns in the number of experts a token (as in Table 9 of the c-BTM paper). Lower is "
        "better.",
        pd.DataFrame.from_dict(rows, orient="index").reindex(columns=columns).astype("float64"),
        notes=(
            f"The other tables use the {next(iter(evaluation.routing_context), 'document')} and τ = "
            f"{evaluation.temperature:g}. The lowest of a column is no choice that a system could have "
            "made.",
        ),
    )
