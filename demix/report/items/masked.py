"""Masked language models on each domain: perplexity of tokens that are masked in seven folds, with their intervals."""

from collections.abc import Callable

from demix.config.architecture import FOLDS
from demix.report.domains import mean_of
from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import MASKED
from demix.report.table import Table
from demix.run.systems import System, masked_systems

ITEM = TableItem("Masked language models: perplexity in seven folds", Group.VARIANTS, 3, needs=(MASKED,))


def make(material: Material) -> Table:
    import numpy as np

    from demix.report.cells import COUNTED, by_domain, lowest

    def on(system: System) -> Callable[[str], System]:
        own = system.method == "naive"
        return lambda domain: system.chosen_on_dev() if own and domain in material.novel else system

    systems = {system.label: on(system) for system in masked_systems(material.run)}
    frame, beneath, notes = by_domain(material.results, systems, [*material.training, *material.novel])
    means = {
        f"Mean of {domains.counted}": [mean_of(frame.loc[domains.names, label]) for label in systems]
        for domains in material.kinds
    }
    for label, values in means.items():
        frame.loc[label] = [*values, np.nan, np.nan]
    return Table(
        f"Masked perplexity by domain. The tokens of a block are parted into {FOLDS} folds at random. Each fold is "
        "masked once, and the model fills it in from the rest of the block, on both sides. Lower is better. These "
        "numbers compare with one another alone: those of causal models are of the next token.",
        frame,
        notes=(
            "Own expert: the domain's, or on a novel domain the expert of the lowest loss on its dev split. Average: "
            "equal weights. Fitted: the best static weights on the domain's dev split, kept fixed, so that it is told "
            "the domain. No other rule mixes these experts: what an expert says of earlier tokens has seen the token "
            "that is to be mixed.",
            *notes,
        ),
        formats=COUNTED,
        summaries=frozenset(means),
        best=lowest(frame.drop(columns=list(COUNTED)), axis=1),
        beneath=beneath,
    )
