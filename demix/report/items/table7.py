"""Table 7 of the paper: test perplexity on a training domain of DEMix with the domain's expert, of DEMix without that
expert, and of a model never trained on the domain; and of merged models with and without the expert.
"""

from demix.report.domains import mean_of
from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import SECOND_TRAINING
from demix.report.systems import ByDomain, before_removal, released, without_choice, without_domain, without_expert
from demix.report.table import Table
from demix.run.systems import merged_whole

ITEM = TableItem("Table  7: removing experts", Group.PAPER, 7, needs=(SECOND_TRAINING,))


def make(material: Material) -> Table:
    import numpy as np

    from demix.report.cells import COUNTED, by_domain, seed_note

    run, results, domains = material.run, material.own, material.training
    systems: dict[str, ByDomain] = {
        "+Expert": before_removal(run),
        "−Expert": without_expert(run),
        "−Domain": without_domain,
    }
    merged: dict[str, ByDomain] = {}
    for whole in merged_whole(run).values():
        merged |= {whole.label: whole, f"{whole.label}, −Expert": without_choice(whole)}
    frame, beneath, notes = by_domain(results, systems | merged, domains)
    complete = frame[list(systems)].dropna()
    every = f"Mean of all {len(domains)}"
    means = {every: {column: mean_of(frame[column]) for column in systems | merged}}
    means[f"{every}, released weights"] = {
        column: results.mean(released(system), domains) for column, system in systems.items()
    }
    if 0 < len(complete) < len(domains):
        means[f"Mean of the {len(complete)} that have all three"] = dict(complete.mean())
    for label, values in means.items():
        frame.loc[label] = [values.get(column, np.nan) for column in frame]
    replacement = run.config.removal.replacement
    return Table(
        "Test perplexity on a training domain with all experts (+Expert), with the domain's own expert left out "
        "(−Expert), and by a model never trained on the domain (−Domain). All three with a cached prior. Higher "
        "without the expert means that leaving it out takes the domain away.",
        frame,
        notes=(
            (
                f"−Domain puts a replacement ({replacement}) in the domain's place and trains for the same steps"
                if replacement
                else "−Domain trains on the other domains alone for the same steps, so that each has as many tokens as "
                f"in +Expert, and the model 1/{len(domains)} fewer in all"
            )
            + "; it is run for "
            + (f"{len(complete)} of the {len(domains)} domains." if len(complete) else "none of the domains."),
            *seed_note(run),
            *(
                ["Merged models are single ones. No model is trained without an expert: its row leaves the routers."]
                if merged
                else []
            ),
            *notes,
        ),
        formats=COUNTED,
        summaries=frozenset(means),
        beneath=beneath,
    )
