"""The systems of tables, figures and claims by their role, and the models of a run by method."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from demix.config.architecture import Architecture
from demix.config.counts import parameters, training_flops_per_token
from demix.config.models import Clustering
from demix.run.models import Model, adapted, kept_next_to, left_out, one_more, trained_without
from demix.run.run import Run
from demix.run.systems import (
    BOTH_KEPT,
    System,
    added,
    bases,
    by_distance,
    merged_label,
    paper_systems,
    routed_weights,
    systems_of,
    table_rows,
    trained_systems,
)

# Claims name them.
from demix.run.systems import rivals as rivals
from demix.run.systems import with_same_counts as with_same_counts

# A system, or the one that belongs to a domain.
ByDomain = System | Callable[[str], System]

(DENSE,), (BALANCED,), (DOMAIN_TOKEN,), (NAIVE, AVERAGE, UNIFORM, UPDATING, CACHED) = (
    paper_systems(name) for name in ("dense_unbalanced", "dense", "domain_token", "demix")
)
POSTERIOR_MIXTURES = (UNIFORM, UPDATING, CACHED)


def before_adding(run: Run) -> tuple[System, System]:
    """Two systems of the model that gets new experts: each domain's own training expert, and their mixture."""
    model = run.receiver
    naive, *_, cached = systems_of(model.row, model.kind, model.label)
    return naive, cached


def training_experts(run: Run) -> System:
    """The mixture of the training experts of the model to which experts are added."""
    return before_adding(run)[1]


def all_experts(run: Run) -> System:
    """The mixture of all experts of the model to which experts are added."""
    return added(run)[1]


def before_removal(run: Run) -> System:
    """The model of the removal experiments with all its experts: +Expert of Table 7."""
    model = run.whole
    return systems_of(model.row, model.kind, model.label)[-1]


def one_added(run: Run) -> Callable[[str], System]:
    """A function from a novel domain to the mixture of the training experts and the domain's own: section 6.2."""
    row = run.receiver.row
    return lambda domain: System("+ one expert (cached)", row, one_more(domain), "cached", "history")


def without_expert(run: Run) -> Callable[[str], System]:
    """A function from a domain to the system without the expert of that domain: −Expert of Table 7."""
    row = run.whole.row
    return lambda domain: System("−Expert", row, left_out(domain), "cached", "history")


def without_choice(whole: System) -> Callable[[str], System]:
    """A function from a domain to a merged model without the domain's expert."""
    return lambda domain: replace(whole, experts=left_out(domain))


def without_domain(domain: str) -> System:
    """The model trained without `domain`: −Domain of Table 7."""
    return System("−Domain", trained_without(domain), "training", "cached", "history")


def before_dense_dapt(run: Run) -> System:
    """The dense model that Dense-DAPT starts from."""
    return DENSE if run.config.adaptation.dense == DENSE.model else BALANCED


def dense_adapted(run: Run) -> Callable[[str], System]:
    """A function from a novel domain to the dense model after Dense-DAPT to the domain: Table 13."""
    row = run.config.adaptation.dense
    return lambda domain: System("Dense-DAPT", adapted(row, domain), "dense", "dense")


def both_kept(run: Run) -> Callable[[str], System]:
    """A function from a novel domain to the dense model and its adaptation to the domain, mixed."""
    row = run.config.adaptation.dense
    return lambda domain: System("Dense and Dense-DAPT", kept_next_to(row, domain), "training", "uniform", BOTH_KEPT)


def released(system: ByDomain) -> ByDomain:
    """`system` with the weights of the released code."""
    if isinstance(system, System):
        return system.with_weights("released")
    return lambda domain: system(domain).with_weights("released")


def baselines(run: Run) -> list[System]:
    """The dense baselines that a run has."""
    return [base for base in (DENSE, BALANCED) if base in bases(run).values()]


def in_domain(run: Run) -> Iterator[System]:
    """The systems of Tables 3 and 4.

    For a model with experts these are its own expert (naive), its mixture with a cached prior, and its rules that are
    not in the paper; another model has one system. DEMix with a cached prior is also shown by the released scorer.
    """
    for system in trained_systems(run):
        if system.method in ("dense", "naive", "cached") or system.weights not in ("", "history"):
            yield system
            if system == CACHED:
                yield system.released_scorer()


