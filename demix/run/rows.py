"""The entries of a run's models: what each is trained with, and which entries are refused."""

import dataclasses
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import Any

from demix.config.addresses import HUB, imported_folder, refuse_unnamable
from demix.config.architecture import Architecture, Options, architecture_from, with_options
from demix.config.clustering import cluster_names
from demix.config.config import Config
from demix.config.counts import training_flops_per_token
from demix.config.models import KEPT, KINDS, PAPER, EntrySettings, Kind
from demix.errors import DemixError, nearest
from demix.settings import names_of, settings_from, written

# The kinds of models whose experts become those of every layer.
MERGEABLE = ("demix", "branched", "anchored")
_SIZES = ("experts", "top_k", "every", "capacity", "balance")
# Of an entry of kind anchored: a parent's feedforward and an expert next to it, through which every token passes.
_PAIR = {"experts": 2, "top_k": 2, "every": 1, "capacity": 2.0, "balance": 0.0}


@dataclass(frozen=True)
class Row:
    """An entry of the config's `models`, with all that follows for its training.

    `settings` are those of the section `training` with the entry's own values. A warm-started entry has its parent's,
    and `parent` and `seed_tokens` among them; an entry that begins with a model elsewhere has its folder as `initial`,
    and its address at the `hub` where it is imported from there. An entry that `mixes` begins with the merged experts
    of its parent and with a training of its own. `learned` are the domains or clusters that the entry learns from.
    `sequences` of each of these make a step, and `seed_sequences` in all made one of the parent where that is another
    number. `section` is what the config says of the architecture, as written. `label` is the entry's name in tables.
    """

    name: str
    kind: Kind
    settings: EntrySettings
    learned: tuple[str, ...]
    section: dict[str, Any] = dataclasses.field(hash=False)
    architecture: Architecture
    initial: str = ""
    seed_sequences: int = 0
    hub: str = ""
    mixes: bool = False
    label: str = ""

    @property
    def masked(self) -> bool:
        """Whether the entry is a masked language model."""
        return self.architecture.objective == "mlm"

    @property
    def options(self) -> dict[str, Any]:
        """The options of the architecture."""
        return {name: getattr(self.architecture, name) for name in names_of(Options)}


@dataclass(frozen=True)
class _Given:
    """What the config says of an entry: its own values, as written, and the section `training` with these values."""

    name: str
    kind: Kind
    own: dict[str, Any]
    settings: EntrySettings
    initial: str
    hub: str
    label: str


def rows_of(config: Config) -> dict[str, Row]:
    """The entries of a config's `models`, the paper's four first.

    Raises DemixError where demix or dense is left out, for a parent that does not fit, and for a label that two entries
    have.
    """
    given = {name: found for name in config.models if (found := _given(config, name))}
    _check_labels(given)
    return {name: _row(config, one, given) for name, one in given.items()}


def _check_labels(entries: Mapping[str, _Given]) -> None:
    """Raise DemixError for a label that is given to an entry of the paper, and for one that another entry has."""
    paper = {name: KINDS[name].label for name in PAPER}
    for name, entry in entries.items():
        key = f"config key models.{name}.label"
        others = {other: one.label for other, one in entries.items()} | paper
        if name in PAPER:
            if entry.label != paper[name]:
                raise DemixError(key, "is given to an entry of the paper, which has the paper's name", "leave it out")
        elif same := [other for other, label in others.items() if label == entry.label and other != name]:
            raise DemixError(key, f"is {entry.label}, which the entry {same[0]} is called, too", "choose another")


def _given(config: Config, name: str) -> _Given | None:
    """What the config says of the entry `name`; nothing where it leaves the entry out."""
    key, entry = f"config key models.{name}", config.models[name]
    if entry is None:
        if name in KEPT:
            raise DemixError(key, "is null", "keep this entry: other models are compared with it")
        return None
    own = written(entry)
    kind = KINDS[own.pop("kind")]
    label = own.pop("label", kind.label if name == kind.name else name)
    if name in PAPER and kind.name != name:
        raise DemixError(f"{key}.kind", f"is {kind.name}", "use this kind in an entry of another name")
    if kind.anchored:
        own = _PAIR | _restarts(own) | own
    elif kind.routed:
        own = _routed(key, own, _experts_of(config, own.get("parent")))
    initial = hub = ""
    parent = own.get("parent", "")
    if parent.startswith(HUB):
        hub, initial = own.pop("parent"), imported_folder(parent, config.run)
    elif "/" in parent:
        initial = own.pop("parent")
    settings = settings_from(EntrySettings, written(config.training) | own, key)
    return _Given(name, kind, own, settings, initial, hub, label)


def _experts_of(config: Config, parent: Any) -> int:
    """The experts of a merge of the entry `parent`, an anchor among them; 0 where its kind cannot be merged."""
    entry = config.models.get(parent)
    if entry is None or entry.kind not in MERGEABLE:
        return 0
    training, data = config.domains.training, entry.data
    learned: Sized = cluster_names(data, config.clusterings[data], training) if data in config.clusterings else training
    return len(learned) + int(entry.kind == "anchored")


