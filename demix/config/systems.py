"""What the models of a run are: the one table that rules, plan, evaluation, report and tracking read.

A row of the config's `models` is trained once per seed, and once more without each domain of `removal`; `adaptation`
makes experts or models out of it. Each of these is a `Model` or an `Adaptation` here, and this
module alone makes and parses its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from demix.errors import DemixError

# The one expert of a model whose feedforwards no domain owns.
DENSE_EXPERT = "dense"


@dataclass(frozen=True)
class Kind:
    """How models of one kind are built and what they learn from.

    `label` is the paper's name for it. `expert_scope` says which tensors belong to a domain's expert alone:
    `feedforward` (DEMix layers), or `none` for a model whose one expert is called `dense`. `batches` says how a step is
    drawn: `by_domain` (a group of sequences for each domain's expert), `mixed` (the same sequences as one group) or
    `proportional` (to the domains' sizes). `domain_tokens`: a domain's token stands before each sequence.
    """

    name: str
    label: str
    expert_scope: str
    batches: str
    domain_tokens: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether each domain has an expert of its own."""
        return self.expert_scope != "none"


KINDS = {
    kind.name: kind
    for kind in (
        Kind("demix", "DEMix", "feedforward", "by_domain"),
        Kind("dense", "Dense (Balanced)", "none", "mixed"),
        Kind("dense_unbalanced", "Dense", "none", "proportional"),
        Kind("domain_token", "+ Domain Token", "none", "mixed", domain_tokens=True),
    )
}
# Rows on which others rest: DEMix is the model under test, the dense model is its baseline.
KEPT = ("demix", "dense")


@dataclass(frozen=True)
class Model:
    """A trained model: its folder models/<name>, and metrics/<name>.jsonl.

    `row` is its name in results, the same for every seed, and `base` the row of the config's
    `models` that it is trained by. `domains` are those it learns from, in order; `settings` are the config's section
    `training` with the row's own values (of an adapted model: the section `adaptation`). `removed` is
    the domain that it is trained without, `adapted_to` the novel domain that the model `parent` was adapted to.
    `scored` are the domains that it is scored on, `splits` their splits.
    """

    name: str
    row: str
    base: str
    kind: Kind
    seed: int
    domains: tuple[str, ...]
    scored: tuple[str, ...]
    splits: tuple[str, ...] = ("dev", "test")
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    removed: str = ""
    parent: str = ""
    adapted_to: str = ""

    @property
    def experts(self) -> tuple[str, ...]:
        """The experts that training makes, in order."""
        return self.domains if self.kind.has_experts else (DENSE_EXPERT,)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of its score tables: its experts, or the domain tokens that it is given."""
        return self.domains if self.kind.domain_tokens else self.experts

    @property
    def rule(self) -> str:
        """Its name as a part of the names of rules."""
        return self.name.replace("-", "_")


@dataclass(frozen=True)
class Adaptation:
    """The adaptation of `parent` to the novel `domain`: metrics/<name>.jsonl.

    DEMix-DAPT adds an expert to the parent's folder, Dense-DAPT makes a model of its own.
    """

    name: str
    domain: str
    parent: Model

    @property
    def adds_expert(self) -> bool:
        """Whether an expert is added, rather than a model made."""
        return self.parent.kind.has_experts

    @property
    def rule(self) -> str:
        """The rule of the workflow that adapts."""
        return "adapt" if self.adds_expert else "adapt_dense"

    @property
    def model(self) -> str:
        """The folder that gets the weights."""
        return self.parent.name if self.adds_expert else self.name

    @property
    def expert(self) -> str:
        """The name of the adapted expert in that folder."""
        return self.domain if self.adds_expert else DENSE_EXPERT


@dataclass(frozen=True)
class ScoringJob:
    """A rule of the workflow that scores texts under a model, in `jobs` jobs.

    Names may hold the wildcards {domain} and {novel}. `experts` are the files read, `columns` the score tables made;
    `shared` says that the tokens' own table is made too, which otherwise is there for the domains of `after`. `added`
    says that the job scores what adaptation made.
    """

    rule: str
    log: str
    model: str
    experts: tuple[str, ...]
    columns: tuple[str, ...]
    domains: tuple[str, ...]
    splits: tuple[str, ...]
    jobs: int
    priority: int = 0
    shared: bool = True
    after: tuple[str, ...] = ()
    added: bool = False


def training_domains(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The training domains in the config's order."""
    return tuple(config["domains"]["training"])


def novel_domains(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The novel domains in the config's order."""
    return tuple(config["domains"].get("novel") or ())


def further_seeds(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The additional seeds with which a run trains its models again."""
    return tuple(seed for seed in config.get("seeds") or () if seed != config["seed"])


def folder_of(row: str, seed: int, first: int) -> str:
    """The folder of a row's model of `seed`, where the run's own seed is `first`."""
    return row if seed == first else f"{row}-seed{seed}"


def left_out(domain: str) -> str:
    """The label of the set of experts that lacks the one of `domain`."""
    return f"minus-{domain}"


def trained_without(domain: str) -> str:
    """The model that is trained without `domain`."""
    return f"without-{domain}"


def adapted(row: str, domain: str) -> str:
    """The adaptation of a row's model to `domain`."""
    return f"{row}-dapt-{domain}"


def model_rows(config: Mapping[str, Any]) -> dict[str, tuple[Kind, dict[str, Any]]]:
    """The rows of a completed config's `models`: kind and section `training` of each, the paper's four first.

    Raises DemixError for a row whose kind is not known, and where one is left out on which others rest.
    """
    given = config.get("models") or {}
    rows = {}
    for name in (*KINDS, *(name for name in given if name not in KINDS)):
        overrides = given.get(name, {})
        if overrides is None:
            if name in KEPT:
                raise DemixError(f"config key models.{name}", "is null", "leave it: others are held against it")
            continue
        kind = overrides.get("kind") or name
        if kind not in KINDS:
            cause = f"is {kind!r}" if "kind" in overrides else "is missing"
            raise DemixError(f"config key models.{name}.kind", cause, f"use one of {', '.join(KINDS)}")
        if name in KINDS and kind != name:
            raise DemixError(f"config key models.{name}.kind", f"is {kind}", "give a row of another name that kind")
        own = {key: value for key, value in overrides.items() if key != "kind"}
        rows[name] = (KINDS[kind], (config.get("training") or {}) | own)
    return rows


def planned(config: Mapping[str, Any]) -> tuple[Model, ...]:
    """All models of a run of a completed config.

    First the rows of `models` with the run's own seed, then those trained without a domain, then those of further
    seeds, at last those that Dense-DAPT makes.
    """
    training, novel = training_domains(config), novel_domains(config)
    first = [
        Model(name, name, name, kind, config["seed"], training, training + novel, settings=settings)
        for name, (kind, settings) in model_rows(config).items()
    ]
    removal = config.get("removal") or {}
    whole = _row(first, removal.get("model") or "demix", "removal.model")
    without = [
        replace(
            whole,
            name=trained_without(removed),
            row=trained_without(removed),
            domains=tuple(removal["replacement"] if domain == removed else domain for domain in training),
            scored=(removed,),
            removed=removed,
        )
        for removed in removal.get("retrain_without") or ()
    ]
    again = [
        replace(model, name=folder_of(model.row, seed, config["seed"]), seed=seed)
        for seed in further_seeds(config)
        for model in first
    ]
    made = [
        replace(
            one.parent,
            name=one.name,
            row=one.name,
            domains=(one.domain,),
            scored=(*training, one.domain),
            splits=("test",),
            settings=config.get("adaptation") or {},
            parent=one.parent.name,
            adapted_to=one.domain,
        )
        for one in _adaptations(config, first)
        if not one.adds_expert
    ]
    return (*first, *without, *again, *made)


def trained(config: Mapping[str, Any]) -> tuple[Model, ...]:
    """The models that a run trains from scratch."""
    return tuple(model for model in planned(config) if not model.parent)


def model_of(config: Mapping[str, Any], name: str) -> Model:
    """The planned model called `name`."""
    return next(model for model in planned(config) if model.name == name)


def adaptations(config: Mapping[str, Any]) -> tuple[Adaptation, ...]:
    """The adaptations of a run: of each novel domain DEMix-DAPT, then Dense-DAPT."""
    return _adaptations(config, [model for model in trained(config) if model.name == model.row])


def adapted_model(config: Mapping[str, Any]) -> Model:
    """The model that gets the experts of novel domains."""
    return next(model for model in trained(config) if model.name == _adapted_row(config))


def removal_model(config: Mapping[str, Any]) -> Model:
    """The model whose experts are left out, and that is trained again without domains."""
    name = (config.get("removal") or {}).get("model") or "demix"
    return next(model for model in trained(config) if model.name == name)


def _adapted_row(config: Mapping[str, Any]) -> str:
    return (config.get("adaptation") or {}).get("model") or "demix"


def _adaptations(config: Mapping[str, Any], rows: list[Model]) -> tuple[Adaptation, ...]:
    parents = (_row(rows, _adapted_row(config), "adaptation.model"), _row(rows, "dense", "models.dense", experts=False))
    return tuple(
        Adaptation(adapted(parent.row, novel), novel, parent) for novel in novel_domains(config) for parent in parents
    )


def _row(models: list[Model], name: str, key: str, *, experts: bool = True) -> Model:
    """The model of a row that a key names, which must have experts (or must not)."""
    fitting = [model for model in models if model.kind.has_experts == experts]
    for model in fitting:
        if model.name == name:
            return model
    names = ", ".join(model.name for model in fitting)
    raise DemixError(f"config key {key}", f"is {name}, which is no such row of models", f"name one of {names}")


def scoring_jobs(config: Mapping[str, Any]) -> tuple[ScoringJob, ...]:
    """All rules that score, in the order of the workflow.

    An adapted expert is scored on the domains before its own in one job instead of one for each pair, and with those
    before it on its own domain in another: a novel domain that is appended changes none of the others' jobs.
    """
    training, novel = training_domains(config), novel_domains(config)
    receiver = adapted_model(config)
    jobs = []
    for model in trained(config):
        one = (model.removed,) if model.removed else ("{domain}",)
        log = model.name if model.removed else f"{model.name}/{{domain}}"
        priority = 0 if model.removed else 80 if model == receiver else 10
        jobs.append(
            ScoringJob(
                f"score_{model.rule}", log, model.name, model.experts, model.columns, one, model.splits,
                len(model.scored), priority,
            )
        )  # fmt: skip
    for number, name in enumerate(novel):
        before, so_far = (*training, *novel[:number]), novel[: number + 1]
        into = ScoringJob("", "", receiver.name, (), (), (), receiver.splits, 1, priority=60, shared=False, added=True)
        jobs += [
            replace(
                into, rule=f"score_adapted_{name}", log=f"adapted/{name}", experts=(name,), columns=(name,),
                domains=before, after=before,
            ),
            replace(
                into, rule=f"score_adapted_on_{name}", log=f"adapted/on-{name}", experts=so_far, columns=so_far,
                domains=(name,), after=(name,),
            ),
        ]  # fmt: skip
    if novel:
        made, dense = adapted("dense", "{novel}"), (DENSE_EXPERT,)
        jobs.append(
            ScoringJob(
                "score_adapted_dense", made, made, dense, dense, (*training, "{novel}"), ("test",), len(novel),
                added=True,
            )
        )  # fmt: skip
    return tuple(jobs)