@dataclass(frozen=True)
class Family:
    """A model entry of the run's own seed, and the system that represents it.

    `experts` is the number of its training experts, 1 for a dense model. `clustering` is None for experts of domains.
    `architecture` is that of the model that predicts text; a merged-routed model has another one than was trained.
    """

    model: Model
    system: System
    experts: int
    clustering: Clustering | None
    architecture: Architecture

    @property
    def tokens(self) -> int:
        """The training tokens of all experts together, including a dense warm start."""
        return int(self.model.settings.tokens)

    @property
    def begun(self) -> str:
        """The start of training: restart, folder or merged; empty from scratch and if a parent's schedule continues."""
        if self.model.mixes:
            return "merged"
        if self.model.base.initial:
            return "folder"
        return "restart" if self.model.restarts else ""

    @property
    def name(self) -> str:
        """The name of the family in papers."""
        kind = self.model.kind
        if self.model.mixes:
            return "BTX"
        if self.architecture.routed and self.system.method == "merged":
            return "Merged-routed"
        if not self.clustering:
            return kind.label
        return "c-BTM" if kind.expert_scope == "model" else f"{kind.label} on clusters"

    @property
    def chosen(self) -> str:
        """The experts of a model with one score column: 1, or the number of experts among which a token chooses."""
        routed = self.architecture.routed
        return f"{routed.experts}, top-{routed.top_k}" if routed else "1"

    @property
    def made(self) -> str:
        """The way in which the clusters were made; empty for experts of domains."""
        if not self.clustering:
            return ""
        balanced = self.clustering.method != "kmeans" or self.clustering.balanced
        return {"kmeans": "k-means", "random": "random"}[self.clustering.method] if balanced else "k-means, unbalanced"


@cache
def families(run: Run) -> dict[str, Family]:
    """The model entries in the order of tables, without domain tokens.

    As in their papers, experts of domains are weighted with the cached prior, and experts of clusters by the distance
    of the context to the clusters.
    """
    models = {model.name: model for model in run.trained if model.seed == run.seed}
    known, routed = run.config.clusterings, routed_weights(run)
    found = {}
    for name, row in table_rows(run).items():
        if row.kind.domain_tokens:
            continue
        model, system = models[name], systems_of(name, row.kind, row.label)[-1]
        if model.data and routed:
            system = by_distance(model, routed)
        architecture = model.architecture
        found[name] = Family(model, system, len(model.experts), known.get(model.data), architecture)
    return found


def by_label(run: Run) -> dict[str, Family]:
    """The models by their labels in tables, each followed by the single models that were merged from its experts."""
    found = {}
    for row, family in families(run).items():
        label = family.model.label
        found[label] = family
        for one in run.merged:
            if one.model.name == row:
                named = merged_label(one)
                system = System(named, row, "training", "merged", one.weights)
                found[named] = replace(family, system=system, experts=1, architecture=one.architecture)
    return found


def tried_top_k(run: Run, experts: int) -> list[int]:
    """The values of `evaluation.top_k` below a number of experts, ascending."""
    return sorted(k for k in run.config.evaluation.top_k if k < experts)


def one_clusters(run: Run) -> dict[tuple[int, str], System]:
    """The models of one cluster by tokens and start of training: Dense (Balanced), and dense entries that branch from
    it.

    Experts whose dense warm start keeps the schedule are compared with Dense (Balanced), which has the same start.
    """
    dense = [one for one in families(run).values() if one.chosen == "1" and not one.model.kind.has_experts]
    return {(one.tokens, one.begun): one.system for one in dense if one.begun or one.system == BALANCED}


def training_flops(model: Model, run: Run) -> tuple[float, float]:
    """The FLOPs of all updates of a model, including a dense warm start, and of its last update."""
    architecture, vocab_size = model.architecture, run.types
    begun = model.first_step
    dense, own = (
        model.step_tokens * training_flops_per_token(one, vocab_size, architecture.context)
        for one in (architecture.unrouted, architecture)
    )
    return dense * begun + own * (model.updates - begun), own


def parameters_of(model: Model, run: Run) -> tuple[int, int]:
    """The parameters that all experts of a model share, and those of one expert."""
    tokens = len(model.domains) if model.kind.domain_tokens else 0
    return parameters(model.architecture, run.types, tokens, model.kind.expert_scope)


def all_training_flops(model: Model, run: Run) -> float:
    """The FLOPs of all updates of a model, and of the model whose experts it merges.

    NaN if it started from an imported model, whose training is not known.
    """
    merged = (training_flops(one, run)[0] for one in run.trained if model.mixes and one.name == model.parent)
    return math.nan if model.base.initial else training_flops(model, run)[0] + sum(merged)
