"""The names used in claims.toml: the table for its queries, judges of claims that no pair decides, and words."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from demix.files.database import ask
from demix.report.cells import adapting
from demix.report.run_data import RunData, ratios, relation
from demix.report.systems import (
    DOMAIN_TOKEN,
    NAIVE,
    ByDomain,
    baselines,
    before_adding,
    before_removal,
    families,
    one_clusters,
    training_flops,
    tried_top_k,
    without_choice,
    without_domain,
    without_expert,
)
from demix.report.verdict import Part, compare
from demix.run.run import Run
from demix.run.systems import System, added, by_distance, merged_whole, routed_weights, trained_systems

# On a novel domain the single expert or token is chosen on the test data.
ORACLES = {NAIVE: "best expert (oracle)", DOMAIN_TOKEN: "best domain token (oracle)"}


def mixtures(run: Run) -> list[System]:
    """Each mixture of the run by `tempered`: weighted by all earlier text, without knowing the domain.

    Model entries with another optimizer than the dense model are left out: the claim would judge the optimizer instead
    of the experts.
    """
    dense = run.rows["dense"].settings.optimizer
    tempered = (one for one in trained_systems(run) if one.weights.startswith("tempered"))
    return [one for one in tempered if run.rows[one.model].settings.optimizer == dense]


@cache
def known_families(run: Run) -> tuple[pd.DataFrame, list[System]]:
    """A table of the run's models with the columns by which queries pair them, and the system of each row.

    `rule` is empty for the rule of the model's paper; `k` is then the number of mixed experts, if not all. With rule
    `distance`, domain experts are weighted by the distance to clusters. With rule `tempered`, `k` experts are mixed.
    """
    rows: list[dict[str, Any]] = []
    systems: list[System] = []
    singles, routed, tempered = one_clusters(run).values(), routed_weights(run), run.config.evaluation.weights
    for name, family in families(run).items():
        model, system = family.model, family.system
        flops, update = training_flops(model, run)
        settings, layer = model.base.settings, family.architecture.routed
        about = {
            "row": name,
            "scope": model.kind.expert_scope if model.kind.has_experts else "",
            "token_routed": model.kind.routed,
            "made": family.made,
            "experts": family.experts,
            "tokens": family.tokens,
            "begun": family.begun,
            "single": system in singles,
            # Equal for models that start in the same way: from the same parent after the same number of tokens.
            "origin": repr([settings.parent, settings.seed_tokens, model.base.initial, model.base.options]),
            "parent": model.parent,
            "seed_tokens": settings.seed_tokens,
            "flops": flops,
            "flops_of_update": update,
            "merges": settings.parent if model.mixes else None,
            "trained": settings.trained,
            "top_k": layer.top_k if layer else None,
        }
        found: list[tuple[str, int | None, System]] = [("", None, system)]
        for k in tried_top_k(run, family.experts):
            label = f"{model.base.label} (tempered), top-{k}"
            if routed:
                # All other rules run every expert before they drop some.
                found.append(("", k, replace(system, label=f"{system.label}, top-{k}", top_k=k)))
            if "tempered" in tempered and model.kind.has_experts:
                few = replace(system, method="uniform", weights="tempered", label=label, top_k=k)
                found.append(("tempered", k, few))
        if routed and model.routing and not family.clustering:
            found.append(("distance", None, by_distance(model, routed)))
        rows += [about | {"id": len(systems) + place, "rule": one[0], "k": one[1]} for place, one in enumerate(found)]
        systems += [one[2] for one in found]
    return pd.DataFrame(rows).astype({"k": "Int64", "top_k": "Int64"}), systems


NAMED = """
with families as (from every where rule = '' and k is null),
single as (from families where single),
-- Models of several balanced clusters, if the run also has a model of one cluster with equal tokens.
several as (
    from families where made = 'k-means' and scope = 'model' and experts > 1
        and (tokens, begun) in (select (tokens, begun) from single)
)
"""


def paired(query: str, data: RunData) -> list[tuple[System, System]]:
    """The pairs of systems whose ids a query of claims.toml selects."""
    every, systems = known_families(data.run)
    domains = pd.DataFrame({"domains": [len(data.training)]})
    found = ask(NAMED + query, every=every, run=domains)
    return [(systems[first], systems[second]) for first, second in found.itertuples(index=False)]


WORDS: dict[str, Callable[[RunData], str]] = {
    "dense": lambda data: "both dense baselines" if len(baselines(data.run)) > 1 else baselines(data.run)[0].label,
    "on_all": lambda data: " and ".join(f"on the {domains.kind} domains" for domains in data.kinds),
    "parent": lambda data: "the likeliest training expert" if data.averaged else "its parent",
}


def own_expert_best(data: RunData) -> Iterator[Part]:
    """Whether each domain's own expert is the best on it."""
    yield _best(ratios(data.results, data.run, "training"), "")


