"""What claims.toml names: pairs of systems to compare, judges of what no pair decides, and the words of statements."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from demix.progress import so_many
from demix.report.cells import adapting
from demix.report.read import mean_of, percent
from demix.report.run_data import RunData, affinities
from demix.report.systems import (
    BALANCED,
    DOMAIN_TOKEN,
    NAIVE,
    ByDomain,
    Family,
    baselines,
    before_adding,
    before_dense_dapt,
    before_removal,
    families,
    one_clusters,
    training_flops,
    tried_top_k,
    without_choice,
    without_domain,
    without_expert,
)
from demix.report.verdict import UNCHANGED, Part, as_percent, compare
from demix.run.run import Run
from demix.run.systems import System, added, by_distance, merged_whole, routed_weights, trained_systems

# On a novel domain the single expert or token is chosen on the test data.
ORACLES = {NAIVE: "best expert (oracle)", DOMAIN_TOKEN: "best domain token (oracle)"}
Pairs = Iterator[tuple[ByDomain, ByDomain]]


def mixtures(run: Run) -> list[System]:
    """Each mixture of the run that sums over all earlier text and does not know the domain.

    None of a row with another optimizer than the dense model, whose recipe would be judged instead of its experts.
    """
    dense = run.rows["dense"].settings.optimizer
    tempered = (one for one in trained_systems(run) if one.weights.startswith("tempered"))
    return [one for one in tempered if run.rows[one.model].settings.optimizer == dense]


def whole_models(run: Run) -> list[Family]:
    """The families whose experts are whole models."""
    return [family for family in families(run).values() if family.model.kind.expert_scope == "model"]


def several_clusters(run: Run) -> list[Family]:
    """Those of several balanced clusters beside which the run has a model of one cluster."""
    ones = one_clusters(run)
    return [one for one in whole_models(run) if one.made == "k-means" and one.experts > 1 and one.budget in ones]


def _alike(run: Run, how: str) -> list[tuple[Family, Family]]:
    """The balanced families beside those of as many clusters that are made in another way."""
    return [
        (family, other)
        for family in several_clusters(run)
        for other in whole_models(run)
        if other.made == how and (family.experts, family.budget) == (other.experts, other.budget)
    ]


def _both_ways(run: Run) -> list[tuple[Family, Family]]:
    """The pair of balanced and unbalanced clusters with the most of them; none without such a pair."""
    return sorted(_alike(run, "k-means, unbalanced"), key=lambda pair: -pair[0].experts)[:1]


def _nearest(run: Run) -> list[tuple[Family, Family]]:
    """The pair of clusters and domains, at equal budgets, whose numbers are nearest; none without such a pair."""
    by_domain = [family for family in whole_models(run) if not family.clustering]
    pairs = [(one, other) for one in several_clusters(run) for other in by_domain if one.budget == other.budget]
    return sorted(pairs, key=lambda pair: abs(pair[0].experts - len(run.training)))[:1]


def _sparse(run: Run, few: tuple[int, ...]) -> Iterator[tuple[Family, System]]:
    """The families of clusters, each with those of `few` experts a token that the config tries.

    None without weights by clusters: all others compute all experts before they leave some out.
    """
    for family in several_clusters(run) if routed_weights(run) else ():
        for k in tried_top_k(run, family.experts):
            if k in few:
                yield family, replace(family.system, label=f"{family.system.label}, top-{k}", top_k=k)


def beat_one(data: RunData) -> Pairs:
    ones = one_clusters(data.run)
    return ((family.system, ones[family.budget]) for family in several_clusters(data.run))


def one_expert(data: RunData) -> Pairs:
    ones = one_clusters(data.run)
    return ((one, ones[family.budget]) for family, one in _sparse(data.run, (1,)))


def few_experts(data: RunData) -> Pairs:
    return ((few, family.system) for family, few in _sparse(data.run, (2, 4)))


def random_worse(data: RunData) -> Pairs:
    pairs, ones = _alike(data.run, "random"), one_clusters(data.run)
    yield from ((family.system, other.system) for family, other in pairs)
    yield from ((ones[other.budget], other.system) for _, other in pairs)


def balanced_better(data: RunData) -> Pairs:
    return ((family.system, other.system) for family, other in _both_ways(data.run))


def against_metadata(data: RunData) -> Pairs:
    """Clusters do not know the domain, so domains are compared without it where their experts can be weighted alike."""
    routed = routed_weights(data.run)
    for nearest, other in _nearest(data.run):
        alike = routed and other.model.routing
        yield nearest.system, by_distance(other.model, routed) if alike else other.system


def trained_apart(data: RunData) -> Pairs:
    budget = families(data.run)["dense"].budget
    alike = (one for one in whole_models(data.run) if not one.clustering and one.budget == budget)
    return ((family.system, BALANCED) for family in alike)


def _beside_routed(run: Run, some: list[Family]) -> Pairs:
    """Experts of clusters, or of domains, beside models whose tokens choose experts.

    The pairs begin with as many tokens of a dense parent and take the same FLOPs, up to an update of the second:
    `match: flops` cannot come nearer. A parent from a folder has a budget of its own.
    """

    def begun(family: Family) -> tuple[Any, ...]:
        row = family.model.base
        return row.settings.parent_row, row.settings.seed_tokens, row.initial, row.options

    for rival in (family for family in families(run).values() if family.model.kind.routed):
        flops, update = training_flops(rival.model, run)
        for family in some:
            if begun(family) == begun(rival) and abs(training_flops(family.model, run)[0] - flops) < update:
                yield family.system, rival.system


def domains_beside_routed(data: RunData) -> Pairs:
    known = families(data.run).values()
    return _beside_routed(
        data.run, [family for family in known if family.model.kind.has_experts and not family.clustering]
    )


def clusters_beside_routed(data: RunData) -> Pairs:
    return _beside_routed(data.run, several_clusters(data.run))


def seeded(data: RunData) -> Pairs:
    """Feedforward experts with a seed phase beside DEMix from scratch, at equal budgets."""
    known = families(data.run)
    scratch = known["demix"]
    for family in known.values() if not scratch.model.parent else ():
        experts = family.model.kind.expert_scope == "feedforward" and not family.clustering
        if experts and family.model.settings.seed_tokens and family.budget == scratch.budget:
            yield family.system, scratch.system


def _merged(run: Run, *, routers: bool = False) -> list[tuple[Family, Family]]:
    """The rows that train merged experts, all parameters or their `routers` alone, each beside its parent."""
    known = families(run)
    return [
        (family, known[family.model.base.settings.parent_row or ""])
        for family in known.values()
        if family.model.mixes and (family.model.settings.trained == "routers") == routers
    ]


def against_mixture(data: RunData) -> Pairs:
    """Merged experts that were trained beside the mixture of as many experts' outputs; neither knows the domain."""
    run = data.run
    for family, parent in _merged(run) if "tempered" in run.config.evaluation.weights else ():
        layer = family.architecture.routed
        if layer and layer.top_k in tried_top_k(run, parent.experts):
            label = f"{parent.model.base.label} (tempered), top-{layer.top_k}"
            tempered = replace(parent.system, method="uniform", weights="tempered")
            yield family.system, replace(tempered, label=label, top_k=layer.top_k)


