"""Claims about families of models: of the c-BTM paper (Gururangan et al. 2023), and of BTM's (Li et al. 2022)."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from demix.progress import so_many
from demix.report.claims.row import HARM, Row, Versus
from demix.report.families import Family, families, one_clusters, training_flops, tried_top_k
from demix.report.material import Material
from demix.report.needs import FAMILIES
from demix.report.systems import BALANCED
from demix.report.verdict import Part
from demix.run.run import Run
from demix.run.systems import System, by_distance, routed_weights


def _whole(run: Run) -> list[Family]:
    """The families whose experts are whole models."""
    return [family for family in families(run).values() if family.model.kind.expert_scope == "model"]


def _several(run: Run) -> list[Family]:
    """Those of several balanced clusters beside which the run has a model of one cluster."""
    ones = one_clusters(run)
    return [one for one in _whole(run) if one.made == "k-means" and one.experts > 1 and one.budget in ones]


def _alike(run: Run, how: str) -> list[tuple[Family, Family]]:
    """The balanced families beside those of as many clusters that are made in another way."""
    return [
        (family, other)
        for family in _several(run)
        for other in _whole(run)
        if other.made == how and (family.experts, family.budget) == (other.experts, other.budget)
    ]


def _beat_one(material: Material) -> list[Versus]:
    ones = one_clusters(material.run)
    return [Versus(family.system, ones[family.budget]) for family in _several(material.run)]


def _one_expert(material: Material) -> list[Versus]:
    ones = one_clusters(material.run)
    return [
        Versus(_only(family, k), ones[family.budget], intervals=False) for family, k in _sparse(material.run) if k == 1
    ]


def _few_experts(material: Material) -> list[Versus]:
    return [
        Versus(_only(family, k), family.system, labels=("", "all experts"), allowance=HARM, intervals=False)
        for family, k in _sparse(material.run)
        if k in (2, 4)
    ]


def _sparse(run: Run) -> list[tuple[Family, int]]:
    """The numbers of experts a token that the config tries.

    None without weights by clusters: all others compute all experts before they leave some out.
    """
    found = _several(run) if routed_weights(run) else []
    return [(family, k) for family in found for k in tried_top_k(run, family.experts)]


def _only(family: Family, k: int) -> System:
    return replace(family.system, label=f"{family.system.label}, top-{k}", top_k=k)


def _own_cluster_best(material: Material) -> Iterator[Part]:
    """Whether each cluster's own expert is the best on the cluster's test documents, one part per model."""
    import numpy as np

    for family in _several(material.run):
        row, label = family.model.row, family.model.label
        ratios = material.clusters.over_own(row, material.seed, family.model.domains).to_numpy(copy=True)
        np.fill_diagonal(ratios, np.nan)
        best = np.array([np.nanmin(line) for line in ratios if np.isfinite(line).any()])
        agreeing = int((best > 1).sum())
        sentence = (
            f"{label}: the best other expert's perplexity is {best.mean():.2f} times the own expert's on average; the "
            f"own expert is the best on {agreeing} of {len(best)} clusters."
            if len(best)
            else f"{label}: no losses of experts by cluster."
        )
        yield Part(bool(len(best) and best.mean() > 1), agreeing, len(best), sentence)


def _random_worse(material: Material) -> list[Versus]:
    pairs, ones = _alike(material.run, "random"), one_clusters(material.run)
    return [
        *(Versus(family.system, other.system) for family, other in pairs),
        *(Versus(ones[other.budget], other.system) for _, other in pairs),
    ]


def _largest_both_ways(material: Material) -> list[tuple[Family, Family]]:
    """The pair of balanced and unbalanced clusters with the most of them; none without such a pair."""
    pairs = _alike(material.run, "k-means, unbalanced")
    return sorted(pairs, key=lambda pair: -pair[0].experts)[:1]


def _by_domain(run: Run) -> list[Family]:
    """The families of whole models, one for each domain."""
    return [family for family in _whole(run) if not family.clustering]


def _nearest(material: Material) -> list[tuple[Family, Family]]:
    """The pair of clusters and domains, at equal budgets, whose numbers are nearest; none without such a pair."""
    run = material.run
    pairs = [(one, other) for one in _several(run) for other in _by_domain(run) if one.budget == other.budget]
    return sorted(pairs, key=lambda pair: abs(pair[0].experts - len(run.training)))[:1]


def _against_metadata(material: Material) -> Iterator[Versus]:
    routed = routed_weights(material.run)
    for nearest, other in _nearest(material):
        # As clusters are not told the domain, domains are not either where their experts can be weighted alike.
        metadata = by_distance(other.model, routed) if routed and other.model.routing else other.system
        yield Versus(nearest.system, metadata, allowance=HARM, intervals=False)


def _apart(run: Run) -> list[tuple[Family, System]]:
    budget = families(run)["dense"].budget
    return [(family, BALANCED) for family in _by_domain(run) if family.budget == budget]


def _matched(run: Run, *, clusters: bool) -> list[tuple[Family, System]]:
    """Experts of clusters, or of domains, beside models whose tokens choose experts.

    The pairs begin with as many tokens of a dense parent and take the same FLOPs, up to an update of the second:
    `match: flops` cannot come nearer. A parent from a folder has a budget of its own.
    """

    def begun(family: Family) -> tuple[Any, ...]:
        row = family.model.base
        return row.settings.parent_row, row.settings.seed_tokens, row.initial, row.options

    known = families(run).values()
    of_domains = [family for family in known if family.model.kind.has_experts and not family.clustering]
    pairs = []
    for rival in (family for family in known if family.model.kind.routed):
        flops, update = training_flops(rival.model, run)
        pairs += [
            (family, rival.system)
            for family in (_several(run) if clusters else of_domains)
            if begun(family) == begun(rival) and abs(training_flops(family.model, run)[0] - flops) < update
        ]
    return pairs


def _seeded(material: Material) -> list[Versus]:
    """Feedforward experts with a seed phase beside DEMix from scratch, at equal budgets."""
    known = families(material.run)
    scratch = known["demix"]
    return [
        Versus(family.system, scratch.system)
        for family in known.values()
        if family.model.kind.expert_scope == "feedforward"
        and family.model.settings.seed_tokens
        and not family.clustering
        and family.budget == scratch.budget
        and not scratch.model.parent
    ]


def _merged(run: Run, *, routers: bool = False) -> list[tuple[Family, Family]]:
    """The rows that train merged experts, all parameters or their `routers` alone, each beside its parent."""
    known = families(run)
    return [
        (family, known[family.model.base.settings.parent_row or ""])
        for family in known.values()
        if family.model.mixes and (family.model.settings.trained == "routers") == routers
    ]


def _against_mixture(material: Material) -> list[Versus]:
    """Merged experts that were trained beside the mixture of as many experts' outputs; neither is told the domain."""
    run, found = material.run, []
    for family, parent in _merged(run) if "tempered" in run.config.evaluation.weights else ():
        layer = family.architecture.routed
        if layer and layer.top_k in tried_top_k(run, parent.experts):
            label = f"{parent.model.base.label} (tempered), top-{layer.top_k}"
            mixture = replace(parent.system, label=label, method="uniform", weights="tempered", top_k=layer.top_k)
            found += [Versus(family.system, mixture, on.kind, intervals=False) for on in material.kinds]
    return found


