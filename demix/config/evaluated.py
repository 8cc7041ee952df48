"""What a run evaluates and compares: sets of experts, score tables, systems; the rows come from `systems`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from demix.config.systems import (
    KINDS,
    Kind,
    Model,
    adapted_model,
    further_seeds,
    left_out,
    model_rows,
    novel_domains,
    planned,
    removal_model,
    trained_without,
    training_domains,
)

# How experts are mixed (DESIGN section 5, "Methods"), but for the single expert that `naive` takes.
METHODS = ("average", "uniform", "updating", "cached")


@dataclass(frozen=True)
class ExpertSet:
    """Experts of a model that are mixed together, under a label, by `methods`.

    With `alone` every expert gets a row of its own; with `variants` there are also the grids, the released scorer and
    the posteriors block by block.
    """

    label: str
    experts: tuple[str, ...]
    methods: tuple[str, ...] = METHODS
    alone: bool = False
    variants: bool = False


@dataclass(frozen=True)
class Evaluated:
    """The score tables of one model on a domain, and the sets of its experts that are evaluated there.

    `sets` is empty for a model of one column. `model` and `seed` are those of its rows in results, `folder` is below
    scores/.
    """

    model: str
    folder: str
    seed: int
    columns: tuple[str, ...]
    sets: tuple[ExpertSet, ...] = ()


@dataclass(frozen=True)
class System:
    """One way to predict text, one line of the tables: a model, a set of its experts and a method that mixes them.

    `variant` and `top_k` are those of results.parquet: empty and None for what the paper's tables hold.
    """

    label: str
    model: str
    experts: str
    method: str
    weights: str = ""
    variant: str = ""
    top_k: int | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What identifies it in differences.parquet."""
        return self.model, self.experts, self.method, self.weights

    def with_weights(self, weights: str) -> "System":
        """The same with another rule of weights."""
        return replace(self, label=f"{self.label}, {weights} weights", weights=weights)

    def chosen_on_dev(self) -> "System":
        """The same where the one expert or token was chosen on dev, for domains that have none of their own."""
        return replace(self, label=f"{self.label}, chosen on dev", variant="dev_choice")


def systems_of(row: str, kind: Kind) -> tuple[System, ...]:
    """The systems that a trained model makes with the experts (or tokens) of its training domains.

    They have the paper's names where the row is the paper's, and the row's name where it is not.
    """
    label = kind.label if row == kind.name else row
    if kind.domain_tokens:
        return (System(label, row, "training", "naive"),)
    if not kind.has_experts:
        return (System(label, row, "dense", "dense"),)
    return (
        System(f"{label} (naive)", row, "training", "naive"),
        System(f"{label} (average)", row, "training", "average"),
        *(
            System(f"{label} ({prior} prior)", row, "training", prior, "history")
            for prior in ("uniform", "updating", "cached")
        ),
    )


def evaluated(config: Mapping[str, Any], domain: str) -> tuple[Evaluated, ...]:
    """What is evaluated on `domain`: models of one column first, then those whose experts are mixed; seeds at last."""
    training, novel = training_domains(config), novel_domains(config)
    receiver, whole = adapted_model(config), removal_model(config)

    def sets(model: Model) -> Iterator[ExpertSet]:
        if model.removed:
            yield ExpertSet("training", model.columns, methods=("cached",))
            return
        own = model.seed == config["seed"]
        adds = model == receiver and bool(novel)
        if adds:
            yield ExpertSet("all", training + novel, alone=True)
        yield ExpertSet("training", training, alone=own and not adds, variants=own and model.name == "demix")
        if model == whole and domain in training and len(training) > 1:
            rest = tuple(expert for expert in training if expert != domain)
            yield ExpertSet(left_out(domain), rest, methods=("cached",))

    def table(model: Model) -> Evaluated:
        columns = training + novel if model == receiver else model.columns
        some = tuple(sets(model)) if model.kind.has_experts or model.kind.domain_tokens else ()
        return Evaluated(model.row, model.name, model.seed, columns, some)

    found = []
    models = [model for model in planned(config) if domain in model.scored]
    for seed in (config["seed"], *further_seeds(config)):
        of_seed = [model for model in models if model.seed == seed]
        tables = [(model, table(model)) for model in of_seed]
        single = [one for _, one in tables if not one.sets]
        tokens = [one for model, one in tables if model.kind.domain_tokens]
        mixed = [one for model, one in tables if one.sets and not model.kind.domain_tokens]
        found += [*single, *tokens, *mixed]
    return tuple(found)


def bases(config: Mapping[str, Any]) -> dict[str, System]:
    """The baselines of the comparisons, by their names in differences.parquet."""
    rows = model_rows(config)
    found = {name: systems_of(name, rows[name][0])[0] for name in ("dense_unbalanced", "dense") if name in rows}
    return found | {"demix_cached": systems_of("demix", KINDS["demix"])[-1]}


def compared(config: Mapping[str, Any], domain: str) -> tuple[System, ...]:
    """The systems that are compared with each of `bases` on `domain`.

    The baselines and every method that the paper's tables set beside them, one rule of weights (Tables 3 to 5); all
    experts and the released weights; the removals of Table 7.
    """
    rows = model_rows(config)
    paper = [name for name in ("dense_unbalanced", "dense", "domain_token", "demix") if name in rows]
    first, more = (
        [system for name in names for system in systems_of(name, rows[name][0]) if system.method != "average"]
        for names in (paper, [name for name in rows if name not in KINDS])
    )
    receiver, whole = adapted_model(config).row, removal_model(config).row
    return (
        *first,
        systems_of("demix", KINDS["demix"])[-1].with_weights("released"),
        System("", receiver, "all", "cached", "history"),
        System("", whole, left_out(domain), "cached", "history"),
        System("", trained_without(domain), "training", "cached", "history"),
        *more,
    )