def _routed(key: str, own: dict[str, Any], mixed: int) -> dict[str, Any]:
    """The keys of an entry of kind routed with their defaults; `mixed` are the experts of a parent that is merged.

    One that begins with the state of a dense parent restarts.
    """
    for size in ("experts", "every") if mixed else ():
        if size in own:
            raise DemixError(
                f"{key}.{size}", "is given together with a parent whose experts are merged", "leave it out"
            )
    few = {"experts": mixed or 8, "top_k": 2 if mixed else 1}
    sizes: dict[str, Any] = few | {"every": 1, "balance": 0.01, **own}
    begins = {} if mixed else _restarts(own)
    return {"capacity": 1.25 if sizes["top_k"] == 1 else 2.0} | begins | sizes


def _restarts(own: dict[str, Any]) -> dict[str, Any]:
    """The schedule of an entry with the keys `own`, where it begins with the state of another."""
    # A whole model has no schedule to go on with.
    return {"schedule": "restart"} if own.get("parent") and "/" not in own["parent"] else {}


def _row(config: Config, given: _Given, others: Mapping[str, _Given]) -> Row:
    """The entry of what a config says of it, checked against `others`."""
    name, kind, own, domains = given.name, given.kind, dict(given.own), len(config.domains.training)
    _check_state(given, others)
    values, sequences = written(given.settings), 0
    parent = given.settings.parent
    mixes = _mixes(given, others)
    if parent and "architecture" in own:
        cause = f"is given to an entry that begins with {parent}"
        raise DemixError(f"config key models.{name}.architecture", cause, "leave it out: it has its parent's")
    if parent and mixes:
        of_parent = written(others[parent].settings)
        values |= {"architecture": of_parent["architecture"]} if of_parent.get("architecture") else {}
    elif parent:
        values = written(others[parent].settings)
        if own.get("schedule") == "restart":
            values |= {"warmup": 0.0}
            sequences = domains * values["sequences"]
            # The entry's own rate replaces the one that its parent's sweep chooses.
            values |= {"sweep": None} if "learning_rate" in own else {}
        values |= own
    section = _section(config, values)
    architecture = _architecture(name, section)
    if kind.has_routers:
        if values["top_k"] == 1 and (parent or given.initial):
            cause = "is 1, and a parent's feedforward times a share of 1 of the experts is not the parent's"
            raise DemixError(f"config key models.{name}.top_k", cause, "use 2 or more, or leave out parent")
        values["tokens"] = _matched_tokens(architecture, config.tokenizer.size, values)
    learned = tuple(config.domains.training)
    if data := values.get("data"):
        _check_data(name, data, config)
        learned = cluster_names(data, config.clusterings[data], config.domains.training)
        step = domains * values["sequences"]
        if step % len(learned):
            fitting = ", ".join(str(k) for k in range(1, step + 1) if step % k == 0)
            cause = f"{data} of {len(learned)} clusters does not divide the {step} sequences of a step"
            cure = f"raise training.sequences, or make one of {fitting} clusters"
            raise DemixError(f"config key models.{name}.data", cause, cure)
        values["sequences"] = step // len(learned)
    settings = settings_from(EntrySettings, values, f"config key models.{name}")
    if kind.anchored and settings.weight_decay:
        cause = f"is {settings.weight_decay:g}, and the parent's feedforwards would decay too"
        raise DemixError(f"config key models.{name}.weight_decay", cause, "use 0")
    if settings.trained and not (mixes or given.initial):
        cause = "is given to an entry that begins with no routed experts"
        cure = f"give it a parent of kind {' or '.join(MERGEABLE)}, or leave it out"
        raise DemixError(f"config key models.{name}.trained", cause, cure)
    row = Row(
        name, kind, settings, learned, section, architecture, given.initial, sequences, given.hub, mixes, given.label
    )
    if row.masked:
        _check_masked(row)
    if settings.merged_routed and len(learned) < 2:
        cause = "is given to an entry of one expert, and tokens choose among several"
        raise DemixError(f"config key models.{name}.merged_routed", cause, "leave it out, or add a training domain")
    return row