def routers_alone(data: RunData) -> Pairs:
    """Merged experts whose routers alone were trained beside those of the same parent that were trained as a whole."""
    whole = {parent.model.row: family for family, parent in _merged(data.run)}
    for family, parent in _merged(data.run, routers=True):
        if parent.model.row in whole:
            yield family.system, whole[parent.model.row].system


WORDS: dict[str, Callable[[RunData], str]] = {
    "dense": lambda data: "both dense baselines" if len(baselines(data.run)) > 1 else baselines(data.run)[0].label,
    "on_all": lambda data: " and ".join(f"on the {domains.kind} domains" for domains in data.kinds),
    "parent": lambda data: "the likeliest training expert" if data.averaged else "its parent",
    "one_cluster": lambda data: " or ".join(system.label for system in one_clusters(data.run).values()),
    "most_clusters": lambda data: "".join(f"{family.experts}" for family, _ in _both_ways(data.run)),
    "nearest_clusters": lambda data: "".join(f"{family.experts}" for family, _ in _nearest(data.run)),
    "domains": lambda data: so_many(len(data.training), "domain"),
}


def own_expert_best(data: RunData) -> Iterator[Part]:
    """Whether each domain's own expert is the best on it."""
    ratios = affinities(data.results, data.run)
    ratios = ratios[(ratios["kind"] == "training") & (ratios["domain"] != ratios["expert"])].dropna()
    yield _diagonal(ratios.groupby("domain")["ratio"].min().to_numpy(), "", "domain")


def own_cluster_best(data: RunData) -> Iterator[Part]:
    """Whether each cluster's own expert is the best on the cluster's test documents, one part per model."""
    for family in several_clusters(data.run):
        model = family.model
        ratios = data.clusters.over_own(model.row, data.seed, model.domains).to_numpy(copy=True)
        np.fill_diagonal(ratios, np.nan)
        best = np.array([np.nanmin(line) for line in ratios if np.isfinite(line).any()])
        yield _diagonal(best, f"{model.label}: ", "cluster")


def _diagonal(best: np.ndarray, of: str, over: str) -> Part:
    """Whether own experts are best, by the ratios of the best other expert's perplexity to theirs."""
    agreeing = int((best > 1).sum())
    sentence = (
        f"{of}The best other expert's perplexity is {best.mean():.2f} times the own expert's on average; the own "
        f"expert is the best on {agreeing} of {so_many(len(best), over)}."
        if len(best)
        else f"{of}No perplexities of single experts."
    )
    return Part(bool(len(best) and best.mean() > 1), agreeing, len(best), sentence)


