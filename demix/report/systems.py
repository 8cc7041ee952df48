"""The systems that tables, figures and claims show, by what they stand for."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from demix.run.main_systems import added, trained_systems
from demix.run.models import adapted, left_out, one_more, trained_without
from demix.run.run import Run
from demix.run.systems import System, bases, ngram_systems, paper_systems, systems_of

# A system, or the one that belongs to a domain.
ByDomain = System | Callable[[str], System]

(DENSE,), (BALANCED,), (DOMAIN_TOKEN,), (NAIVE, AVERAGE, UNIFORM, UPDATING, CACHED) = (
    paper_systems(name) for name in ("dense_unbalanced", "dense", "domain_token", "demix")
)
POSTERIOR_MIXTURES = (UNIFORM, UPDATING, CACHED)


def before_adding(run: Run) -> tuple[System, System]:
    """Two systems of the model with added experts, over its training experts: each domain's own, and the mixture."""
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

    These are each model's only system, or its naive expert, its cached prior and its rules beyond the paper. The cached
    one of DEMix is there by the released scorer too.
    """
    for system in trained_systems(run):
        if system.method in ("dense", "naive", "cached") or system.weights not in ("", "history"):
            yield system
            if system == CACHED:
                yield system.released_scorer()


def systems_on(domain: str, kind: str, run: Run) -> list[System]:
    """The systems of all tables that are evaluated on `domain`, whose kind is `kind`."""
    systems = [*trained_systems(run), *ngram_systems(run)]
    dense = [system for system in systems if system.method == "dense"]
    naive = [system for system in systems if system.method == "naive"]
    mixed = [system for system in systems if system.method not in ("dense", "naive")]
    oracle = [replace(system, label=f"{system.label}, oracle") for system in naive]
    single = naive if kind == "training" else [*oracle, *(system.chosen_on_dev() for system in naive)]
    released = [system.with_weights("released") for system in mixed if system.weights == "history"]
    by_code = [*POSTERIOR_MIXTURES, *(system for system in mixed if system.by_distance)]
    released += [one.released_scorer() for one in by_code if one.released_scorer().variant]
    removed = [
        replace(without_expert(run)(domain), label="DEMix without its expert (cached)"),
        replace(without_domain(domain), label="DEMix never trained on it (cached)"),
    ]
    adaptations = [replace(dense_adapted(run)(domain), label="Dense-DAPT to it")]
    if kind == "novel":
        adaptations.append(replace(one_added(run)(domain), label="DEMix-DAPT to it, 1 expert added (cached)"))
    return [*dense, *single, *mixed, *released, *added(run), *removed, *adaptations]
