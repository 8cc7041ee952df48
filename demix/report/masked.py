"""The table of masked language models, whose perplexities compare with no others."""

from collections.abc import Callable

import numpy as np

from demix.config.architecture import FOLDS
from demix.report import title_of
from demix.report.cells import COUNTED, by_domain, kinds_of_domains, lowest, mean_of
from demix.report.read import Results, novel_domains, training_domains
from demix.report.render import Table
from demix.run.run import Run
from demix.run.systems import System, masked_systems


def masked_table(results: Results, run: Run) -> Table:
    """Masked perplexity of each masked model on each domain, by the ways to mix experts that read no text."""
    training = training_domains(run)

    def on(system: System) -> Callable[[str], System]:
        own = system.method == "naive"
        return lambda domain: system.chosen_on_dev() if own and domain not in training else system

    systems = {system.label: on(system) for system in masked_systems(run)}
    frame, beneath, notes = by_domain(results, systems, [*training, *novel_domains(run)])
    means = {}
    for kind, domains in kinds_of_domains(run):
        if domains:
            values = [mean_of(frame.loc[domains, label]) for label in systems]
            means[f"Mean of {len(domains)} {kind}"] = [*values, np.nan, np.nan]
    for label, values in means.items():
        frame.loc[label] = values
    return Table(
        "masked",
        title_of("masked"),
        f"Masked perplexity by domain: the tokens of a block are parted into {FOLDS} folds at random, each fold is "
        "masked once, and the model, which sees the rest of the block on both sides, fills it in. Lower is better. "
        "These numbers compare with one another alone: those of causal models are of the next token.",
        frame,
        notes=(
            "Own expert: the domain's, or on a novel domain the expert of the lowest loss on its dev split. Average: "
            "equal weights. Fitted: the best static weights on the domain's dev split, kept fixed, so that it is told "
            "the domain. No other rule mixes these experts: what one of them says of earlier tokens knows the token "
            "that is to be mixed.",
            *notes,
        ),
        formats=COUNTED,
        summaries=frozenset(means),
        best=lowest(frame.drop(columns=list(COUNTED)), axis=1),
        beneath=beneath,
    )
