"""Claims about families of models: of the c-BTM paper (Gururangan et al. 2023), and of BTM's (Li et al. 2022)."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from demix.report import left_out, read
from demix.report.cells import so_many
from demix.report.clusters import Clusters, over_own
from demix.report.families import Family, families, one_clusters, tried_top_k
from demix.report.family_costs import training_flops
from demix.report.read import Results, novel_domains, perplexities, training_domains
from demix.report.verdict import HARM, Claim, Part, claim_of, compare
from demix.run.run import Run
from demix.run.systems import System, by_distance, routed_weights

# The comparison of two systems on domains: whether the first has the lower perplexity.
Lower = Callable[[System, System, list[str]], Part]


def family_claims(results: Results, clusters: Clusters | None, lower: Lower, run: Run) -> Iterator[Claim]:
    """The claims about families whose rows the config has, judged on the rows `results` of one seed."""
    if "families" in left_out(run):
        return
    training, novel = training_domains(run), novel_domains(run)
    known, ones = families(run), one_clusters(run)
    routed = routed_weights(run)
    one = " or ".join(system.label for system in ones.values())
    whole = [family for family in known.values() if family.model.kind.expert_scope == "model"]
    made = {
        how: [family for family in whole if family.made == how] for how in ("k-means", "k-means, unbalanced", "random")
    }
    several = [family for family in made["k-means"] if family.experts > 1 and family.budget in ones]

    def below(pairs: list[tuple[Family, System]], domains: list[str] = training) -> list[Part]:
        return [lower(family.system, other, domains) for family, other in pairs]

    def alike(how: str) -> list[tuple[Family, Family]]:
        """The balanced rows beside those of the same number of clusters that are made in another way."""
        return [
            (family, other)
            for family in several
            for other in made[how]
            if (family.experts, family.budget) == (other.experts, other.budget)
        ]

    if several:
        yield claim_of(
            "clusters_beat_one",
            f"More than one cluster beats one: c-BTM has lower perplexity than {one}, which learns from all "
            "text, on the training domains at equal tokens (c-BTM, 4.1, Figure 5).",
            *below([(family, ones[family.budget]) for family in several]),
        )
        if routed:
            # Other weights compute all experts before they leave some out.
            yield from _sparse_claims(results, several, training, run)
        yield _own_cluster_best(results, clusters, several)
    if pairs := alike("random"):
        yield claim_of(
            "random_clusters_are_worse",
            "What is in a cluster matters: random clusters are worse than k-means' and worse than one cluster "
            "(c-BTM, 7.1, Figure 13).",
            *below([(family, other.system) for family, other in pairs]),
            *(lower(ones[other.budget], other.system, training) for _, other in pairs),
        )
    if pairs := alike("k-means, unbalanced"):
        family, other = max(pairs, key=lambda pair: pair[0].experts)
        yield claim_of(
            "balance_helps_at_large_k",
            f"With many clusters ({family.experts} is the most that this run has both ways) balanced ones are better "
            "than unbalanced ones (c-BTM, 7.2, Figures 13 and 14).",
            *below([(family, other.system)]),
        )
    by_domain = [family for family in whole if not family.clustering]
    equal = [(family, other) for family in several for other in by_domain if family.budget == other.budget]
    if equal:
        # As clusters are not told the domain, domains are not either where their experts can be weighted alike.
        nearest, other = min(equal, key=lambda pair: abs(pair[0].experts - len(training)))
        metadata = by_distance(other.model, routed) if routed and other.model.routing else other.system
        yield claim_of(
            "clusters_against_metadata",
            "Clusters do as well as domains given by metadata or better, perplexity at most "
            f"{100 * HARM:g}% higher: {nearest.experts} clusters against {so_many(len(training), 'domain')}, "
            "each expert a whole model (c-BTM, 7.4, Figure 18 and Table 8).",
            compare(
                nearest.system.label,
                perplexities(results, nearest.system, training),
                metadata.label,
                perplexities(results, metadata, training),
                allowance=HARM,
            ),
        )
    if apart := [(family, read.BALANCED) for family in by_domain if family.budget == known["dense"].budget]:
        yield claim_of(
            "btm_against_dense",
            f"Experts of domains that are trained apart (BTM, cached prior) beat {read.BALANCED.label} at equal tokens "
            "(Li et al. 2022).",
            *(part for domains in (training, novel) if domains for part in below(apart, domains)),
        )
    rivals = [family for family in known.values() if family.model.kind.routed]
    experts = [family for family in known.values() if family.model.kind.has_experts and not family.clustering]
    if matched := _matched(experts, rivals, run):
        yield claim_of(
            "domain_experts_against_token_routed",
            "At equal FLOPs of training experts of domains (cached prior) have lower perplexity than experts that "
            "tokens choose, where both begin alike: from scratch, or with the same state of a dense model.",
            *(part for domains in (training, novel) if domains for part in below(matched, domains)),
        )
    if matched := _matched(several, rivals, run):
        yield claim_of(
            "clusters_against_upcycling",
            "At equal FLOPs of training c-BTM beats sparse upcycling, a mixture of experts that begins with the same "
            "dense model (c-BTM, 6, Figure 12: at large budgets; at small ones upcycling is better).",
            *below(matched),
        )
    layers = [family for family in known.values() if family.model.kind.expert_scope == "feedforward"]
    seeded = [family for family in layers if family.model.settings.seed_tokens and not family.clustering]
    scratch = known["demix"]
    seeded = [family for family in seeded if family.budget == scratch.budget]
    if seeded and not scratch.model.parent:
        yield claim_of(
            "seeding_helps",
            "A seed phase helps: experts that begin with what one model has learned of all domains beat experts from "
            "scratch at equal tokens (Li et al. 2022, there for whole models; here for DEMix).",
            *below([(family, scratch.system) for family in seeded]),
        )


def _matched(families: list[Family], rivals: list[Family], run: Run) -> list[tuple[Family, System]]:
    """The pairs that begin with as many tokens of a dense parent and take the same FLOPs, up to an update of a rival.

    `match: flops` cannot come nearer. A parent from a folder has a budget of its own.
    """

    def begun(family: Family) -> tuple[Any, ...]:
        row = family.model.base
        return row.settings.parent, row.settings.seed_tokens, row.initial, row.options

    pairs = []
    for rival in rivals:
        flops, update = training_flops(rival.model, run)
        pairs += [
            (family, rival.system)
            for family in families
            if begun(family) == begun(rival) and abs(training_flops(family.model, run)[0] - flops) < update
        ]
    return pairs


def _sparse_claims(results: Results, several: list[Family], training: list[str], run: Run) -> Iterator[Claim]:
    """The claims about few experts a token, for the numbers that the config tries."""
    ones = one_clusters(run)

    def on(system: System) -> pd.Series:
        return perplexities(results, system, training)

    def only(family: Family, k: int) -> System:
        return replace(family.system, label=f"{family.system.label}, top-{k}", top_k=k)

    if single := [family for family in several if 1 in tried_top_k(run, family.experts)]:
        yield claim_of(
            "one_expert_beats_one_cluster",
            "Even one expert a token beats one cluster at one model's FLOPs (c-BTM, 4.3, Figure 9).",
            *(
                compare(only(family, 1).label, on(only(family, 1)), ones[family.budget].label, on(ones[family.budget]))
                for family in single
            ),
        )
    few = [(family, k) for family in several for k in tried_top_k(run, family.experts) if k in (2, 4)]
    if few:
        yield claim_of(
            "few_experts_suffice",
            f"Two or four experts a token do as well as all: perplexity is at most {100 * HARM:g}% higher (c-BTM, 4.3, "
            "Figure 9).",
            *(
                compare(only(family, k).label, on(only(family, k)), "all experts", on(family.system), allowance=HARM)
                for family, k in few
            ),
        )


def _own_cluster_best(results: Results, clusters: Clusters | None, several: list[Family]) -> Claim:
    """Whether each cluster's own expert is the best on the cluster's test documents, one part per model."""
    seed, parts = int(results.rows["seed"].iloc[0]), []
    for family in several:
        row, names = family.model.row, family.model.domains
        losses = (
            clusters.losses
            if clusters
            else pd.DataFrame(columns=["model", "seed", "cluster", "expert", "nll", "tokens"])
        )
        ratios = over_own(losses[(losses["model"] == row) & (losses["seed"] == seed)], names).to_numpy(copy=True)
        np.fill_diagonal(ratios, np.nan)
        best = np.array([np.nanmin(line) for line in ratios if np.isfinite(line).any()])
        agreeing = int((best > 1).sum())
        sentence = (
            f"{row}: the best other expert's perplexity is {best.mean():.2f} times the own expert's on average; the "
            f"own expert is the best on {agreeing} of {len(best)} clusters."
            if len(best)
            else f"{row}: no losses of experts by cluster."
        )
        parts.append(Part(bool(len(best) and best.mean() > 1), agreeing, len(best), sentence))
    return claim_of(
        "own_cluster_expert_best",
        "On the test documents of each cluster the cluster's own expert is the best of all (c-BTM, Figure 15).",
        *parts,
    )
