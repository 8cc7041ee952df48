"""The models that a run trains: one per model entry, seed and removed domain, and the adapted models.

Only this module forms and parses names of models.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from demix.config.architecture import Architecture
from demix.config.config import Config
from demix.config.models import DENSE_EXPERT, EntrySettings, Kind
from demix.errors import DemixError, nearest
from demix.run.rows import Row


@dataclass(frozen=True)
class Model:
    """A trained model, with the folder models/<name> and the metrics metrics/<name>.jsonl.

    `row` is the model's name in results, the same for every seed. `base` is the model entry that configures the
    training. `domains` are the domains on which the model trains, in order. `removed` is the domain that the model is
    trained without, and `replacement` the novel domain in its place. `parent` is the folder of the model from which
    this one starts: by a dense warm start (docs/explanation/warm-start.md), or by adaptation to the novel domain
    `adapted_to`. `scored` are the domains on which the model is scored, `splits` the splits of these domains. A model
    whose experts are whole models has one training per expert (`parts`), in the folder branches/<name>/<part>; these
    are `share` trainings with equal shares of the tokens. If a model trains on clusters (`data`), they are its
    `domains`, and each has the same number of a step's sequences. `routing` is the clustering whose distances can
    weight the model's experts, if there is one.
    """

    name: str
    row: str
    base: Row
    seed: int
    domains: tuple[str, ...]
    scored: tuple[str, ...]
    splits: tuple[str, ...] = ("dev", "test")
    removed: str = ""
    replacement: str = ""
    parent: str = ""
    adapted_to: str = ""
    routing: str = ""
    part: str = ""
    share: int = 1

    @property
    def kind(self) -> Kind:
        """The model type: how the model is built, and which text it trains on."""
        return self.base.kind

    @property
    def label(self) -> str:
        """The model's name in tables and figures."""
        if self.removed:
            return f"{self.base.label} without {self.removed}"
        if self.adapted_to:
            return f"{self.base.label} adapted to {self.adapted_to}"
        return self.base.label if self.name == self.row else f"{self.base.label}, random seed {self.seed}"

    @property
    def settings(self) -> EntrySettings:
        """The config's section `training` with the entry's own values."""
        return self.base.settings

    @property
    def architecture(self) -> Architecture:
        """The sizes and options of the decoder."""
        return self.base.architecture

    @property
    def masked(self) -> bool:
        """Whether it is a masked language model, whose experts cannot be weighted by the text."""
        return self.base.masked

    @property
    def continues(self) -> bool:
        """Whether it can continue any text. Domain-token models cannot without a token, masked models never."""
        return not (self.kind.domain_tokens or self.masked)

    @property
    def data(self) -> str:
        """The clustering on whose clusters the model trains; empty if it trains on domains."""
        return self.settings.data or ""

    @property
    def read_splits(self) -> tuple[str, ...]:
        """The splits that the training reads; dev only if the model is evaluated while it trains."""
        return ("train", "dev") if self.settings.dev_blocks else ("train",)

    @property
    def in_parts(self) -> bool:
        """Whether each expert is a whole model with its own training; the experts are joined afterwards."""
        return self.kind.expert_scope == "model"

    @property
    def parts(self) -> tuple["Model", ...]:
        """The trainings of the model: one of all its experts, or one for each expert that is a whole model."""
        if not self.in_parts:
            return (self,)
        share = len(self.domains)
        parts = tuple(replace(self, domains=(name,), part=name, share=share) for name in self.domains)
        if not self.removed:
            return parts
        # An expert trains only on its own domain, so only the replacement's expert is missing in the base model.
        return tuple(part if part.part == self.replacement else replace(part, name=self.base.name) for part in parts)

    @property
    def trainings(self) -> tuple["Model", ...]:
        """The parts that are trained for this model, one job each."""
        return tuple(part for part in self.parts if part.name == self.name)

    @property
    def place(self) -> str:
        """The name of the training in the paths of its checkpoints, metrics and log."""
        return f"{self.name}/{self.part}" if self.part else self.name

    @property
    def folder(self) -> str:
        """The folder of the run to which the training writes its model."""
        return f"{'branches' if self.part else 'models'}/{self.place}"

    @property
    def experts(self) -> tuple[str, ...]:
        """The experts that the training produces, in order."""
        return self.domains if self.kind.has_experts else (DENSE_EXPERT,)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the model's score tables: its experts, or its domain tokens."""
        return self.domains if self.kind.domain_tokens else self.experts

    @property
    def rates_from(self) -> str:
        """The entry whose sweep chooses the model's learning rate. A branch continues its parent's schedule."""
        return (not self.base.mixes and self.settings.parent) or self.base.name

    @property
    def mixes(self) -> str:
        """The folder in models/ of the merged experts from which the model starts; empty if it starts from none."""
        return made_of(self.parent, "routed") if self.base.mixes else ""

    @property
    def sweeps(self) -> bool:
        """Whether the model has a sweep of its own. Further seeds, branches and removals use another model's sweep."""
        return self.name == self.rates_from and bool(self.settings.sweep)

    @property
    def step_tokens(self) -> int:
        """The tokens of one optimizer step of all parts together."""
        return len(self.domains) * self.share * self.settings.sequences * self.architecture.context

    @property
    def updates(self) -> int:
        """The optimizer steps of the training, including those of a dense warm start."""
        return self.settings.tokens // self.step_tokens

    @property
    def restarts(self) -> bool:
        """Whether the model starts from only its parent's parameters, with its own settings and schedule."""
        return bool(self.parent and self.settings.schedule == "restart")

    @property
    def parent_step_tokens(self) -> int:
        """The tokens of one optimizer step of the model's parent."""
        return self.base.seed_sequences * self.architecture.context or self.step_tokens

    @property
    def seed_step(self) -> int:
        """The number of its parent's updates after which the model starts; 0 if it is trained from scratch."""
        return (self.settings.seed_tokens or 0) // self.parent_step_tokens if self.parent else 0

    @property
    def first_step(self) -> int:
        """The number of the model's own steps to which its dense warm start corresponds."""
        return -(-self.seed_step * self.parent_step_tokens // self.step_tokens)

    @property
    def swept_rates(self) -> list[str]:
        """The learning rates that the model's sweep tries, as in file names; empty without a sweep."""
        return [repr(rate) for rate in self.settings.sweep.learning_rates] if self.settings.sweep else []


@dataclass(frozen=True)
class AdaptationJob:
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
        """The folder to which the parameters are written."""
        return self.parent.name if self.adds_expert else self.name

    @property
    def expert(self) -> str:
        """The name of the adapted expert in that folder."""
        return self.domain if self.adds_expert else DENSE_EXPERT


def folder_of(row: str, seed: int, first: int) -> str:
    """The folder of an entry's model with random seed `seed`; `first` is the run's own seed."""
    return row if seed == first else f"{row}-seed{seed}"


def left_out(domain: str) -> str:
    """The label of the set of all experts except the expert of `domain`."""
    return f"minus-{domain}"


def one_more(domain: str) -> str:
    """The label of the set of the training experts and the added expert of `domain`."""
    return f"plus-{domain}"


def trained_without(domain: str) -> str:
    """The name of the model that is trained without `domain`."""
    return f"without-{domain}"


def adapted(row: str, domain: str) -> str:
    """The name of the adaptation of an entry's model to `domain`."""
    return f"{row}-dapt-{domain}"


def kept_next_to(row: str, domain: str) -> str:
    """The name in results of an entry's model that is kept together with its adaptation to `domain`."""
    return f"{row}-and-dapt-{domain}"


def made_of(model: str, weights: str) -> str:
    """The folder of the model that is merged from a model's experts by `weights` (`Merged`).

    {domain} stands for the domain of a prior.
    """
    return f"{model}-{'average-{domain}' if weights == 'posterior' else weights}"


def folder_at(model: str, context: int = 0, top_k: int = 0, without: str = "") -> str:
    """The folder of a model's score tables with context length `context` and `top_k` experts per token and layer.

    0 means the value of training. If `without` names an expert, no token uses it.
    """
    of_tokens = (f"@{context}" if context else "") + (f"@top-{top_k}" if top_k else "")
    return model + of_tokens + (f"@{left_out(without)}" if without else "")


def trained_models(config: Config, rows: dict[str, Row]) -> tuple[Model, ...]:
    """The models that a run trains from scratch, or from a parent's state.

    The order is: entries with the run's own seed, models trained without a domain, entries with further seeds.
    """
    training, removal = tuple(config.domains.training), config.removal
    by_domain = next((name for name, made in config.clusterings.items() if made.method == "metadata"), "")
    seeds = (config.seed, *config.further_seeds)
    read = {name for system in config.evaluation.mixed.values() for name in system.models}
    mixed = {row for row in rows for one in seeds if folder_of(row, one, config.seed) in read}
    first = [
        Model(
            row.name,
            row.name,
            row,
            config.seed,
            row.learned,
            (*training, *config.domains.novel),
            # With a single column there is nothing to mix or choose, so dev scores are not needed.
            splits=("dev", "test")
            if row.kind.has_experts or row.kind.domain_tokens or row.name in mixed
            else ("test",),
            parent=row.settings.parent or "",
            routing=(row.settings.data or by_domain) if row.kind.has_experts and not row.masked else "",
        )
        for row in rows.values()
    ]
    whole = row_named(first, removal.model, "removal.model")
    without = [_without(whole, removed, removal.replacement or "") for removed in removal.retrain_without]
    again = [
        replace(
            model,
            name=folder_of(model.row, seed, config.seed),
            seed=seed,
            parent=model.parent and folder_of(model.parent, seed, config.seed),
        )
        for seed in config.further_seeds
        for model in first
    ]
    return (*first, *without, *again)


def _without(whole: Model, removed: str, replacement: str) -> Model:
    """The model that is trained as `whole` without the domain `removed`, and with `replacement` in its place."""
    return replace(
        whole,
        name=trained_without(removed),
        row=trained_without(removed),
        domains=tuple(replacement if name == removed else name for name in whole.domains),
        scored=(removed,),
        removed=removed,
        routing="",
        replacement=replacement,
    )


def adaptations_of(config: Config, models: Iterable[Model]) -> tuple[AdaptationJob, ...]:
    """The adaptations of a run with these trained `models`: for each novel domain DEMix-DAPT, then Dense-DAPT."""
    rows = [model for model in models if model.name == model.row and not model.removed]
    adaptation = config.adaptation
    dense = row_named(rows, adaptation.dense, "adaptation.dense", experts=False)
    parents = (row_named(rows, adaptation.model, "adaptation.model"), dense)
    return tuple(
        AdaptationJob(adapted(parent.row, novel), novel, parent) for novel in config.domains.novel for parent in parents
    )


def dense_adapted(adaptation: AdaptationJob, training: tuple[str, ...]) -> Model:
    """The model that Dense-DAPT makes."""
    return replace(
        adaptation.parent,
        name=adaptation.name,
        row=adaptation.name,
        domains=(adaptation.domain,),
        scored=(*training, adaptation.domain),
        splits=("test",),
        parent=adaptation.parent.name,
        adapted_to=adaptation.domain,
    )


def row_named(models: Iterable[Model], name: str, key: str, *, experts: bool = True) -> Model:
    """The model of the entry that a config key names; `experts` says whether it must have experts."""
    fitting = [model for model in models if model.kind.has_experts == experts and not (model.data or model.masked)]
    for model in fitting:
        if model.name == name:
            return model
    cure = nearest(name, (model.name for model in fitting), "add an entry to models")
    wanted = "with an expert per domain" if experts else "without experts"
    raise DemixError(f"config key {key}", f"is {name}, which is not a causal entry {wanted}", cure)


# The expert names of a merged model, which is a single model.
MERGED = (DENSE_EXPERT,)


@dataclass(frozen=True)
class Merged:
    """A model that is merged from the experts of `model`, by `weights`.

    It is the experts' average with equal weights (uniform) or with the cached prior of a domain (posterior), or a
    token-routed model (routed). `place` is its folder below models/ and scores/, in which {domain} stands for the
    domain of the prior.
    """

    model: Model
    weights: str

    @property
    def place(self) -> str:
        """The folder of the merged model: one per domain if the weights are a domain's prior, else one."""
        return made_of(self.model.name, self.weights)

    @property
    def token_routed(self) -> bool:
        """Whether it is token-routed; otherwise it is an average of the experts."""
        return self.weights == "routed"

    @property
    def by_domain(self) -> bool:
        """Whether there is one merged model per domain."""
        return self.weights == "posterior"

    def of(self, domain: str) -> str:
        """The folder of the merged model that is scored on `domain`."""
        return self.place.format(domain=domain)

    @property
    def architecture(self) -> Architecture:
        """The architecture of the merged model."""
        own = self.model.architecture
        return own.merged_routed(len(self.choices)) if self.token_routed else own

    @property
    def choices(self) -> tuple[str, ...]:
        """The experts that were merged; an anchor comes first."""
        return (DENSE_EXPERT,) * self.model.kind.anchored + self.model.experts


def merged_models(models: Iterable[Model]) -> tuple[Merged, ...]:
    """The merged models that are scored: averages (for entries with `averages`), and anchored experts with a router."""
    found = []
    for model in models:
        found += [Merged(model, weights) for weights in ("uniform", "posterior") if model.settings.averages]
        found += [Merged(model, "routed")] * model.kind.anchored
    return tuple(found)
