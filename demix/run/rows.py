"""The model entries of a run: the settings with which each is trained, and checks of the entries."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from demix.config.addresses import HUB, refuse_unnamable
from demix.config.architecture import Architecture, Options, architecture_from, with_options
from demix.config.config import Config
from demix.config.counts import training_flops_per_token
from demix.config.models import KEPT, KINDS, PAPER, EntrySettings, Kind, cluster_names
from demix.errors import DemixError, nearest
from demix.settings import names_of, settings_from, written

# The kinds of models whose experts can be merged into a token-routed model.
MERGEABLE = ("demix", "branched", "anchored")
_SIZES = ("experts", "top_k", "every", "capacity", "balance")
# For kind anchored: each token passes through the parent's feedforward and the expert next to it.
_PAIR = {"experts": 2, "top_k": 2, "every": 1, "capacity": 2.0, "balance": 0.0}


@dataclass(frozen=True)
class Row:
    """An entry of the config's `models`, with everything derived for its training.

    `settings` are the section `training` with the entry's own values. A warm-started entry has its parent's settings,
    and also `parent` and `seed_tokens`. If an entry starts from a model in a folder, `initial` is that folder. An entry
    that `mixes` starts from the merged experts of its parent, with its own training. `learned` are the domains or
    clusters on which the entry trains. A step has `sequences` sequences of each of these; a step of the parent had
    `seed_sequences` in all, if that number differs. `label` is the entry's name in tables.
    """

    name: str
    kind: Kind
    settings: EntrySettings
    learned: tuple[str, ...]
    architecture: Architecture
    initial: str = ""
    seed_sequences: int = 0
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


def rows_of(config: Config) -> dict[str, Row]:
    """The entries of a config's `models`, the paper's four first.

    Raises DemixError if demix or dense is null, a parent does not fit, or two entries have the same label.
    """
    rows: dict[str, Row] = {}
    for name in config.models:
        if config.models[name] is None and name in KEPT:
            raise DemixError(
                f"config key models.{name}", "is null", "keep this entry: other models are compared with it"
            )
    named = [name for name, entry in config.models.items() if entry is not None]
    for name in named:
        _row(config, name, rows)
    _check_labels(rows)
    return {name: rows[name] for name in named}


def _check_labels(rows: Mapping[str, Row]) -> None:
    """Raise DemixError for a label of one of the paper's entries, and for a label that another entry has."""
    paper = {name: KINDS[name].label for name in PAPER}
    for name, row in rows.items():
        key = f"config key models.{name}.label"
        others = {other: one.label for other, one in rows.items()} | paper
        if name in PAPER:
            if row.label != paper[name]:
                raise DemixError(key, "cannot be set for the paper's entries, which keep their names", "remove it")
        elif same := [other for other, label in others.items() if label == row.label and other != name]:
            raise DemixError(key, f"is {row.label}, which is also the label of {same[0]}", "use another label")


def _row(config: Config, name: str, rows: dict[str, Row]) -> Row:
    """The entry `name`, which is added to `rows` after its parent."""
    if name in rows:
        return rows[name]
    key, own, domains = f"config key models.{name}", written(config.models[name]), tuple(config.domains.training)
    kind = KINDS[own.pop("kind")]
    label = own.pop("label", kind.label if name == kind.name else name)
    if name in PAPER and kind.name != name:
        raise DemixError(f"{key}.kind", f"is {kind.name}, not {name}", "use this kind in an entry of another name")
    initial = own.pop("parent") if "/" in own.get("parent", "") else ""
    parent = _parent(config, key, kind, own, initial, rows)
    mixes = parent is not None and parent.kind.name in MERGEABLE
    if parent and "architecture" in own:
        cause = f"cannot be set for an entry that starts from {parent.name} and has its architecture"
        raise DemixError(f"{key}.architecture", cause, "remove it")
    # A model in a folder has no schedule that could continue.
    restarts = {"schedule": "restart"} if kind.has_routers and parent and not mixes else {}
    if kind.anchored:
        own = _PAIR | restarts | own
    elif kind.routed:
        own = restarts | _routed(key, own, parent if mixes else None)
    values = written(config.training)
    if parent and mixes:
        values |= {one: value for one, value in written(parent.settings).items() if one == "architecture"}
    elif parent:
        values = _begun(parent, own)
    values |= own
    architecture = _architecture(config, name, values)
    if kind.has_routers:
        if values["top_k"] == 1 and (parent or initial):
            cause = "is 1: one expert times its gate would not equal the parent's feedforward"
            raise DemixError(f"{key}.top_k", cause, "use 2 or more, or remove parent")
        values["tokens"] = _matched_tokens(architecture, config.tokenizer.size, values)
    learned = domains
    if "data" in values:
        learned, values["sequences"] = _clusters(config, name, values)
    settings = settings_from(EntrySettings, values, key)
    if kind.anchored and settings.weight_decay:
        cause = f"is {settings.weight_decay:g}, but the parent's frozen feedforwards would decay, too"
        raise DemixError(f"{key}.weight_decay", cause, "use 0")
    if settings.trained and not (mixes or initial):
        cause = "cannot be set for an entry that does not start from routed experts"
        cure = f"set a parent of kind {' or '.join(MERGEABLE)}, or remove it"
        raise DemixError(f"{key}.trained", cause, cure)
    sequences = len(domains) * parent.settings.sequences if parent and own.get("schedule") == "restart" else 0
    row = Row(name, kind, settings, learned, architecture, initial, sequences, mixes, label)
    if row.masked:
        _check_masked(row)
    rows[name] = row
    return row