def _section(config: Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """The config's section `architecture`, with the options and the routed experts of an entry with these `values`."""
    routed = {"routed": {key: values[key] for key in _SIZES}} if "every" in values else {}
    return with_options(written(config.architecture), values.get("architecture") or {}) | routed


def _architecture(name: str, section: Mapping[str, Any]) -> Architecture:
    """The architecture of the entry `name`. Raises DemixError where the entry's options do not fit the section."""
    try:
        return architecture_from(section)
    except DemixError as error:
        key = error.subject.removeprefix("architecture.routed.") if "routed" in section else error.subject
        raise error.but(f"config key models.{name}.{key}") from None


def _mixes(given: _Given, others: Mapping[str, _Given]) -> bool:
    """Whether an entry trains the merged experts of its parent."""
    parent = others.get(given.settings.parent or "")
    return bool(given.kind.routed and parent and parent.kind.name in MERGEABLE)


def _matched_tokens(architecture: Architecture, types: int, values: Mapping[str, Any]) -> int:
    """The tokens that cost the FLOPs of `tokens` of a dense model, those of a seed phase included."""
    tokens = int(values["tokens"])
    dense, routed = (training_flops_per_token(one, types, one.context) for one in (architecture.unrouted, architecture))
    seed = min(tokens, int(values.get("seed_tokens") or 0))
    return seed + int((tokens - seed) * dense / routed)


def _check_masked(row: Row) -> None:
    """Raise DemixError unless an entry, which is a masked language model, is independent of causal ones."""
    key = f"config key models.{row.name}"
    if row.name in PAPER:
        cause = "is mlm, and other entries are compared with this one by the text that it predicts"
        raise DemixError(f"{key}.architecture.objective", cause, "add an entry of another name, or leave this out")
    if row.kind.domain_tokens:
        cause = f"is {row.kind.name}, whose token precedes a text to go on with"
        raise DemixError(f"{key}.kind", cause, "use dense")
    for merged in ("averages", "merged_routed"):
        if getattr(row.settings, merged):
            cause = "is given to a masked model, whose experts are mixed by weights that no text decides"
            raise DemixError(f"{key}.{merged}", cause, "leave it out")
    if row.mixes:
        cause = "is a masked model, whose experts have no states of a text that goes on, by which tokens choose"
        raise DemixError(f"{key}.parent", cause, "use a causal entry")


def _check_data(name: str, data: str, config: Config) -> None:
    """Raise DemixError unless the entry `name` can learn from the clustering `data`."""
    key, known = f"config key models.{name}.data", config.clusterings
    if data not in known:
        raise DemixError(key, f"{data} is not a clustering", nearest(data, known, "add it to clusterings"))
    if known[data].method == "metadata":
        raise DemixError(key, f"is {data}, whose clusters are the domains", "leave it out")
    if name in PAPER:
        raise DemixError(key, f"is given to the entry {name}", "add an entry of another name")


def _check_state(given: _Given, others: Mapping[str, _Given]) -> None:
    """Raise DemixError unless an entry begins with no state, or with one that its kind and its parent allow."""
    key, kind, settings = f"config key models.{given.name}", given.kind, given.settings
    parent, seed_tokens = settings.parent, settings.seed_tokens
    if kind.anchored and not (parent or given.initial):
        cause = "is missing, and experts of kind anchored learn next to a model that stays as it is"
        raise DemixError(f"{key}.parent", cause, "name an entry of kind dense and seed_tokens, or a model's folder")
    if settings.schedule is not None and parent is None:
        cause = "is given to an entry that begins with no state of another entry"
        raise DemixError(f"{key}.schedule", cause, "leave it out, or give parent and seed_tokens")
    if given.initial:
        refuse_unnamable(given.initial)
        if seed_tokens is not None:
            raise DemixError(f"{key}.parent", "is a folder, whose model has no warm start", "leave out seed_tokens")
        return
    if parent and _mixes(given, others):
        if seed_tokens is not None:
            named = f"{parent} of kind {others[parent].kind.name}"
            cause = f"is given together with the parent {named}, whose whole training comes before"
            raise DemixError(f"{key}.seed_tokens", cause, "leave it out")
        return
    if (parent is None) != (seed_tokens is None):
        missing, there = ("parent", "seed_tokens") if parent is None else ("seed_tokens", "parent")
        raise DemixError(f"{key}.{missing}", f"is missing next to {there}", "give both, or neither")
    if parent is not None:
        _check_parent(given, others)


def _check_parent(given: _Given, others: Mapping[str, _Given]) -> None:
    """Raise DemixError unless the kind of an entry and its parent, an entry of kind dense, allow its seed phase."""
    key, kind, settings = f"config key models.{given.name}", given.kind, given.settings
    name, restarts = settings.parent or "", settings.schedule == "restart"
    if kind.batches != "by_domain" and not restarts:
        cause = f"is given to an entry of kind {kind.name}"
        raise DemixError(f"{key}.parent", cause, "use kind: demix, add schedule: restart, or leave it out")
    dense = {one.name: one for one in others.values() if one.kind == KINDS["dense"] and one.settings.parent is None}
    if name not in dense:
        cure = nearest(name, dense, "add an entry of kind dense")
        raise DemixError(f"{key}.parent", f"is {name}, no dense model that trains from scratch", cure)
    parent = dense[name]
    if settings.seed_tokens > parent.settings.tokens:
        cause = f"is {settings.seed_tokens}, more than the {parent.settings.tokens} tokens of {name}"
        raise DemixError(f"{key}.seed_tokens", cause, "lower it")
    if restarts and settings.sweep and settings.sweep != parent.settings.sweep:
        cause = "is given to an entry that restarts, whose trials would begin with no state"
        raise DemixError(f"{key}.sweep", cause, "give the entry a learning_rate")
