"""The table of the models of a run, which rules, plan, evaluation, report and tracking read.

Each row of the config's `models` is trained once per seed. One row is also trained without each domain that `removal`
names, and `adaptation` makes experts or models out of rows. Each trained model is a `Model` here and each adaptation an
`Adaptation`. Only this module makes and parses names of models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from demix.config.rows import (
    DENSE_EXPERT,
    Kind,
    by_domain,
    is_masked,
    learned,
    model_rows,
    novel_domains,
    training_domains,
)
from demix.errors import DemixError, nearest


@dataclass(frozen=True)
class Model:
    """A trained model, with the folder models/<name> and the metrics metrics/<name>.jsonl.

    `row` is the model's name in results, the same for every seed. `base` is the row of the config's `models` that
    configures the training. `domains` are the domains that the model learns from, in order. `settings` are the config's
    section `training` with the row's own values, or for an adapted model the section `adaptation`. `removed` is the
    domain that the model is trained without, and `replacement` the novel domain in its place. `parent` is the folder of
    the model that this one goes on from: with a seed phase (docs/concepts.md), or adapted to the novel domain
    `adapted_to`. `scored` are the domains that the model is scored on, `splits` the splits of these domains. A model
    whose experts are whole models has one training per expert (`parts`), in the folder branches/<name>/<part>: `share`
    trainings with equal shares of the tokens. A model that learns from clusters of the clustering `data` has them as
    its `domains`, with equal parts of a step's sequences. `routing` is the clustering whose distances can weight the
    model's experts, if there is one. With `masked` it is a masked language model, whose experts no text weights.
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
    replacement: str = ""
    parent: str = ""
    adapted_to: str = ""
    data: str = ""
    routing: str = ""
    part: str = ""
    share: int = 1
    masked: bool = False

    @property
    def parts(self) -> tuple["Model", ...]:
        """The trainings of the model: one of all its experts, or one for each expert that is a whole model."""
        if self.kind.expert_scope != "model":
            return (self,)
        share = len(self.domains)
        parts = tuple(replace(self, domains=(name,), part=name, share=share) for name in self.domains)
        if not self.removed:
            return parts
        # Nothing but its own domain reaches an expert, so the base has trained all experts but the replacement.
        return tuple(part if part.part == self.replacement else replace(part, name=self.base) for part in parts)

    @property
    def jobs(self) -> tuple[tuple["Model", ...], ...]:
        """The parts that are trained for this model, as the jobs that train them one after the other."""
        own = tuple(part for part in self.parts if part.name == self.name)
        size = int(self.settings.get("experts_per_job", 1))
        return tuple(own[first : first + size] for first in range(0, len(own), size))

    @property
    def place(self) -> str:
        """The training's name in paths of its checkpoints, its metrics and its log."""
        return f"{self.name}/{self.part}" if self.part else self.name

    @property
    def folder(self) -> str:
        """The folder of the run in which the training leaves its model."""
        return f"{'branches' if self.part else 'models'}/{self.place}"

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
        return self.place.replace("-", "_").replace("/", "__")

    @property
    def rates_from(self) -> str:
        """The row whose sweep chooses the model's learning rate: a branch goes on with the schedule of its parent."""
        return str(self.settings.get("parent", self.base))

    @property
    def sweeps(self) -> bool:
        """Whether the model has a sweep of its own; further seeds, branches and removals take that of another."""
        return self.name == self.rates_from and bool(self.settings["sweep"])

    def step_tokens(self, context: int) -> int:
        """The tokens of one optimizer step of all parts together with blocks of `context` tokens."""
        return int(len(self.domains) * self.share * self.settings["sequences"] * context)

    @property
    def restarts(self) -> bool:
        """Whether the model takes its parent's parameters alone, with settings and a schedule of its own."""
        return bool(self.parent and self.settings.get("schedule") == "restart")

    def parent_step_tokens(self, context: int) -> int:
        """The tokens of one optimizer step of the model's parent."""
        of_parent = self.settings.get("seed_sequences")
        return int(of_parent) * context if of_parent else self.step_tokens(context)

    def seed_step(self, context: int) -> int:
        """The number of its parent's updates with which the model begins; 0 for one that is trained from scratch."""
        return int(self.settings.get("seed_tokens", 0)) // self.parent_step_tokens(context) if self.parent else 0

    def first_step(self, context: int) -> int:
        """The number of updates, from the model's steps, that its seed phase stands for."""
        seen = self.seed_step(context) * self.parent_step_tokens(context) if self.parent else 0
        return -(-seen // self.step_tokens(context))


def job_place(job: tuple[Model, ...]) -> str:
    """The folder, below those of checkpoints, in which a job of `Model.jobs` is found again."""
    return job[0].place + (f"-and-{len(job) - 1}-more" if job[1:] else "")


def rule_of(job: tuple[Model, ...]) -> str:
    """The rule of the workflow that does a job of `Model.jobs`."""
    return f"train_{job[0].rule}" + (f"__and_{len(job) - 1}_more" if job[1:] else "")


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


def made_of(model: str, weights: str) -> str:
    """The folder of what is made of the experts of a model by `weights` (`demix.config.merged`).

    {domain} stands for the domain of a prior.
    """
    return f"{model}-{'average-{domain}' if weights == 'posterior' else weights}"


def trained(config: Mapping[str, Any]) -> tuple[Model, ...]:
    """The models that a run of a completed config trains from scratch, or from a seed.

    The order is: rows of `models` with the run's own seed, models trained without a domain, rows with further seeds.
    """
    training, novel = training_domains(config), novel_domains(config)
    first = [
        Model(
            name,
            name,
            name,
            kind,
            config["seed"],
            learned(config, settings),
            training + novel,
            settings=settings,
            # Single columns are neither mixed nor chosen, so that nothing reads their scores on dev.
            splits=("dev", "test") if kind.has_experts or kind.domain_tokens else ("test",),
            parent=settings.get("parent", ""),
            data=settings.get("data", ""),
            routing=(settings.get("data") or by_domain(config))
            if kind.has_experts and not is_masked(config, settings)
            else "",
            masked=is_masked(config, settings),
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
            routing="",
            replacement=removal["replacement"],
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
    return (*first, *without, *again)


def planned(config: Mapping[str, Any]) -> tuple[Model, ...]:
    """All models of a run of a completed config: those that it trains, then those made by Dense-DAPT."""
    known, training = trained(config), training_domains(config)
    made = [
        replace(
            adaptation.parent,
            name=adaptation.name,
            row=adaptation.name,
            domains=(adaptation.domain,),
            scored=(*training, adaptation.domain),
            splits=("test",),
            settings=adapted_settings(config, adaptation.parent),
            parent=adaptation.parent.name,
            adapted_to=adaptation.domain,
        )
        for adaptation in _adaptations(config, known)
        if not adaptation.adds_expert
    ]
    return (*known, *made)


def learned_splits(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The clusterings that models learn from, each with the splits that their trainings and their routers read."""
    models = [model for model in trained(config) if model.data]
    found = [(model.data, "train") for model in models]
    on_dev = [one for one in models if one.settings["dev_blocks"] or one.settings.get("merged_routed")]
    return tuple(dict.fromkeys(found + [(one.data, "dev") for one in on_dev]))


def seeds(config: Mapping[str, Any], context: int) -> dict[tuple[str, int], Model]:
    """The parents of seed phases by folder and number of updates, with blocks of `context` tokens."""
    models = {model.name: model for model in trained(config)}
    begun = {(model.parent, model.seed_step(context)) for model in models.values()}
    return {(parent, step): models[parent] for parent, step in sorted(begun) if step}


def adaptations(config: Mapping[str, Any]) -> tuple[Adaptation, ...]:
    """The adaptations of a run: for each novel domain DEMix-DAPT, then Dense-DAPT."""
    return _adaptations(config, trained(config))


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


def adapted_settings(config: Mapping[str, Any], parent: Model) -> dict[str, Any]:
    """The section `adaptation` for the adaptation of `parent`, with the parent's own options of `architecture`."""
    own = {key: parent.settings[key] for key in ("architecture",) if key in parent.settings}
    return {**(config.get("adaptation") or {})} | own


def _adapted_row(config: Mapping[str, Any]) -> str:
    return (config.get("adaptation") or {}).get("model") or "demix"


def _adaptations(config: Mapping[str, Any], known: Sequence[Model]) -> tuple[Adaptation, ...]:
    rows = [model for model in known if model.name == model.row and not model.removed]
    dense = _row(rows, dense_adapted_row(config), "adaptation.dense", experts=False)
    parents = (_row(rows, _adapted_row(config), "adaptation.model"), dense)
    return tuple(
        Adaptation(adapted(parent.row, novel), novel, parent) for novel in novel_domains(config) for parent in parents
    )


def _row(models: list[Model], name: str, key: str, *, experts: bool = True) -> Model:
    """The model of the row that a config key names; `experts` says whether the model must have experts."""
    fitting = [model for model in models if model.kind.has_experts == experts and not (model.data or model.masked)]
    for model in fitting:
        if model.name == name:
            return model
    cure = nearest(name, (model.name for model in fitting), "add a row to models")
    raise DemixError(f"config key {key}", f"is {name}, which is no such row of models", cure)
