"""The rows of a run's models: what each is trained with, and which rows are refused."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from demix.config.addresses import refuse_unnamable
from demix.config.architecture import Architecture, Options, architecture_from, row_section
from demix.config.clustering import cluster_names
from demix.config.config import Config
from demix.config.counts import training_flops_per_token
from demix.config.models import KEPT, KINDS, PAPER, Kind, RowSettings, TokenRouting
from demix.config.parents import HubParent
from demix.errors import DemixError, nearest
from demix.settings import names_of, settings_from, written

# The kinds of rows whose experts become those of every layer.
MERGEABLE = ("demix", "branched", "anchored")
_SIZES = ("experts", "top_k", "every", "capacity", "balance")
# Of a row of kind anchored: a parent's feedforward and an expert beside it, through both of which every token passes.
_PAIR = {"experts": 2, "top_k": 2, "every": 1, "capacity": 2.0, "balance": 0.0, "match": "flops"}
# The kinds to which a key may be given.
_KEPT = {
    "averages": ("branched",),
    "merged_routed": MERGEABLE,
    "trained": ("routed",),
}


@dataclass(frozen=True)
class Row:
    """A row of the config's `models`, with all that follows for its training.

    `settings` are those of the section `training` with the row's own values. A row with a seed phase has its parent's,
    and `parent` and `seed_tokens` among them; a row whose parent is no row has its folder as `initial`, and its place
    at the `hub` where it is imported from there. A row that `mixes` begins with the merged experts of its parent and
    with a training of its own. `learned` are the domains or clusters that the row learns from.
    `sequences` of each of these make a step, and `seed_sequences` in all made one of the parent where that is another
    number. `section` is what the config says of the architecture, as written. `label` is the row's name in tables.
    """

    name: str
    kind: Kind
    settings: RowSettings
    learned: tuple[str, ...]
    section: dict[str, Any] = dataclasses.field(hash=False)
    architecture: Architecture
    initial: str = ""
    seed_sequences: int = 0
    hub: HubParent | None = None
    mixes: bool = False
    label: str = ""

    @property
    def masked(self) -> bool:
        """Whether the row is a masked language model."""
        return self.architecture.objective == "mlm"

    @property
    def options(self) -> dict[str, Any]:
        """The options of the architecture."""
        return {name: getattr(self.architecture, name) for name in names_of(Options)}


@dataclass(frozen=True)
class _Given:
    """What the config says of a row: its own values, as written, and the section `training` with these values."""

    name: str
    kind: Kind
    own: dict[str, Any]
    settings: RowSettings
    initial: str
    hub: HubParent | None
    label: str


def rows_of(config: Config) -> dict[str, Row]:
    """The rows of a config's `models`, the paper's four first.

    Raises DemixError for a row of an unknown kind, where demix or dense is left out, for a parent that does not fit,
    and for a label that two rows have.
    """
    given = {name: found for name in config.models if (found := _given(config, name))}
    rows = {name: _row(config, one, given) for name, one in given.items()}
    labels = {name: one.label or _made_label(config, one, rows[name]) for name, one in given.items()}
    return {name: dataclasses.replace(row, label=_own_label(given[name], labels)) for name, row in rows.items()}


def _made_label(config: Config, given: _Given, row: Row) -> str:
    """A name of a row made of what it says: its family, its clusters, and how it begins and differs from others."""
    kind, own, settings = row.kind, given.own, row.settings
    if row.name == kind.name:
        return kind.label
    parts = ["c-BTM" if settings.data and kind.expert_scope == "model" else kind.label]
    if settings.data:
        made = config.clusterings[settings.data]
        how = "random " if made.method == "random" else "" if made.balanced else "unbalanced "
        parts.append(f"{len(row.learned)} {how}clusters")
    if kind.routed:
        parts.append(f"top-{settings.top_k}" + (f", every {settings.every} blocks" if settings.every != 1 else ""))
    if own.get("preset"):
        parts.append(f"{own['preset']}'s recipe")
    options = {**(own.get("architecture") or {})}
    if named := options.pop("preset", None):
        parts.append(f"{named}'s decoder")
    if given.initial:
        parts.append(f"from {given.initial.rpartition('/')[2]}")
    if row.mixes:
        parts[0] = f"BTX from {settings.parent_row}"
        parts += ["routers alone"] if settings.trained else []
    if settings.seed_tokens:
        parts.append(f"warm start {_short(settings.seed_tokens)}")
    if "tokens" in own:
        parts.append(f"{_short(own['tokens'])} tokens")
    parts += ["masked" if value == "mlm" else f"{name} {value}" for name, value in options.items()]
    return ", ".join(parts)


def _short(tokens: int) -> str:
    """A number of tokens in three digits: 350000 is 350k."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return str(tokens)


