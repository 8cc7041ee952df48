"""Mean test perplexity of the same tokens in blocks of several lengths, by row of models. Learned positions end at the
length of training.
"""

from demix.report.domains import mean_of
from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import CONTEXTS
from demix.report.table import Table
from demix.run.contexts import asked_contexts, labels

ITEM = TableItem("Perplexity by the length of a block", Group.VARIANTS, 2, needs=(CONTEXTS,))


def make(material: Material) -> Table:
    import numpy as np
    import pandas as pd

    from demix.report.cells import lowest

    run = material.run
    sums = material.contexts.groupby(["model", "domain", "context"])[["nll", "tokens"]].sum()
    perplexity = np.exp(sums["nll"] / sums["tokens"])
    frame = pd.DataFrame.from_dict(
        {
            label: {
                f"{domains.heading}, {context}": mean_of(
                    perplexity.get((model, domain, context), np.nan) for domain in domains.names
                )
                for domains in material.kinds
                for context in asked_contexts(run)
            }
            for model, label in labels(run).items()
        },
        orient="index",
    )
    return Table(
        "Mean test perplexity of the same tokens by the length of blocks, over the training and over the novel "
        f"domains. All models were trained on blocks of {run.context:,} tokens. Lower is better.",
        frame,
        notes=(
            "A dense model is taken as it is; a domain-token model under the domain's own token, "
            "so only on training domains; experts are mixed by the cached prior (from dev text in blocks of the "
            "length of training), with weights by the block's history.",
            "Learned positions end at the length of training. In a longer block tokens have more text before them: "
            "perplexity falls for a model that can use it. All numbers are of the run's own seed.",
        ),
        best=lowest(frame, axis=0),
    )
