"""Adaptation to novel domains: perplexities before and after, and what it changes."""

from itertools import product

import pandas as pd

from demix.config.counts import parameters
from demix.report.domains import mean_of
from demix.report.material import Material
from demix.report.systems import before_adding, before_dense_dapt, dense_adapted, one_added
from demix.report.table import Table
from demix.run.main_systems import added
from demix.run.run import Run

ADAPTATIONS = ("Dense-DAPT", "DEMix-DAPT", "One expert added")


def adapting(material: Material) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Test perplexities before and after the adaptation to each novel domain: one row per domain.

    The columns are Dense-DAPT, DEMix-DAPT and the mixture with one expert added, each on the training domains (the
    mean) and on the domain adapted to. Before an expert was adapted stands the training expert of highest posterior.
    """
    run, results = material.run, material.own
    (naive, cached), (all_naive, _) = before_adding(run), added(run)
    found: dict[int, dict[str, dict[str, float]]] = {0: {}, 1: {}}
    for name in material.novel:
        systems = (
            (before_dense_dapt(run), dense_adapted(run)(name)),
            (naive, all_naive),
            (cached, one_added(run)(name)),
        )
        for (kind, pair), when in product(zip(ADAPTATIONS, systems, strict=True), found):
            row = found[when].setdefault(name, {})
            row[f"{kind}: training domains"] = results.mean(pair[when], material.training)
            row[f"{kind}: own domain"] = results.mean(pair[when], [name])
        likeliest = material.parents[name].likeliest if name in material.parents else ""
        found[0][name]["DEMix-DAPT: own domain"] = results.expert_perplexities(naive.model, name, [likeliest]).iloc[0]
    before, after = (pd.DataFrame.from_dict(rows, orient="index", dtype="float64") for rows in found.values())
    return before, after


def changed_bytes(run: Run) -> dict[str, int]:
    """The bytes (fp32) of the parameters that the adaptation to one domain changes, by the names of `ADAPTATIONS`."""
    receiver, types = run.receiver, run.types
    dense = next(model for model in run.trained if model.name == run.config.adaptation.dense)
    whole = sum(parameters(dense.architecture, types))
    _, expert = parameters(receiver.architecture, types, expert_scope=receiver.kind.expert_scope)
    return dict(zip(ADAPTATIONS, (4 * whole, 4 * expert, 4 * expert), strict=True))


def adaptation_table(material: Material) -> Table:
    """What adaptation to one domain gains there, and what it costs: forgetting and bytes; means over novel domains."""
    before, after = adapting(material)
    training, novel = (domains.counted for domains in material.kinds)
    frame = pd.DataFrame({
        f"{name}, {when}": [mean_of(found[f"{kind}: {part}"]) for kind in ADAPTATIONS]
        for part, name in (("own domain", novel), ("training domains", training))
        for when, found in (("before", before), ("after", after))
    }, index=list(ADAPTATIONS))  # fmt: skip
    frame["bytes changed"] = changed_bytes(material.run)
    return Table(
        frame,
        "On the domain adapted to and on the training domains, averaged over the novel domains. Dense-DAPT makes a "
        f"model of {before_dense_dapt(material.run).label} for each domain, DEMix-DAPT one more expert, and leaves "
        "each training domain to its own expert, the same before and after by construction. One expert added: the "
        "mixture of the training experts and the new one with a cached prior.",
        formats={"bytes changed": "{:,.0f}"},
        name="adaptation",
        title="Adapting to one novel domain: mean test perplexity before and after (lower is better)",
    )
