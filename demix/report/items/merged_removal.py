"""Test perplexity on the training domains of merged models with all experts, and with each domain's own expert left out
of every layer.
"""

from demix.report.domains import mean_of, percent
from demix.report.item import Group, TableItem
from demix.report.material import Material
from demix.report.needs import MERGED_REMOVAL, SECOND_TRAINING
from demix.report.systems import before_removal, without_choice, without_expert
from demix.report.table import Table
from demix.run.systems import merged_whole

ITEM = TableItem("Leaving out experts of merged models", Group.FAMILIES, 8, needs=(SECOND_TRAINING, MERGED_REMOVAL))
WITH, WITHOUT, CHANGE = "All experts", "Without the domain's", "Change, %"


def make(material: Material) -> Table:
    import pandas as pd

    run, domains, own = material.run, material.training, material.own
    pairs = {run.whole.label: (before_removal(run), without_expert(run))}
    pairs |= {whole.label: (whole, without_choice(whole)) for whole in merged_whole(run).values()}
    rows = {}
    for label, systems in pairs.items():
        with_all, without = (own.perplexities(system, domains) for system in systems)
        changes = percent(with_all, without)
        rows[label] = {WITH: mean_of(with_all), WITHOUT: mean_of(without), CHANGE: mean_of(changes)}
        rows[label] |= {f"{domain}, %": changes[domain] for domain in domains}
    frame = pd.DataFrame.from_dict(rows, orient="index")
    return Table(
        "Mean test perplexity over the training domains with all experts, and with each domain's own expert left out "
        "(−Expert of Table 7). Change: by how much perplexity rises, as a mean and by domain. The higher it is, the "
        "more of a domain leaves with the domain's expert.",
        frame,
        notes=(
            f"{run.whole.label} is mixed by a cached prior. No merged model is trained for this table: the routers "
            "lose the expert's row. What shared weights have learned from the domain stays. All numbers are of the "
            "run's own seed.",
        ),
        formats={name: "{:+.1f}" for name in frame if name.endswith("%")},
    )
