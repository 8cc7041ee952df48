"""Correlation, over pairs of an expert and a domain, of the perplexity ratio with the share of bigrams in common. The p
value permutes whole domains, since pairs are not independent.
"""

from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.table import Table

ITEM = TableItem("Affinity of experts and overlap of bigrams", Group.FURTHER, 4)


def make(material: Material) -> Table:
    import pandas as pd

    overlap = material.overlap
    named = {f"{found.kind} domains": found for found in material.relations}
    named["training domains, own experts too"] = material.relation_with_own
    rows = {
        label: {
            "Domains": found.domains,
            "Pairs": found.pairs,
            "Spearman": found.spearman,
            "p of Spearman, domains permuted": found.permutation_p,
            "Pearson (log ratio)": found.pearson,
        }
        for label, found in named.items()
    }
    tokens = overlap["train_tokens"].max() if len(overlap) else 0
    return Table(
        "Correlation, over pairs of a domain and an expert, of the perplexity ratio (Figure 2) with the share of the "
        "bigrams of the domain's test split that occur in the expert's training text. Negative: an expert predicts a "
        "domain the better the more bigrams they share. A domain's own expert is left out but in the last row.",
        pd.DataFrame.from_dict(rows, orient="index"),
        notes=(
            "Each domain and each expert is in several pairs, so pairs are not independent. The p value permutes whole "
            "domains (9,999 random orders, or all where there are fewer; two-sided).",
            "The paper prints r = 0.40 over 64 pairs, own experts among them (5.2): the more text is shared, the "
            "better the prediction. It does not print how overlap and gain are measured; the last row comes nearest.",
            f"Bigrams are of tokens, none across documents, in the first {tokens:,} tokens of each training text.",
        ),
        formats=dict.fromkeys(("Domains", "Pairs"), "{:.0f}")
        | dict.fromkeys(("Spearman", "Pearson (log ratio)"), "{:+.2f}")
        | {"p of Spearman, domains permuted": "{:.2g}"},
    )
