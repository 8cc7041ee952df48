"""The table of the models of a run, which rules, plan, evaluation, report and tracking read.

Each row of the config's `models` is trained once per seed. One row is also trained without each domain that `removal`
names, and `adaptation` makes experts or models out of rows. Each trained model is a `Model` here and each adaptation an
`Adaptation`. Only this module makes and parses names of models.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from demix.errors import DemixError

# The single expert of a model without domain experts.
DENSE_EXPERT = "dense"


@dataclass(frozen=True)
class Kind:
    """How models of one kind are built, and what they learn from.

    `label` is the paper's name of the kind. `expert_scope` says which tensors belong to a domain's expert alone:
    `feedforward` (DEMix layers), or `none` for a model whose single expert is called `dense`. `batches` says how a step
    is drawn: `by_domain` (a group of sequences for each domain's expert), `mixed` (the same sequences as one group) or
    `proportional` (in proportion to the domains' sizes). With `domain_tokens` the token of its domain stands before
    each sequence.
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
# Rows that a config must keep: DEMix is the model under test, and the dense model is its baseline.
KEPT = ("demix", "dense")


@dataclass(frozen=True)
class Model:
    """A trained model, with the folder models/<name> and the metrics metrics/<name>.jsonl.

    `row` is the model's name in results, the same for every seed. `base` is the row of the config's `models` that
    configures the training. `domains` are the domains that the model learns from, in order. `settings` are the config's
    section `training` with the row's own values, or for an adapted model the section `adaptation`. `removed` is the
    domain that the model is trained without. `parent` is the folder of the model that this one goes on from: with a
    seed phase (docs/concepts.md), or adapted to the novel domain `adapted_to`. `scored` are the domains that the model
    is scored on, `splits` the splits of these domains.
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
        """The columns of the model's score tables: its experts, or its domain tokens."""
        return self.domains if self.kind.domain_tokens else self.experts

    @property
    def rule(self) -> str:
        """The model's name as a part of the names of rules."""
        return self.name.replace("-", "_")

    @property
    def rates_from(self) -> str:
        """The row whose sweep chooses the model's learning rate: a branch goes on with the schedule of its parent."""
        return str(self.settings.get("parent", self.base))

    @property
    def sweeps(self) -> bool:
        """Whether the model has a sweep of its own; further seeds, branches and removals take that of another."""
        return self.name == self.rates_from and bool(self.settings["sweep"])

    def step_tokens(self, context: int) -> int:
        """The tokens of one optimizer step with blocks of `context` tokens."""
        return int(len(self.domains) * self.settings["sequences"] * context)

    def seed_step(self, context: int) -> int:
        """The number of its parent's updates with which the model begins; 0 for one that is trained from scratch."""
        return int(self.settings.get("seed_tokens", 0)) // self.step_tokens(context) if self.parent else 0


@dataclass(frozen=True)
class Adaptation:
    """The adaptation of `parent` to the novel `domain`, with the metrics metrics/<name>.jsonl.

    DEMix-DAPT adds an expert to the parent's folder. Dense-DAPT makes a new model.
    """

    name: str
    domain: str
    parent: Model

    @property
    def adds_expert(self) -> bool:
        """Whether the adaptation adds an expert to its parent instead of making a new model."""
        return self.parent.kind.has_experts

    @property
    def rule(self) -> str:
        """The rule of the workflow that runs the adaptation."""
        return "adapt" if self.adds_expert else "adapt_dense"

    @property
    def model(self) -> str:
        """The folder that receives the weights."""
        return self.parent.name if self.adds_expert else self.name

    @property
    def expert(self) -> str:
        """The name of the adapted expert in that folder."""
        return self.domain if self.adds_expert else DENSE_EXPERT


def training_domains(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The training domains in the config's order."""
    return tuple(config["domains"]["training"])


def novel_domains(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The novel domains in the config's order."""
    return tuple(config["domains"].get("novel") or ())


def further_seeds(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The further seeds with which a run trains its models again."""
    return tuple(seed for seed in config.get("seeds") or () if seed != config["seed"])


def folder_of(row: str, seed: int, first: int) -> str:
    """The folder of the model of a row with `seed`, where the run's own seed is `first`."""
    return row if seed == first else f"{row}-seed{seed}"


def row_of(folder: str, config: Mapping[str, Any]) -> tuple[str, int]:
    """The row and the seed of the model in a folder of the run: the inverse of `folder_of`."""
    for seed in further_seeds(config):
        if folder.endswith(f"-seed{seed}"):
            return folder.removesuffix(f"-seed{seed}"), seed
    return folder, config["seed"]


def left_out(domain: str) -> str:
    """The label of the set of all experts but that of `domain`."""
    return f"minus-{domain}"


def one_more(domain: str) -> str:
    """The label of the set of the training experts and the added expert of `domain`."""
    return f"plus-{domain}"


def trained_without(domain: str) -> str:
    """The name of the model that is trained without `domain`."""
    return f"without-{domain}"


def adapted(row: str, domain: str) -> str:
    """The name of the adaptation of a row's model to `domain`."""
    return f"{row}-dapt-{domain}"


def model_rows(config: Mapping[str, Any]) -> dict[str, tuple[Kind, dict[str, Any]]]:
    """The rows of a completed config's `models` with the kind and section `training` of each, the paper's four first.

    A row with a seed phase has its parent's settings, and the keys `parent` and `seed_tokens` among them. A row whose
    parent is a folder has this folder as the key `initial`. Raises DemixError for a row of an unknown kind, where demix
    or dense is left out, and for a parent that does not fit.
    """
    given = config.get("models") or {}
    rows: dict[str, tuple[Kind, dict[str, Any]]] = {}
    for name in (*KINDS, *(name for name in given if name not in KINDS)):
        overrides = given.get(name, {})
        if overrides is None:
            if name in KEPT:
                raise DemixError(
                    f"config key models.{name}", "is null", "keep this row: other models are compared with it"
                )
            continue
        kind = overrides.get("kind") or name
        if kind not in KINDS:
            cause = f"is {kind!r}" if "kind" in overrides else "is missing"
            raise DemixError(f"config key models.{name}.kind", cause, f"use one of {', '.join(KINDS)}")
        if name in KINDS and kind != name:
            raise DemixError(f"config key models.{name}.kind", f"is {kind}", "use this kind in a row of another name")
        own = {key: value for key, value in overrides.items() if key != "kind"}
        if "/" in (own.get("parent") or ""):
            own["initial"] = own.pop("parent")
        rows[name] = (KINDS[kind], (config.get("training") or {}) | own)
    for name, (row_kind, settings) in rows.items():
        _check_seed_phase(name, row_kind, settings, rows)
        if parent := settings.get("parent"):
            own = {key: value for key, value in given[name].items() if key != "kind"}
            rows[name] = (row_kind, rows[parent][1] | own)
    return rows


def _check_seed_phase(
    name: str, kind: Kind, settings: Mapping[str, Any], rows: Mapping[str, tuple[Kind, dict[str, Any]]]
) -> None:
    """Raise DemixError unless the row `name` has no seed phase, or one that its kind and its parent allow."""
    key, parent = f"config key models.{name}", settings.get("parent")
    if "initial" in settings:
        if kind.domain_tokens or settings.get("seed_tokens") is not None:
            cause = "is a folder, whose model has no domain tokens and begins no seed phase"
            raise DemixError(f"{key}.parent", cause, "leave out seed_tokens, and choose another kind than domain_token")
        return
    if (parent is None) != (settings.get("seed_tokens") is None):
        missing, there = ("parent", "seed_tokens") if parent is None else ("seed_tokens", "parent")
        raise DemixError(f"{key}.{missing}", f"is missing beside {there}", "give both, or neither")
    if parent is None:
        return
    cure = f"name one of {', '.join(row for row, (kind, _) in rows.items() if kind == KINDS['dense'])}"
    if kind.batches != "by_domain":
        raise DemixError(f"{key}.parent", f"is given to a row of kind {kind.name}", "use kind: demix, or leave it out")
    if parent not in rows:
        raise DemixError(f"{key}.parent", f"is {parent}, which is no row of models", cure)
    if rows[parent][0] != KINDS["dense"]:
        cause = f"is {parent} of kind {rows[parent][0].name}, which draws other blocks or has other parameters"
        raise DemixError(f"{key}.parent", cause, cure)
    if settings["seed_tokens"] > rows[parent][1]["tokens"]:
        cause = f"is {settings['seed_tokens']}, more than the {rows[parent][1]['tokens']} tokens of {parent}"
        raise DemixError(f"{key}.seed_tokens", cause, "lower it")


def planned(config: Mapping[str, Any]) -> tuple[Model, ...]:
    """All models of a run of a completed config.

    The order is: rows of `models` with the run's own seed, models trained without a domain, rows with further seeds,
    models made by Dense-DAPT.
    """
    training, novel = training_domains(config), novel_domains(config)
    first = [
        # Single columns are neither mixed nor chosen, so that nothing reads their scores on dev.
        Model(
            name,
            name,
            name,
            kind,
            config["seed"],
            training,
            training + novel,
            settings=settings,
            splits=("dev", "test") if kind.has_experts or kind.domain_tokens else ("test",),
            parent=settings.get("parent", ""),
        )
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
        replace(
            model,
            name=folder_of(model.row, seed, config["seed"]),
            seed=seed,
            parent=model.parent and folder_of(model.parent, seed, config["seed"]),
        )
        for seed in further_seeds(config)
        for model in first
    ]
    made = [
        replace(
            adaptation.parent,
            name=adaptation.name,
            row=adaptation.name,
            domains=(adaptation.domain,),
            scored=(*training, adaptation.domain),
            splits=("test",),
            settings=config.get("adaptation") or {},
            parent=adaptation.parent.name,
            adapted_to=adaptation.domain,
        )
        for adaptation in _adaptations(config, first)
        if not adaptation.adds_expert
    ]
    return (*first, *without, *again, *made)


def trained(config: Mapping[str, Any]) -> tuple[Model, ...]:
    """The models that a run trains from scratch, or from a seed."""
    return tuple(model for model in planned(config) if not model.adapted_to)


def seeds(config: Mapping[str, Any], context: int) -> dict[tuple[str, int], Model]:
    """The parents of seed phases by folder and number of updates, with blocks of `context` tokens."""
    models = {model.name: model for model in trained(config)}
    begun = {(model.parent, model.seed_step(context)) for model in models.values()}
    return {(parent, step): models[parent] for parent, step in sorted(begun) if step}


def adaptations(config: Mapping[str, Any]) -> tuple[Adaptation, ...]:
    """The adaptations of a run: for each novel domain DEMix-DAPT, then Dense-DAPT."""
    return _adaptations(config, [model for model in trained(config) if model.name == model.row])


def adapted_model(config: Mapping[str, Any]) -> Model:
    """The model that receives the experts of novel domains."""
    return next(model for model in trained(config) if model.name == _adapted_row(config))


def removal_model(config: Mapping[str, Any]) -> Model:
    """The model whose experts are left out, and which is trained again without single domains."""
    name = (config.get("removal") or {}).get("model") or "demix"
    return next(model for model in trained(config) if model.name == name)


def dense_adapted_row(config: Mapping[str, Any]) -> str:
    """The row of `models` that Dense-DAPT adapts."""
    return (config.get("adaptation") or {}).get("dense") or "dense"


def learning_rate_factor(config: Mapping[str, Any], parent: Model) -> float:
    """The learning rate of the adaptation of `parent`, as a fraction of that of the parent's training."""
    factor = config["adaptation"]["learning_rate_factor"]
    return float(factor["demix" if parent.kind.has_experts else "dense"] if isinstance(factor, dict) else factor)


def _adapted_row(config: Mapping[str, Any]) -> str:
    return (config.get("adaptation") or {}).get("model") or "demix"


def _adaptations(config: Mapping[str, Any], rows: list[Model]) -> tuple[Adaptation, ...]:
    dense = _row(rows, dense_adapted_row(config), "adaptation.dense", experts=False)
    parents = (_row(rows, _adapted_row(config), "adaptation.model"), dense)
    return tuple(
        Adaptation(adapted(parent.row, novel), novel, parent) for novel in novel_domains(config) for parent in parents
    )


def _row(models: list[Model], name: str, key: str, *, experts: bool = True) -> Model:
    """The model of the row that a config key names; `experts` says whether the model must have experts."""
    fitting = [model for model in models if model.kind.has_experts == experts]
    for model in fitting:
        if model.name == name:
            return model
    names = ", ".join(model.name for model in fitting)
    raise DemixError(f"config key {key}", f"is {name}, which is no such row of models", f"name one of {names}")