def _own_label(given: _Given, labels: Mapping[str, str]) -> str:
    """The label of a row among the `labels` of all. A made one that another row has, too, has the row's name besides.

    Raises DemixError for a given one that another row or a row of the paper has, and for one of a row of the paper.
    """
    key, label = f"config key models.{given.name}.label", labels[given.name]
    paper = {name: KINDS[name].label for name in PAPER if name != given.name}
    others = {name: other for name, other in {**paper, **labels}.items() if name != given.name}
    if given.label and given.name in PAPER:
        raise DemixError(key, "is given to a row of the paper, which has the paper's name", "leave it out")
    if label not in others.values():
        return label
    if given.label:
        other = next(name for name, one in others.items() if one == label)
        raise DemixError(key, f"is {label}, which the row {other} is called, too", "choose another")
    return label if given.name in PAPER else f"{label}, {given.name}"


def _given(config: Config, name: str) -> _Given | None:
    """What the config says of the row `name`; nothing where it leaves the row out."""
    key, row = f"config key models.{name}", config.models[name]
    if row is None:
        if name in KEPT:
            raise DemixError(key, "is null", "keep this row: other models are compared with it")
        return None
    own = written(row)
    named, label = own.pop("kind", None), own.pop("label", "")
    kind = KINDS.get(named or name)
    if kind is None:
        raise DemixError(f"{key}.kind", "is missing", f"use one of {', '.join(KINDS)}")
    if name in PAPER and kind.name != name:
        raise DemixError(f"{key}.kind", f"is {kind.name}", "use this kind in a row of another name")
    foreign = [one for one in own if one in names_of(TokenRouting)]
    if foreign and not kind.routed:
        cause = f"is given to a row of kind {kind.name}"
        raise DemixError(f"{key}.{foreign[0]}", cause, "use kind: routed, or leave it out")
    if kind.anchored:
        own = _PAIR | _restarts(own) | own
    elif kind.routed:
        own = _routed(own, _experts_of(config, own.get("parent")))
    initial, hub, parent = "", None, own.get("parent")
    if isinstance(parent, dict):
        hub = settings_from(HubParent, own.pop("parent"), f"{key}.parent")
        initial = hub.folder(config.run)
    elif parent and "/" in parent:
        initial = own.pop("parent")
    settings = settings_from(RowSettings, written(config.training) | own, key)
    return _Given(name, kind, own, settings, initial, hub, label)


def _experts_of(config: Config, parent: Any) -> int:
    """The experts of a merge of the row `parent`, an anchor among them; 0 where it is of no kind that can be merged."""
    row = config.models.get(parent) if isinstance(parent, str) else None
    kind = "" if row is None else written(row).get("kind") or parent
    if kind not in MERGEABLE:
        return 0
    training, data = config.domains.training, written(row).get("data")
    learned = cluster_names(data, config.clusterings[data], training) if data in config.clusterings else training
    return len(learned) + (kind == "anchored")


def _routed(own: dict[str, Any], mixed: int) -> dict[str, Any]:
    """The keys of a row of kind routed with their defaults; `mixed` are the experts of a parent that is merged, if any.

    One that begins with the state of a dense parent restarts, unless it says otherwise.
    """
    few = {"experts": mixed or 8, "top_k": 2 if mixed else 1}
    sizes: dict[str, Any] = few | {"every": 1, "balance": 0.01, "match": "flops", **own}
    begins = {} if mixed else _restarts(own)
    return {"capacity": 1.25 if sizes["top_k"] == 1 else 2.0} | begins | sizes