def overlap_correlates(data: RunData) -> Iterator[Part]:
    found = data.relation_with_own
    r, known = -found.pearson, np.isfinite(found.pearson)
    sentence = (
        f"Pearson r = {r:.2f} over {found.pairs} pairs of a domain and an expert, of the share of bigrams with minus "
        f"the log perplexity ratio (p = {found.permutation_p:.2g} for Spearman's with whole domains permuted)."
        if known
        else "Overlap of bigrams and perplexities of single experts: no rows."
    )
    # One number over all pairs: there is no majority of domains.
    yield Part(bool(r > 0), int(r > 0), int(known), sentence, bool(found.permutation_p < 0.05))


def adapts(data: RunData) -> Iterator[Part]:
    """The new experts against their parents, and the training domains before and after."""
    before, after = (found["DEMix-DAPT: own domain"] for found in adapting(data))
    parent = "the likeliest training expert" if data.averaged else "its parent"
    yield compare("Adapted expert", after, parent, before)
    own = (before_adding(data.run)[0], added(data.run)[0])
    old, new = (data.results.perplexities(one, data.training) for one in own)
    change = (new / old - 1).abs().dropna()
    agreeing = int((change <= UNCHANGED).sum())
    sentence = (
        f"Training domains by their own experts: unchanged on {agreeing} of {len(change)}, by construction "
        f"(largest change {100 * change.max():.3g}%)."
        if len(change)
        else "Training domains by their own experts: no rows."
    )
    yield Part(bool(len(change)) and agreeing == len(change), agreeing, len(change), sentence)


def forgets(data: RunData) -> Iterator[Part]:
    """The mean over the training domains after each Dense-DAPT, against that before."""
    before, after = (found["Dense-DAPT: training domains"] for found in adapting(data))
    changes = (after / before - 1).dropna()
    agreeing = int((changes > 0).sum())
    sentence = (
        f"Dense-DAPT changes the mean perplexity of the training domains by {as_percent(changes.mean())} on "
        f"average ({as_percent(changes.min())} to {as_percent(changes.max())}), a rise for {agreeing} of "
        f"{so_many(len(changes), 'novel domain')}."
        if len(changes)
        else f"Dense-DAPT against {before_dense_dapt(data.run).label}: no rows."
    )
    yield Part(bool(changes.mean() > 0), agreeing, len(changes), sentence)


def one_reduces(data: RunData) -> Iterator[Part]:
    """Each novel domain's expert alone added to the training experts: the mean over the training domains."""
    before, after = (found["One expert added: training domains"] for found in adapting(data))
    label = "With one more expert, averaged over the training domains,"
    yield compare(label, after, "training experts", before, over="added expert")


def like_never_trained(data: RunData) -> Iterator[Part]:
    run = data.run
    systems: dict[str, ByDomain] = {
        "with": before_removal(run),
        "without": without_expert(run),
        "never": without_domain,
    }
    rows = pd.DataFrame(
        {name: data.results.perplexities(system, data.training) for name, system in systems.items()}
    ).dropna()
    if rows.empty:
        yield Part(False, 0, 0, "+Expert, −Expert and −Domain: no domain has all three.")
        return
    mean = rows.mean()
    nearer = (rows["without"] - rows["never"]).abs() < (rows["without"] - rows["with"]).abs()
    yield Part(
        abs(mean["without"] - mean["never"]) < abs(mean["without"] - mean["with"]),
        int(nearer.sum()),
        len(rows),
        f"+Expert {mean['with']:.2f}, −Expert {mean['without']:.2f}, −Domain {mean['never']:.2f}; −Expert is "
        f"nearer to −Domain than to +Expert on {int(nearer.sum())} of the {so_many(len(rows), 'domain')} that have a "
        "model trained without.",
    )


def merged_forget(data: RunData) -> Iterator[Part]:
    """Whether leaving its expert out costs a domain as much in merged models as in DEMix, one part per merged model."""
    run, domains = data.run, data.training

    def costs(whole: System, without: ByDomain) -> pd.Series:
        return percent(data.own.perplexities(whole, domains), data.own.perplexities(without, domains))

    own = costs(before_removal(run), without_expert(run))
    for whole in merged_whole(run).values():
        found = costs(whole, without_choice(whole))
        agreeing = int((found >= own).sum())
        yield Part(
            mean_of(found) >= mean_of(own),
            agreeing,
            len(domains),
            f"{whole.label} {mean_of(found):+.1f}%, {run.whole.label} {mean_of(own):+.1f}%; at least as much on "
            f"{agreeing} of {so_many(len(domains), 'domain')}.",
        )