def _begun(parent: Row, own: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `parent` for an entry with these `own` keys that continues from the parent's state."""
    restarts = own.get("schedule") == "restart"
    # The entry's own learning rate replaces the one from its parent's sweep.
    no_sweep = {"sweep": None} if restarts and "learning_rate" in own else {}
    return written(parent.settings) | ({"warmup": 0.0} if restarts else {}) | no_sweep


def _clusters(config: Config, name: str, values: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """The clusters of the entry `name`, and the sequences per cluster in a step, which is as large as with domains."""
    data, domains = values["data"], config.domains.training
    _check_data(name, data, config)
    learned, step = cluster_names(data, config.clusterings[data], domains), len(domains) * values["sequences"]
    if step % len(learned):
        fitting = ", ".join(str(k) for k in range(1, step + 1) if step % k == 0)
        cause = f"has {len(learned)} clusters ({data}), which does not divide the {step} sequences of a step"
        cure = f"raise training.sequences, or use a clustering with {fitting} clusters"
        raise DemixError(f"config key models.{name}.data", cause, cure)
    return learned, step // len(learned)


def _routed(key: str, own: dict[str, Any], merged: Row | None) -> dict[str, Any]:
    """The keys of an entry of kind routed, with defaults; `merged` is the entry whose experts are merged."""
    for size in ("experts", "every") if merged else ():
        if size in own:
            raise DemixError(f"{key}.{size}", "cannot be set if the parent's experts are merged", "remove it")
    experts = len(merged.learned) + merged.kind.anchored if merged else 8
    sizes: dict[str, Any] = {"experts": experts, "top_k": 2 if merged else 1, "every": 1, "balance": 0.01, **own}
    return {"capacity": 1.25 if sizes["top_k"] == 1 else 2.0} | sizes


def _architecture(config: Config, name: str, values: Mapping[str, Any]) -> Architecture:
    """The config's architecture with the options and routed experts of the entry `name` with these `values`.

    Raises DemixError if the entry's options do not fit the section.
    """
    routed = {"routed": {key: values[key] for key in _SIZES}} if "every" in values else {}
    section = with_options(written(config.architecture), values.get("architecture") or {}) | routed
    try:
        return architecture_from(section)
    except DemixError as error:
        key = error.subject.removeprefix("architecture.routed.") if "routed" in section else error.subject
        raise error.but(f"config key models.{name}.{key}") from None


def _matched_tokens(architecture: Architecture, types: int, values: Mapping[str, Any]) -> int:
    """The number of tokens that needs the FLOPs of `tokens` tokens of a dense model, including a dense warm start."""
    tokens = int(values["tokens"])
    dense, routed = (training_flops_per_token(one, types, one.context) for one in (architecture.unrouted, architecture))
    seed = min(tokens, int(values.get("seed_tokens") or 0))
    return seed + int((tokens - seed) * dense / routed)


def _check_masked(row: Row) -> None:
    """Raise DemixError if an entry that is a masked language model depends on causal ones."""
    key = f"config key models.{row.name}"
    if row.name in PAPER:
        cause = "is mlm, but other entries are compared with this one as causal models"
        raise DemixError(f"{key}.architecture.objective", cause, "add an entry of another name, or remove this")
    if row.kind.domain_tokens:
        cause = f"is {row.kind.name}, but masked models have no domain tokens"
        raise DemixError(f"{key}.kind", cause, "use dense")
    if row.settings.averages:
        cause = "cannot be set for a masked model, whose experts the text cannot weight"
        raise DemixError(f"{key}.averages", cause, "remove it")
    if row.mixes:
        cause = "is a masked model, which cannot become token-routed"
        raise DemixError(f"{key}.parent", cause, "use a causal entry")


def _check_data(name: str, data: str, config: Config) -> None:
    """Raise DemixError if the entry `name` cannot train on the clustering `data`."""
    key, known = f"config key models.{name}.data", config.clusterings
    if data not in known:
        raise DemixError(key, f"{data} is not a clustering", nearest(data, known, "add it to clusterings"))
    if known[data].method == "metadata":
        raise DemixError(key, f"is {data}, whose clusters are the domains", "remove it")
    if name in PAPER:
        raise DemixError(key, f"cannot be set for the entry {name}", "add an entry of another name")


def _parent(
    config: Config, key: str, kind: Kind, own: Mapping[str, Any], initial: str, rows: dict[str, Row]
) -> Row | None:
    """The parent entry of the entry at `key` with these `own` keys; None without one.

    Raises DemixError if its kind or its parent does not allow to start from the parent's state.
    """
    name, seed_tokens, restarts = own.get("parent"), own.get("seed_tokens"), own.get("schedule") == "restart"
    if kind.anchored and not (name or initial):
        cause = "is missing, but experts of kind anchored train next to a frozen model"
        raise DemixError(f"{key}.parent", cause, "name an entry of kind dense and seed_tokens, or a model's folder")
    if "schedule" in own and name is None:
        cause = "cannot be set for an entry that does not start from another entry's state"
        raise DemixError(f"{key}.schedule", cause, "remove it, or give parent and seed_tokens")
    if initial.startswith(HUB):
        cure = "import it with `demix import`, and name the folder that was written"
        raise DemixError(f"{key}.parent", f"is {initial}, an address of the hub, not a folder", cure)
    if initial:
        refuse_unnamable(initial)
        if seed_tokens is not None:
            raise DemixError(f"{key}.parent", "is a folder, whose model has no warm start", "remove seed_tokens")
        return None
    entries = {one: entry for one, entry in config.models.items() if entry is not None}
    if name and kind.routed and name in entries and entries[name].kind in MERGEABLE:
        if seed_tokens is not None:
            cause = f"cannot be set: the whole training of the parent {name} comes before"
            raise DemixError(f"{key}.seed_tokens", cause, "leave it out")
        return _row(config, name, rows)
    if (name is None) != (seed_tokens is None):
        missing, there = ("parent", "seed_tokens") if name is None else ("seed_tokens", "parent")
        raise DemixError(f"{key}.{missing}", f"is missing, although {there} is given", "give both, or neither")
    if name is None or seed_tokens is None:
        return None
    if kind.batches != "by_domain" and not (restarts or kind.routed):
        cause = f"cannot be set for an entry of kind {kind.name}"
        raise DemixError(f"{key}.parent", cause, "use kind: demix, add schedule: restart, or remove it")
    dense = [one for one, entry in entries.items() if entry.kind == "dense" and "/" in (entry.parent or "/")]
    if name not in dense:
        cure = nearest(name, dense, "add an entry of kind dense")
        raise DemixError(f"{key}.parent", f"is {name}, which is not a dense model trained from scratch", cure)
    parent = _row(config, name, rows)
    if seed_tokens > parent.settings.tokens:
        cause = f"is {seed_tokens}, more than the {parent.settings.tokens} tokens of {name}"
        raise DemixError(f"{key}.seed_tokens", cause, "lower it")
    if (restarts or kind.has_routers) and own.get("sweep") not in (None, written(parent.settings)["sweep"]):
        cause = "cannot be set for an entry that restarts, as trials cannot start from its parent's state"
        raise DemixError(f"{key}.sweep", cause, "give the entry a learning_rate")
    return parent