def _restarts(own: dict[str, Any]) -> dict[str, Any]:
    """The schedule of a row with the keys `own`, where it begins with the state of another."""
    parent = own.get("parent")
    # A whole model has no schedule to go on with.
    return {"schedule": "restart"} if isinstance(parent, str) and "/" not in parent else {}


def _row(config: Config, given: _Given, others: Mapping[str, _Given]) -> Row:
    """The row of what a config says of it, checked against `others`."""
    name, kind, own, domains = given.name, given.kind, dict(given.own), len(config.domains.training)
    _check_state(given, others)
    values, sequences = written(given.settings), 0
    parent = given.settings.parent_row
    mixes = _mixes(given, others)
    if parent and mixes:
        of_parent = written(others[parent].settings)
        _check_options(given, parent, _section(config, of_parent))
        values |= {"architecture": of_parent["architecture"]} if of_parent.get("architecture") else {}
    elif parent:
        values = written(others[parent].settings)
        _check_options(given, parent, _section(config, values))
        own.pop("architecture", None)
        if own.get("schedule") == "restart":
            values |= {"warmup": 0.0}
            sequences = domains * values["sequences"]
            # The row's own rate takes the place of the one that its parent's sweep chooses.
            values |= {"sweep": None} if "learning_rate" in own else {}
        values |= own
    section = _section(config, values)
    architecture = _architecture(name, section)
    if kind.has_routers:
        _check_routed(name, values, given.initial)
        if mixes:
            _check_mixed(name, values, _experts_of(config, parent))
        values["tokens"] = _matched_tokens(architecture, config.tokenizer.size, values)
    learned = tuple(config.domains.training)
    if data := values.get("data"):
        _check_data(name, kind, data, config)
        learned = cluster_names(data, config.clusterings[data], config.domains.training)
        step = domains * values["sequences"]
        if step % len(learned):
            fitting = ", ".join(str(k) for k in range(1, step + 1) if step % k == 0)
            cause = f"{data} of {len(learned)} clusters does not divide the {step} sequences of a step"
            cure = f"raise training.sequences, or make one of {fitting} clusters"
            raise DemixError(f"config key models.{name}.data", cause, cure)
        values["sequences"] = step // len(learned)
    settings = settings_from(RowSettings, values, f"config key models.{name}")
    if kind.anchored and settings.weight_decay:
        cause = f"is {settings.weight_decay:g}, and the parent's feedforwards would decay too"
        raise DemixError(f"config key models.{name}.weight_decay", cause, "use 0")
    if settings.trained and not (mixes or given.initial):
        cause = "is given to a row that begins with no routed experts"
        cure = f"give it a parent of kind {' or '.join(MERGEABLE)}, or leave it out"
        raise DemixError(f"config key models.{name}.trained", cause, cure)
    row = Row(name, kind, settings, learned, section, architecture, given.initial, sequences, given.hub, mixes)
    if row.masked:
        _check_masked(row)
    if settings.merged_routed and len(learned) < 2:
        cause = "is given to a row of one expert, and tokens choose among several"
        raise DemixError(f"config key models.{name}.merged_routed", cause, "leave it out, or add a training domain")
    return row


