"""Reading a config: merging the file with its base, checking all keys, and filling in the defaults."""

import dataclasses
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from pydantic_core import to_jsonable_python

from demix.config import placement
from demix.config.addresses import LOG_IN, local, moving, refuse_secrets
from demix.config.architecture import architecture_from
from demix.config.clashes import refuse_clashes
from demix.config.contexts import check_contexts
from demix.config.keys import located, read_keys
from demix.config.mixing import parsed_weights
from demix.config.rows import PAPER, clusterings, clusters_of, model_rows
from demix.config.run import BESIDE
from demix.config.sections import PASSES, Config, TrainingRecipe, taken
from demix.config.systems import Model, adaptations, planned, trained
from demix.config.tasks import check_tasks
from demix.errors import DemixError, nearest
from demix.settings import settings_from


def load_config(path: str | Path, **instead: Any) -> dict[str, Any]:
    """The config in the YAML file `path`: merged with its base, checked, and completed with all defaults.

    The keys of `instead` replace those of the file.
    """
    path = Path(path)
    content, lines = read_keys(path)
    try:
        return complete(content | instead, path.parent)
    except DemixError as error:
        raise located(error, {path: lines}) from None


def refuse_missing_files(config: dict[str, Any], file: Path) -> None:
    """Raise DemixError that names each local path of a source of the completed config in `file` that has no file."""
    lines, missing, instructions = read_keys(file)[1], list[str](), dict[str, None]()
    for kind, domains in config["domains"].items():
        for name, domain in domains.items():
            source, key = domain["source"], f"domains.{kind}.{name}.source"
            paths = [source["path"]] if isinstance(source["path"], str) else source["path"]
            for path in paths if source["kind"] == "files" else ():
                if not glob(path, recursive=True):
                    place = next((f"line {lines[one]}" for one in (f"{key}.path", key) if one in lines), "its base")
                    missing.append(f"{path} ({name}, {place})")
                    instructions[source["instructions"]] = None
    if missing:
        cure = " ".join(filter(None, instructions)) or "mend the paths, which begin in the folder that you run in"
        raise DemixError(file, f"names files that are missing: {', '.join(missing)}", cure)


def with_base(config: dict[str, Any], folder: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """`config`, merged into the file that its key `base` names, nested keys included.

    The path of the base is relative to `folder`. Where both set a key, `config` wins. A base may have a base of its
    own, relative to the folder of that base's file.
    """
    base = config.get("base")
    if base is None:
        return {key: value for key, value in config.items() if key != "base"}
    if not isinstance(base, str) or "\0" in base:
        raise DemixError("config key base", f"is {base!r}", "give the path of a config file, relative to this one")
    path = (folder / base).resolve()
    if path in above:
        raise DemixError("config key base", f"{base} is based on itself", "remove one key `base`")
    if not path.is_file():
        raise DemixError("config key base", f"{path} does not exist", "give a path relative to the file that names it")
    below = with_base(read_keys(path)[0], path.parent, (*above, path))
    return _merged(below, {key: value for key, value in config.items() if key != "base"})


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(below[key], value) if isinstance(value, dict) and isinstance(below.get(key), dict) else value
        for key, value in above.items()
    }
    return below | both


