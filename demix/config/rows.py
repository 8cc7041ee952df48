"""The rows of a config's `models`: their kinds, what they learn from, and which rows are refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from demix.config.addresses import refuse_unnamable
from demix.config.architecture import USUAL
from demix.config.clustering import Clustering, cluster_names
from demix.config.routed import ROUTED, architecture_of, check_routed, matched_tokens, routed_row, section_of
from demix.errors import DemixError, nearest
from demix.settings import settings_from

# The single expert of a model without domain experts.
DENSE_EXPERT = "dense"
# What a model does with the schedule of the parent whose state it begins with.
SCHEDULES = ("continue", "restart")


@dataclass(frozen=True)
class Kind:
    """How models of one kind are built, and what they learn from.

    `label` is the paper's name of the kind. `expert_scope` says which tensors belong to a domain's expert alone:
    `feedforward` (DEMix layers), `model` (Branch-Train-Merge: each expert is a whole model, trained by itself), or
    `none` for a model whose single expert is called `dense`. `batches` says how a step is drawn: `by_domain` (a group
    of sequences for each domain's expert), `mixed` (the same sequences as one group) or `proportional` (in proportion
    to the domains' sizes). With `domain_tokens` the token of its domain stands before each sequence. With `routed` the
    tokens choose among experts in some feedforwards (`demix.config.routed`).
    """

    name: str
    label: str
    expert_scope: str
    batches: str
    domain_tokens: bool = False
    routed: bool = False

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
        Kind("branched", "BTM", "model", "by_domain"),
        Kind("routed", "Token-routed", "none", "mixed", routed=True),
    )
}
# The paper's models, which a run has unless a row is null.
PAPER = ("demix", "dense", "dense_unbalanced", "domain_token")
# Rows that a config must keep: DEMix is the model under test, and the dense model is its baseline.
KEPT = ("demix", "dense")


def training_domains(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The training domains in the config's order."""
    return tuple(config["domains"]["training"])


def novel_domains(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The novel domains in the config's order."""
    return tuple(config["domains"].get("novel") or ())


def model_rows(config: Mapping[str, Any]) -> dict[str, tuple[Kind, dict[str, Any]]]:
    """The rows of a completed config's `models` with the kind and section `training` of each, the paper's four first.

    A row with a seed phase has its parent's settings, and the keys `parent` and `seed_tokens` among them. A row whose
    parent is a folder has this folder as the key `initial`. Raises DemixError for a row of an unknown kind, where demix
    or dense is left out, and for a parent that does not fit.
    """
    given, domains = config.get("models") or {}, len(training_domains(config))
    rows: dict[str, tuple[Kind, dict[str, Any]]] = {}
    owned: dict[str, dict[str, Any]] = {}
    for name in (*PAPER, *(name for name in given if name not in PAPER)):
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
        if name in PAPER and kind != name:
            raise DemixError(f"config key models.{name}.kind", f"is {kind}", "use this kind in a row of another name")
        own = {key: value for key, value in overrides.items() if key != "kind"}
        if KINDS[kind].routed:
            own = routed_row(own)
        elif foreign := [key for key in own if key in ROUTED]:
            cause = f"is given to a row of kind {kind}"
            raise DemixError(f"config key models.{name}.{foreign[0]}", cause, "use kind: routed, or leave it out")
        if "/" in (own.get("parent") or ""):
            own["initial"] = own.pop("parent")
        owned[name] = own
        rows[name] = (KINDS[kind], (config.get("training") or {}) | own)
    for name, (row_kind, settings) in rows.items():
        _check_seed_phase(name, row_kind, settings, rows)
        if parent := settings.get("parent"):
            own = owned[name]
            parents = rows[parent][1]
            _check_options(name, own, parent, config, parents)
            if own.get("schedule") == "restart":
                parents = parents | {"warmup": 0.0, "seed_sequences": domains * parents["sequences"]}
                # The row's own rate takes the place of the one that its parent's sweep chooses.
                parents |= {"sweep": None} if "learning_rate" in own else {}
            rows[name] = (row_kind, parents | own)
        elif "architecture" in settings:
            _check_architecture(name, config, settings)
        if row_kind.routed:
            settings = rows[name][1]
            check_routed(name, config, settings)
            rows[name] = (row_kind, settings | {"tokens": matched_tokens(config, settings)})
    for name, (row_kind, settings) in rows.items():
        if is_masked(config, settings):
            _check_masked(name, row_kind, settings)
        if data := settings.get("data"):
            _check_data(name, row_kind, data, config)
            clusters, sequences = len(learned(config, settings)), domains * settings["sequences"]
            if sequences % clusters:
                fitting = ", ".join(str(k) for k in range(1, sequences + 1) if sequences % k == 0)
                cause = f"{data} of {clusters} clusters does not divide the {sequences} sequences of a step"
                cure = f"raise training.sequences, or make one of {fitting} clusters"
                raise DemixError(f"config key models.{name}.data", cause, cure)
            rows[name] = (row_kind, settings | {"sequences": sequences // clusters})
        if settings.get("merged_routed") and len(learned(config, settings)) < 2:
            cause = "is given to a row of one expert, and tokens choose among several"
            raise DemixError(f"config key models.{name}.merged_routed", cause, "leave it out, or add a training domain")
    return rows


def is_masked(config: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether a row with these `settings` is a masked language model."""
    sections = config.get("architecture") or {}, settings.get("architecture") or {}
    return bool((sections[0] | sections[1]).get("objective") == "mlm")


def masked_rows(config: Mapping[str, Any]) -> dict[str, Kind]:
    """The kinds of the rows of `models` that are masked language models, whose numbers compare with no others."""
    return {name: kind for name, (kind, settings) in model_rows(config).items() if is_masked(config, settings)}


def clusterings(config: Mapping[str, Any]) -> dict[str, Clustering]:
    """The clusterings of a config by name."""
    given = config.get("clusterings") or {}
    return {name: settings_from(Clustering, each, f"config key clusterings.{name}") for name, each in given.items()}


def clusters_of(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The clusters of the clustering `name`."""
    return cluster_names(name, clusterings(config)[name], training_domains(config))


def learned(config: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The domains or clusters that a row with these `settings` learns from, in order."""
    return clusters_of(config, settings["data"]) if settings.get("data") else training_domains(config)


def by_domain(config: Mapping[str, Any]) -> str:
    """The clustering whose clusters are the training domains; empty where the config has none."""
    found = clusterings(config).items()
    return next((name for name, clustering in found if clustering.method == "metadata"), "")


def _check_architecture(name: str, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise DemixError unless the options of the row `name` fit one another and the section `architecture`."""
    options = {key: value for key, value in settings.items() if key == "architecture"}
    try:
        architecture_of(config, options)
    except DemixError as error:
        raise DemixError(f"config key models.{name}.{error.subject}", error.cause, error.cure) from None


def _check_options(
    name: str, own: dict[str, Any], parent: str, config: Mapping[str, Any], parents: Mapping[str, Any]
) -> None:
    """Take the options of `architecture` out of a row's `own`. Raise DemixError if its `parent` has others."""
    for key, value in (own.pop("architecture", None) or {}).items():
        has = USUAL | section_of(config, parents)
        if value != has[key]:
            cause = f"is {value} where its parent {parent} has {has[key]}"
            cure = "leave it out: a branch takes its parent's"
            raise DemixError(f"config key models.{name}.architecture.{key}", cause, cure)


def _check_masked(name: str, kind: Kind, settings: Mapping[str, Any]) -> None:
    """Raise DemixError unless the row `name`, which is a masked language model, stands apart from causal ones."""
    key = f"config key models.{name}"
    if name in PAPER:
        cause = "is mlm, and other rows are compared with this one by the text that it predicts"
        raise DemixError(f"{key}.architecture.objective", cause, "add a row of another name, or null to leave this out")
    if kind.domain_tokens:
        raise DemixError(f"{key}.kind", f"is {kind.name}, whose token stands before a text to go on with", "use dense")
    for merged in ("averages", "merged_routed"):
        if settings.get(merged):
            cause = "is given to a masked model, whose experts are mixed by weights that no text decides"
            raise DemixError(f"{key}.{merged}", cause, "leave it out")


def _check_data(name: str, kind: Kind, data: str, config: Mapping[str, Any]) -> None:
    """Raise DemixError unless the row `name` of `kind` can learn from the clustering `data`."""
    key, known = f"config key models.{name}.data", clusterings(config)
    if kind.batches != "by_domain":
        raise DemixError(key, f"is given to a row of kind {kind.name}", "use kind: branched or demix, or leave it out")
    if data not in known:
        raise DemixError(key, f"{data} is no clustering", nearest(data, known, "add it to clusterings"))
    if known[data].method == "metadata":
        raise DemixError(key, f"is {data}, whose clusters are the domains", "leave it out")
    if name in PAPER:
        raise DemixError(key, f"is given to the row {name}", "add a row of another name")


def _check_seed_phase(
    name: str, kind: Kind, settings: Mapping[str, Any], rows: Mapping[str, tuple[Kind, dict[str, Any]]]
) -> None:
    """Raise DemixError unless the row `name` has no seed phase, or one that its kind and its parent allow."""
    key, parent = f"config key models.{name}", settings.get("parent")
    restarts = settings.get("schedule") == "restart"
    if "schedule" in settings and parent is None:
        cause = "is given to a row that begins with no state of another row"
        raise DemixError(f"{key}.schedule", cause, "leave it out, or give parent and seed_tokens")
    for only, kept in (("experts_per_job", "branched"), ("averages", "branched"), ("merged_routed", "demix")):
        if only in settings and kind.name != kept:
            raise DemixError(f"{key}.{only}", f"is given to a row of kind {kind.name}", f"use kind: {kept}")
    if "initial" in settings:
        refuse_unnamable(settings["initial"])
        if kind.domain_tokens or settings.get("seed_tokens") is not None:
            cause = "is a folder, whose model has no domain tokens and begins no seed phase"
            raise DemixError(f"{key}.parent", cause, "leave out seed_tokens, and choose another kind than domain_token")
        return
    if (parent is None) != (settings.get("seed_tokens") is None):
        missing, there = ("parent", "seed_tokens") if parent is None else ("seed_tokens", "parent")
        raise DemixError(f"{key}.{missing}", f"is missing beside {there}", "give both, or neither")
    if parent is None:
        return
    cure = nearest(
        parent, (row for row, (kind, _) in rows.items() if kind == KINDS["dense"]), "add a row of kind dense"
    )
    if kind.batches != "by_domain" and not kind.routed and (kind.domain_tokens or not restarts):
        more = "" if kind.domain_tokens else ", add schedule: restart"
        cause, cure = f"is given to a row of kind {kind.name}", f"use kind: demix{more}, or leave it out"
        raise DemixError(f"{key}.parent", cause, cure)
    if parent not in rows:
        raise DemixError(f"{key}.parent", f"is {parent}, which is no row of models", cure)
    if rows[parent][0] != KINDS["dense"]:
        cause = f"is {parent} of kind {rows[parent][0].name}, which draws other blocks or has other parameters"
        raise DemixError(f"{key}.parent", cause, cure)
    if "parent" in rows[parent][1]:
        cause = f"is {parent}, which begins with the state of another row itself"
        raise DemixError(f"{key}.parent", cause, f"use {rows[parent][1]['parent']}")
    if restarts and not settings["seed_tokens"]:
        cause = "is given to a row whose seed_tokens are 0, which begins with no state"
        raise DemixError(f"{key}.schedule", cause, "leave it out, or raise seed_tokens")
    if settings["seed_tokens"] > rows[parent][1]["tokens"]:
        cause = f"is {settings['seed_tokens']}, more than the {rows[parent][1]['tokens']} tokens of {parent}"
        raise DemixError(f"{key}.seed_tokens", cause, "lower it")
    if restarts and settings.get("sweep") and settings["sweep"] != rows[parent][1].get("sweep"):
        cause = "is given to a row that restarts, whose trials would begin with no state"
        raise DemixError(f"{key}.sweep", cause, "give the row a learning_rate")