def _section(config: Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """The config's section `architecture`, with the options and the routed experts of a row with these `values`."""
    routed = {"routed": {key: values[key] for key in _SIZES}} if "match" in values else {}
    return row_section(written(config.architecture), values.get("architecture") or {}) | routed


def _architecture(name: str, section: Mapping[str, Any]) -> Architecture:
    """The architecture of the row `name`. Raises DemixError where the row's options do not fit the section."""
    try:
        return architecture_from(section)
    except DemixError as error:
        key = error.subject.removeprefix("architecture.routed.") if "routed" in section else error.subject
        raise error.but(f"config key models.{name}.{key}") from None


def _check_options(given: _Given, parent: str, section: dict[str, Any]) -> None:
    """Raise DemixError if a row has other options of `architecture` than its `parent`, whose `section` this is."""
    of_parent = architecture_from(section)
    own = given.own.get("architecture") or {}
    if "preset" in own and architecture_from(row_section(section, own)) != of_parent:
        cause, cure = f"has other options than its parent {parent}", "leave it out: a branch takes its parent's"
        raise DemixError(f"config key models.{given.name}.architecture", cause, cure)
    for key, value in own.items() if "preset" not in own else ():
        has = getattr(of_parent, key)
        if value != has:
            cause, cure = f"is {value} where its parent {parent} has {has}", "leave it out: a branch takes its parent's"
            raise DemixError(f"config key models.{given.name}.architecture.{key}", cause, cure)


def _check_routed(name: str, values: Mapping[str, Any], initial: str) -> None:
    """Raise DemixError unless the row `name`, of kind routed, can begin with the state that it names."""
    if values["top_k"] == 1 and (values.get("parent") or initial):
        cause = "is 1, and a parent's feedforward times a share of 1 of the experts is not the parent's"
        raise DemixError(f"config key models.{name}.top_k", cause, "use 2 or more, or leave out parent")
    if values.get("parent") and values.get("schedule") == "continue" and values["match"] == "flops":
        cause = "is continue, and with match flops training ends before the parent's learning rate has fallen"
        raise DemixError(f"config key models.{name}.schedule", cause, "add match: updates, or use restart")


def _mixes(given: _Given, others: Mapping[str, _Given]) -> bool:
    """Whether a row trains the merged experts of its parent."""
    parent = others.get(given.settings.parent_row or "")
    return bool(given.kind.routed and parent and parent.kind.name in MERGEABLE)


def _check_mixed(name: str, values: Mapping[str, Any], experts: int) -> None:
    """Raise DemixError unless the row `name` has the routed layers that merging its parent's `experts` makes."""
    for key, has in (("experts", experts), ("every", 1)):
        if values[key] != has:
            cause = f"is {values[key]}, and its parent's merged experts have {has}"
            raise DemixError(f"config key models.{name}.{key}", cause, "leave it out")


def _matched_tokens(architecture: Architecture, types: int, values: Mapping[str, Any]) -> int:
    """The tokens of training of a row of kind routed with these `values`, those of its seed phase included.

    For `match: flops` they are those that take the FLOPs that a dense model takes for `tokens`.
    """
    tokens = int(values["tokens"])
    if values["match"] == "updates":
        return tokens
    dense, routed = (training_flops_per_token(one, types, one.context) for one in (architecture.unrouted, architecture))
    seed = min(tokens, int(values.get("seed_tokens") or 0))
    return seed + int((tokens - seed) * dense / routed)


def _check_masked(row: Row) -> None:
    """Raise DemixError unless a row, which is a masked language model, stands apart from causal ones."""
    key = f"config key models.{row.name}"
    if row.name in PAPER:
        cause = "is mlm, and other rows are compared with this one by the text that it predicts"
        raise DemixError(f"{key}.architecture.objective", cause, "add a row of another name, or null to leave this out")
    if row.kind.domain_tokens:
        cause = f"is {row.kind.name}, whose token stands before a text to go on with"
        raise DemixError(f"{key}.kind", cause, "use dense")
    for merged in ("averages", "merged_routed"):
        if getattr(row.settings, merged):
            cause = "is given to a masked model, whose experts are mixed by weights that no text decides"
            raise DemixError(f"{key}.{merged}", cause, "leave it out")
    if row.mixes:
        cause = "is a masked model, whose experts have no states of a text that goes on, by which tokens choose"
        raise DemixError(f"{key}.parent", cause, "use a causal row")


def _check_data(name: str, kind: Kind, data: str, config: Config) -> None:
    """Raise DemixError unless the row `name` of `kind` can learn from the clustering `data`."""
    key, known = f"config key models.{name}.data", config.clusterings
    if kind.batches != "by_domain":
        raise DemixError(key, f"is given to a row of kind {kind.name}", "use kind: branched or demix, or leave it out")
    if data not in known:
        raise DemixError(key, f"{data} is no clustering", nearest(data, known, "add it to clusterings"))
    if known[data].method == "metadata":
        raise DemixError(key, f"is {data}, whose clusters are the domains", "leave it out")
    if name in PAPER:
        raise DemixError(key, f"is given to the row {name}", "add a row of another name")


def _check_state(given: _Given, others: Mapping[str, _Given]) -> None:
    """Raise DemixError unless a row begins with no state, or with one that its kind and its parent allow."""
    key, kind, settings = f"config key models.{given.name}", given.kind, given.settings
    parent, seed_tokens = settings.parent_row, settings.seed_tokens
    if kind.anchored and not (parent or given.initial):
        cause = "is missing, and experts of kind anchored learn beside a model that stays as it is"
        raise DemixError(f"{key}.parent", cause, "name a row of kind dense and seed_tokens, or the folder of a model")
    if settings.schedule is not None and parent is None:
        cause = "is given to a row that begins with no state of another row"
        raise DemixError(f"{key}.schedule", cause, "leave it out, or give parent and seed_tokens")
    for only, kept in _KEPT.items():
        if given.own.get(only) is not None and kind.name not in kept:
            cure = f"use kind: {' or '.join(kept)}"
            raise DemixError(f"{key}.{only}", f"is given to a row of kind {kind.name}", cure)
    if given.initial:
        refuse_unnamable(given.initial)
        if kind.domain_tokens or seed_tokens is not None:
            cause = "is a folder, whose model has no domain tokens and begins no seed phase"
            raise DemixError(f"{key}.parent", cause, "leave out seed_tokens, and choose another kind than domain_token")
        return
    if parent and _mixes(given, others):
        if seed_tokens is not None:
            named = f"{parent} of kind {others[parent].kind.name}"
            cause = f"is given beside the parent {named}, whose whole training comes before"
            raise DemixError(f"{key}.seed_tokens", cause, "leave it out")
        if settings.schedule is not None:
            raise DemixError(f"{key}.schedule", "is given to a row with a training of its own", "leave it out")
        return
    if (parent is None) != (seed_tokens is None):
        missing, there = ("parent", "seed_tokens") if parent is None else ("seed_tokens", "parent")
        raise DemixError(f"{key}.{missing}", f"is missing beside {there}", "give both, or neither")
    if parent is not None:
        _check_parent(given, others)


def _check_parent(given: _Given, others: Mapping[str, _Given]) -> None:
    """Raise DemixError unless the kind of a row and its parent, a row of kind dense, allow its seed phase."""
    key, kind, settings = f"config key models.{given.name}", given.kind, given.settings
    name, restarts = settings.parent_row or "", settings.schedule == "restart"
    if kind.batches != "by_domain" and not kind.routed and (kind.domain_tokens or not restarts):
        more = "" if kind.domain_tokens else ", add schedule: restart"
        cause, cure = f"is given to a row of kind {kind.name}", f"use kind: demix{more}, or leave it out"
        raise DemixError(f"{key}.parent", cause, cure)
    dense = (other.name for other in others.values() if other.kind == KINDS["dense"])
    cure = nearest(name, dense, "add a row of kind dense")
    if name not in others:
        raise DemixError(f"{key}.parent", f"is {name}, which is no row of models", cure)
    parent = others[name]
    if parent.kind != KINDS["dense"]:
        cause = f"is {name} of kind {parent.kind.name}, which draws other blocks or has other parameters"
        raise DemixError(f"{key}.parent", cause, cure)
    if parent.settings.parent_row is not None:
        cause = f"is {name}, which begins with the state of another row itself"
        raise DemixError(f"{key}.parent", cause, f"use {parent.settings.parent_row}")
    if restarts and not settings.seed_tokens:
        cause = "is given to a row whose seed_tokens are 0, which begins with no state"
        raise DemixError(f"{key}.schedule", cause, "leave it out, or raise seed_tokens")
    if settings.seed_tokens > parent.settings.tokens:
        cause = f"is {settings.seed_tokens}, more than the {parent.settings.tokens} tokens of {name}"
        raise DemixError(f"{key}.seed_tokens", cause, "lower it")
    if restarts and settings.sweep and settings.sweep != parent.settings.sweep:
        cause = "is given to a row that restarts, whose trials would begin with no state"
        raise DemixError(f"{key}.sweep", cause, "give the row a learning_rate")