def own_cluster_best(data: RunData) -> Iterator[Part]:
    """Whether each cluster's own expert is the best on the cluster's test documents, one part per model."""
    for system, _ in paired("select id, id from several", data):
        model = families(data.run)[system.model].model
        yield _best(data.clusters.over_own(model, data.seed), f"{model.label}: ")


def _best(ratios: pd.DataFrame, of: str) -> Part:
    """Whether own experts, on the diagonal of `ratios`, are best: the lowest other ratio of each row is above 1."""
    others = ratios.mask(np.eye(len(ratios), dtype=bool)).min(axis=1).dropna()
    label = f"{of}Perplexity of the best other expert, divided by the own expert's"
    return compare(label, others, "equal experts", pd.Series(1.0, others.index), higher=True)


def overlap_correlates(data: RunData) -> Iterator[Part]:
    found = relation(data.pairs["training"], "training", own=True)
    r, known = -found.pearson, np.isfinite(found.pearson)
    sentence = (
        f"Pearson r = {r:.2f} between shared bigrams and minus the log perplexity ratio, over {found.pairs} pairs of "
        f"domain and expert, own experts included. Permuting whole domains gives p = {found.permutation_p:.2g} for "
        "Spearman's correlation"
        if known
        else "Overlap of bigrams and perplexities of single experts: no numbers"
    )
    # One number over all pairs, so there is no majority of domains.
    yield Part(
        bool(r > 0), int(r > 0), int(known), (sentence,), bool(found.permutation_p < 0.05), p=found.permutation_p
    )


def adapts(data: RunData) -> Iterator[Part]:
    """The new experts against their parents, and the training domains before and after."""
    before, after = (found["DEMix-DAPT: own domain"] for found in adapting(data))
    yield compare("Adapted expert", after, WORDS["parent"](data), before)
    own = (before_adding(data.run)[0], added(data.run)[0])
    old, new = (data.results.perplexities(one, data.training) for one in own)
    # The parameters do not change; sums in another order differ in the last digits.
    yield compare("Training domains, each by its own expert, after adaptation", new, "before", old, allowance=0.0002)


def like_never_trained(data: RunData) -> Iterator[Part]:
    """Whether −Expert is closer to the model never trained on the domain than to the model with all experts."""
    systems = (before_removal(data.run), without_expert(data.run), without_domain)
    whole, without, never = (data.results.perplexities(one, data.training) for one in systems)
    label = "Difference in perplexity between −Expert and −Domain"
    yield compare(label, (without - never).abs(), "between −Expert and +Expert", (without - whole).abs())


def merged_forget(data: RunData) -> Iterator[Part]:
    """Whether removal of the domain's expert raises perplexity in merged models as in DEMix, one part per model."""
    run, domains = data.run, data.training

    def costs(whole: System, without: ByDomain) -> pd.Series:
        return data.own.perplexities(without, domains) / data.own.perplexities(whole, domains)

    own = costs(before_removal(run), without_expert(run))
    for whole in merged_whole(run).values():
        label = f"Perplexity without the domain's expert, divided by perplexity with it, of {whole.label}"
        yield compare(label, costs(whole, without_choice(whole)), run.whole.label, own, higher=True)