def complete(config: dict[str, Any], folder: Path = Path()) -> dict[str, Any]:
    """Merge `config` with its base (relative to `folder`), check it, and fill in every default, in place.

    Raises DemixError that names the first wrong key and what is allowed there. For an unknown key the error also names
    the nearest known one.
    """
    # The config.json of a run is accepted as a config too.
    for key in BESIDE:
        config.pop(key, None)
    whole = with_base(config, folder)
    config.clear()
    config.update(whole)
    # `novel:` with nothing below it is null in YAML.
    if isinstance(config.get("domains"), dict) and config["domains"].get("novel", {}) is None:
        config["domains"] = config["domains"] | {"novel": {}}
    settings_from(Config, config, "config key ")
    domains = config["domains"]
    given = domains.get("novel", {}).items()
    config["domains"] = domains | {"novel": {name: one for name, one in given if one is not None}}
    _fill(Config, config)
    del config["base"]
    if "tokens" not in (adaptation := config["adaptation"]):
        share = max(1, config["training"]["tokens"] // len(domains["training"]))
        config["adaptation"] = {"passes": PASSES} | adaptation | {"tokens": share}
    # A run without tasks is the same as before there were any.
    if not config["tasks"]:
        del config["tasks"]
    # Tables show the rows that every run has before further rows.
    rows = config["models"]
    config["models"] = {name: rows.get(name, {}) for name in PAPER} | rows
    _check_across(config)
    return config


def _fill(kind: Any, values: dict[str, Any]) -> None:
    """Give every setting of the class `kind` that `values` lacks its default, as JSON."""
    if not dataclasses.is_dataclass(kind):
        return
    for name, hint in get_type_hints(kind).items():
        field = vars(kind)["__pydantic_fields__"][name]
        default = field.get_default(call_default_factory=True)
        # A key whose factory makes nothing has no default.
        if name not in values and not field.is_required() and (default is not None or not field.default_factory):
            values[name] = {} if dataclasses.is_dataclass(default) else to_jsonable_python(default)
        for inner in _within(hint):
            if isinstance(values.get(name), dict):
                if get_origin(hint) is dict and inner is not hint:
                    for value in values[name].values():
                        _fill(inner, value)
                else:
                    _fill(inner, values[name])


def _within(hint: Any) -> Iterator[Any]:
    """A type and all types that it is made of."""
    yield hint
    for part in get_args(hint):
        yield from _within(part)


def _check_across(config: dict[str, Any]) -> None:
    """Check the rules that join several keys, which a schema cannot express."""
    training, novel = config["domains"]["training"], config["domains"]["novel"]
    for name in novel:
        if name in training:
            raise DemixError(
                f"config key domains.novel.{name}", "is a training domain too", "name the domain in one list only"
            )
    for kind, domains in config["domains"].items():
        for name, domain in domains.items():
            _check_source(f"config key domains.{kind}.{name}.source", domain["source"])
    for key, revision in moving(config).items() if not config["allow_branches"] else ():
        cause = f"is {revision}, which is no commit: its text can change"
        cure = "put in what `demix pin CONFIG` prints, or set allow_branches: true"
        raise DemixError(f"config key {key}.revision", cause, cure)
    for name, clustering in clusterings(config).items():
        clusters = clusters_of(config, name)
        if clustering.method != "metadata" and (taken_names := {*training, *novel} & {*clusters}):
            cause = f"has a cluster {min(taken_names)}, and a domain has this name too"
            raise DemixError(f"config key clusterings.{name}", cause, "rename the domain")
    check_tasks(config)
    for name, task in (config.get("tasks") or {}).items():
        for split in ("test", "train", "validation"):
            if task[split]:
                _check_source(f"config key tasks.{name}.{split}", task[split])
    architecture = architecture_from(config["architecture"])
    # This refuses keys of `adaptation` that name no fitting row.
    adaptations(config)
    for model in (model for model in trained(config) if model.name == model.base):
        settings = model.settings
        if model.parts[0].part:
            _check_parts(model)
        else:
            try:
                placement.place(
                    model.kind, model.domains, settings["sequences"], settings["ranks"], settings["replicas"]
                )
            except DemixError as error:
                raise DemixError(f"config key training.{error.subject}", error.cause, error.cure) from None
        step_tokens = model.step_tokens(architecture.context)
        if settings["tokens"] < step_tokens:
            section = f"models.{model.name}" if "tokens" in config["models"].get(model.name, ()) else "training"
            cause = f"is {settings['tokens']}, less than the {step_tokens} tokens of one step of {model.name}"
            cure = f"raise it, or lower the tokens of a step: {len(model.domains)} domains × {settings['sequences']} "
            cure += f"sequences × {architecture.context} tokens of context"
            raise DemixError(f"config key {section}.tokens", cause, cure)
        if model.parent:
            _check_branch(config, model, architecture.context)
        if settings["sweep"] and settings["sweep"]["tokens"] < step_tokens:
            cause = f"is {settings['sweep']['tokens']}, less than the {step_tokens} tokens of one step of {model.name}"
            raise DemixError("config key training.sweep.tokens", cause, "raise it")
    adaptation = config["adaptation"]
    try:
        placement.place_experts(["novel"], adaptation["sequences"], adaptation["ranks"])
    except DemixError as error:
        raise DemixError(f"config key adaptation.{error.subject}", error.cause, error.cure) from None
    for stage in ("train", "adapt"):
        cluster = site_of(config, stage)
        if cluster["grace_seconds"] >= 60 * cluster["minutes"]:
            cause = f"is {cluster['grace_seconds']}, which leaves none of the {cluster['minutes']} minutes of {stage}"
            raise DemixError("config key cluster.grace_seconds", cause, "lower it, or raise cluster.minutes")
    removal = config["removal"]
    for name in removal["retrain_without"]:
        if name not in training:
            cause = f"{name} is no training domain"
            raise DemixError("config key removal.retrain_without", cause, nearest(name, training, ""))
    if removal["retrain_without"] and removal["replacement"] not in novel:
        raise DemixError(
            "config key removal.replacement",
            f"is {removal['replacement']!r}, which is no novel domain",
            nearest(removal["replacement"], novel, "add a novel domain first"),
        )
    if "history" not in config["evaluation"]["weights"]:
        raise DemixError("config key evaluation.weights", "lacks history, which the report's tables use", "add history")
    for weights in config["evaluation"]["weights"]:
        for model in planned(config) if parsed_weights(weights).rules.routed else ():
            if model.kind.has_experts and not (model.routing or model.removed or model.masked):
                cause, cure = f"{weights} has no clustering for {model.name}", "add by_domain: {method: metadata}"
                raise DemixError("config key evaluation.weights", cause, f"{cure} to clusterings")
    check_contexts(config)
    refuse_clashes(config)
    refuse_secrets(
        "config key tracking.uri",
        config["tracking"]["uri"],
        "leave it out and set PGPASSWORD, MLFLOW_TRACKING_PASSWORD or MLFLOW_TRACKING_TOKEN in the environment",
    )


def _check_parts(model: Model) -> None:
    """Refuse settings of a row whose experts are whole models that do not fit trainings of one expert each."""
    settings, key = model.settings, f"config key models.{model.name}"
    if settings["replicas"]:
        cause = f"is {settings['replicas']}, and each expert trains by itself"
        raise DemixError(f"{key}.replicas", cause, "give this row replicas: {} and the ranks of one expert")
    if model.sweeps:
        raise DemixError(f"{key}.sweep", "has no single training to try rates on", "give this row sweep: null")
    if settings["ranks"] > 1 and settings.get("experts_per_job", 1) > 1:
        cause = f"is {settings['ranks']} with experts_per_job {settings['experts_per_job']}"
        raise DemixError(f"{key}.ranks", cause, "use 1, or leave out experts_per_job")
    try:
        placement.place_experts(model.parts[0].domains, settings["sequences"], settings["ranks"])
    except DemixError as error:
        raise DemixError(f"{key}.{error.subject}", error.cause, error.cure) from None


def _check_branch(config: dict[str, Any], model: Model, context: int) -> None:
    """Refuse settings of a row with a seed phase that would change its parent's schedule or data, unless it restarts.

    A row that restarts must have tokens left for an update of its own.
    """
    given, parents = config["models"][model.name], model_rows(config)[model.parent][1]
    step_tokens, parents_step = model.step_tokens(context), model.parent_step_tokens(context)
    seen, tokens = model.seed_step(context) * parents_step, model.settings["tokens"]
    if model.restarts and tokens // step_tokens <= -(-seen // step_tokens):
        cause = f"is {tokens}, which leaves no update after the {seen} tokens of its seed"
        raise DemixError(f"config key models.{model.name}.tokens", cause, "raise it, or lower seed_tokens")
    for key in (*taken(TrainingRecipe, parents), "sweep") if not model.restarts else ():
        if key != "dev_blocks" and key in given and given[key] != parents[key]:
            cause = f"is {given[key]} where its parent {model.parent} has {parents[key]}"
            raise DemixError(
                f"config key models.{model.name}.{key}", cause, "leave it out: a branch takes its parent's"
            )
    if 0 < model.settings["seed_tokens"] < parents_step:
        cause = f"is {model.settings['seed_tokens']}, less than the {parents_step} tokens of one step"
        raise DemixError(f"config key models.{model.name}.seed_tokens", cause, "raise it, or give 0")


def site_of(config: dict[str, Any], stage: str) -> dict[str, Any]:
    """The section `cluster` of a completed config, with the values of one stage."""
    cluster: dict[str, Any] = dict(config["cluster"])
    stages: dict[str, dict[str, Any]] = cluster.pop("stages")
    return cluster | stages.get(stage, {})


def _check_source(place: str, source: dict[str, Any]) -> None:
    paths = source["path"] if isinstance(source["path"], list) else [source["path"]]
    for path in paths:
        if "://" in path:
            refuse_secrets(f"{place}.path", path, LOG_IN)
    if source["kind"] == "url" and source["parts"] > len(paths):
        raise DemixError(
            f"{place}.parts",
            f"is {source['parts']} for {len(paths)} addresses",
            "set at most one part per address",
        )
    if source["kind"] == "url" and not all(path.startswith(("http://", "https://")) for path in paths):
        raise DemixError(
            f"{place}.path", "is not an address", "begin each address with http:// or https://, or use kind: files"
        )
    if source["kind"] == "hub" and not source["data_files"]:
        raise DemixError(f"{place}.data_files", "is missing", 'name files of the data set, such as ["data/*.parquet"]')
    if source["kind"] == "hub" and (source["sha256"] or source["bytes"]):
        raise DemixError(f"{place}.sha256", "is for the kinds files and url", "pin a commit by revision instead")
    if source["kind"] == "hub" and not source["revision"] and not local(source["path"]):
        raise DemixError(f"{place}.revision", "is missing", "pin a commit, or name a branch such as main")