def _routers_alone(material: Material) -> list[Versus]:
    """Merged experts whose routers alone were trained beside those of the same parent that were trained as a whole."""
    whole = {parent.model.row: family for family, parent in _merged(material.run)}
    pairs = [
        (family.system, whole[parent.model.row].system)
        for family, parent in _merged(material.run, routers=True)
        if parent.model.row in whole
    ]
    return [Versus(*pair, on.kind, allowance=HARM, intervals=False) for on in material.kinds for pair in pairs]


def _on_all(material: Material, pairs: list[tuple[Family, System]]) -> list[Versus]:
    return [Versus(family.system, other, domains.kind) for domains in material.kinds for family, other in pairs]


_row = partial(Row, needs=(FAMILIES,))
ROWS = (
    _row(
        "clusters_beat_one",
        lambda material: (
            "More than one cluster beats one: c-BTM has lower perplexity than "
            + " or ".join(system.label for system in one_clusters(material.run).values())
            + ", which learns from all text, on the training domains at equal tokens"
        ),
        "c-BTM, 4.1, Figure 5",
        _beat_one,
    ),
    _row(
        "one_expert_beats_one_cluster",
        "Even one expert a token beats one cluster at one model's FLOPs",
        "c-BTM, 4.3, Figure 9",
        _one_expert,
    ),
    _row(
        "few_experts_suffice",
        f"Two or four experts a token do as well as all: perplexity is at most {100 * HARM:g}% higher",
        "c-BTM, 4.3, Figure 9",
        _few_experts,
    ),
    _row(
        "own_cluster_expert_best",
        "On the test documents of each cluster the cluster's own expert is the best of all",
        "c-BTM, Figure 15",
        _own_cluster_best,
    ),
    _row(
        "random_clusters_are_worse",
        "What is in a cluster matters: random clusters are worse than k-means' and worse than one cluster",
        "c-BTM, 7.1, Figure 13",
        _random_worse,
    ),
    _row(
        "balance_helps_at_large_k",
        lambda material: "".join(
            f"With many clusters ({family.experts} is the most that this run has both ways) balanced ones are better "
            "than unbalanced ones"
            for family, _ in _largest_both_ways(material)
        ),
        "c-BTM, 7.2, Figures 13 and 14",
        lambda material: [Versus(family.system, other.system) for family, other in _largest_both_ways(material)],
    ),
    _row(
        "clusters_against_metadata",
        lambda material: "".join(
            "Clusters do as well as domains given by metadata or better, perplexity at most "
            f"{100 * HARM:g}% higher: {nearest.experts} clusters against {so_many(len(material.training), 'domain')}, "
            "each expert a whole model"
            for nearest, _ in _nearest(material)
        ),
        "c-BTM, 7.4, Figure 18 and Table 8",
        _against_metadata,
    ),
    _row(
        "btm_against_dense",
        f"Experts of domains that are trained apart (BTM, cached prior) beat {BALANCED.label} at equal tokens",
        "Li et al. 2022",
        lambda material: _on_all(material, _apart(material.run)),
    ),
    _row(
        "domain_experts_against_token_routed",
        "At equal FLOPs of training experts of domains (cached prior) have lower perplexity than experts that "
        "tokens choose, where both begin alike: from scratch, or with the same state of a dense model",
        "",
        lambda material: _on_all(material, _matched(material.run, clusters=False)),
    ),
    _row(
        "clusters_against_upcycling",
        "At equal FLOPs of training c-BTM beats sparse upcycling, a mixture of experts that begins with the same "
        "dense model",
        "c-BTM, 6, Figure 12: at large budgets; at small ones upcycling is better",
        lambda material: [Versus(family.system, other) for family, other in _matched(material.run, clusters=True)],
    ),
    _row(
        "trained_together_against_outputs",
        "Experts that tokens choose in every layer, merged and trained together (BTX), beat the mixture of the outputs "
        "of as many experts a token",
        "",
        _against_mixture,
    ),
    _row(
        "routers_are_enough",
        "Training the routers of merged experts is enough: perplexity is at most "
        f"{100 * HARM:g}% higher than with all parameters trained",
        "the last step of FlexOlmo, Shi et al. 2025",
        _routers_alone,
    ),
    _row(
        "seeding_helps",
        "A seed phase helps: experts that begin with what one model has learned of all domains beat experts from "
        "scratch at equal tokens",
        "Li et al. 2022, there for whole models; here for DEMix",
        _seeded,
    ),
)
