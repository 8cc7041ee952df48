"""The config file: checked against workflow/schemas/config.schema.yaml, defaults filled in, wrong keys named."""

import difflib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator, ValidationError, validators

from demix.config import placement
from demix.config.architecture import architecture_from
from demix.config.systems import trained
from demix.errors import DemixError

# Keys of `training` and `adaptation` that say how a run is computed and kept, not which run it is.
HOW = ("checkpoint_every", "keep_checkpoints", "micro_sequences", "compile", "checkpoint_activations")
SCHEMA = Path(__file__).parents[2] / "workflow" / "schemas" / "config.schema.yaml"


def load_config(path: str | Path) -> dict:
    """The checked and completed config in the YAML file `path`."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DemixError(path, "does not exist", "give the path of a config file, such as config/sample.yaml") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DemixError(path, f"is not YAML ({error})", "mend the line that is named") from None
    if not isinstance(content, dict):
        raise DemixError(path, "is not a mapping of keys", "start from config/sample.yaml")
    return complete(content)


def complete(config: dict) -> dict:
    """`config` with every default of the schema filled in.

    Raises DemixError that names the first wrong key, what is allowed, and the nearest known key.
    """
    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
    # Defaults are filled while validating, so that they are checked like given values.
    errors = sorted(_with_defaults(_Validator)(schema).iter_errors(config), key=lambda e: list(map(str, e.path)))
    if errors:
        raise _readable(errors[0])
    _check_across(config)
    return config


# YAML's 1.0e6 is no count of anything, and .nan no learning rate.
_Validator = validators.extend(
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine_many(
        {
            "integer": lambda _, value: isinstance(value, int) and not isinstance(value, bool),
            "number": lambda _, value: (
                isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            ),
        }
    ),
)


def _with_defaults(validator: type) -> type:
    check_properties = validator.VALIDATORS["properties"]

    def fill(self: Any, properties: dict, instance: Any, schema: dict) -> Iterator[ValidationError]:
        if isinstance(instance, dict):
            for name, part in properties.items():
                default = part.get("default")
                if "default" in part:
                    instance.setdefault(name, default.copy() if isinstance(default, (dict, list)) else default)
        yield from check_properties(self, properties, instance, schema)

    return validators.extend(validator, {"properties": fill})


def _readable(error: ValidationError) -> DemixError:
    place = ".".join(map(str, error.absolute_path))
    match error.validator:
        case "additionalProperties":
            known = list(error.schema["properties"])
            key = next(name for name in error.instance if name not in known)
            nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            return DemixError(
                f"config key {place}.{key}".replace(" .", " "),
                "is not known",
                f"did you mean {nearest}? Allowed here: {', '.join(known)}",
            )
        case "required":
            key = error.message.split("'")[1]
            return DemixError(
                f"config key {place}.{key}".replace(" .", " "), "is missing", "add it (see config/README.md)"
            )
        case "pattern" | "not" if "propertyNames" in error.absolute_schema_path:
            return DemixError(
                f"config key {place}.{error.instance}",
                "is not a usable domain name",
                "use lower-case letters, digits and _, other than the reserved words tokens and dense",
            )
    if error.context:
        error = min(error.context, key=lambda e: len(e.schema_path))
        allowed = "one of the forms in config/README.md"
    else:
        allowed = f"{error.validator} {error.validator_value}".replace("enum ", "one of ").replace("type ", "")
        if "number" in allowed and isinstance(error.instance, str):
            allowed += " (YAML takes 1e-3 for text: write 1.0e-3)"
    return DemixError(f"config key {place}", f"is {error.instance!r}", f"allowed is {allowed}")


def _check_across(config: dict) -> None:
    """Rules that join several keys, which a schema cannot say."""
    training, novel = config["domains"]["training"], config["domains"]["novel"]
    for name in novel:
        if name in training:
            raise DemixError(f"config key domains.novel.{name}", "is a training domain too", "name it in one list only")
    for kind, domains in config["domains"].items():
        for name, domain in domains.items():
            _check_source(f"config key domains.{kind}.{name}.source", domain["source"])
    architecture = architecture_from(config["architecture"])
    for model in (one for one in trained(config) if one.name == one.base):
        settings = model.settings
        try:
            placement.place(model.kind, list(training), settings["sequences"], settings["ranks"], settings["replicas"])
        except DemixError as error:
            raise DemixError(f"config key training.{error.subject}", error.cause, error.cure) from None
        step_tokens = len(training) * settings["sequences"] * architecture.context
        if settings["sweep"] and settings["sweep"]["tokens"] < step_tokens:
            cause = f"is {settings['sweep']['tokens']}, less than one step of {model.name} of {step_tokens} tokens"
            raise DemixError("config key training.sweep.tokens", cause, "raise it")
    adaptation = config["adaptation"]
    try:
        placement.place_experts(["novel"], adaptation["sequences"], adaptation["ranks"])
    except DemixError as error:
        raise DemixError(f"config key adaptation.{error.subject}", error.cause, error.cure) from None
    for stage in ("train", "adapt"):
        cluster = site_of(config, stage)
        if cluster["grace_seconds"] >= 60 * cluster["minutes"]:
            cause = (
                f"is {cluster['grace_seconds']}, which leaves nothing of the {cluster['minutes']} minutes of {stage}"
            )
            raise DemixError("config key cluster.grace_seconds", cause, "lower it, or raise cluster.minutes")
    removal = config["removal"]
    for name in removal["retrain_without"]:
        if name not in training:
            near = difflib.get_close_matches(name, training, n=1, cutoff=0.0)[0]
            raise DemixError(
                "config key removal.retrain_without", f"{name} is no training domain", f"did you mean {near}?"
            )
    if removal["retrain_without"] and removal["replacement"] not in novel:
        raise DemixError(
            "config key removal.replacement",
            f"is {removal['replacement']!r}, which is no novel domain",
            f"name one of: {', '.join(novel) or '(add a novel domain first)'}",
        )
    if "history" not in config["evaluation"]["weights"]:
        raise DemixError(
            "config key evaluation.weights", "lacks history, on which the report's tables rest", "add history"
        )
    if re.search(r"://[^/@]*:[^/@]+@", config["tracking"]["uri"]):
        raise DemixError(
            "config key tracking.uri",
            "holds a password, which would be printed and recorded",
            "leave it out and set PGPASSWORD or MLFLOW_TRACKING_PASSWORD in the environment",
        )


def site_of(config: dict, stage: str) -> dict:
    """The section `cluster` of a completed config with the values of one stage."""
    cluster = dict(config["cluster"])
    return cluster | cluster.pop("stages").get(stage, {})


def _check_source(place: str, source: dict) -> None:
    paths = source["path"] if isinstance(source["path"], list) else [source["path"]]
    if source["kind"] == "url" and source["parts"] > len(paths):
        raise DemixError(
            f"{place}.parts",
            f"is {source['parts']} for {len(paths)} addresses",
            "give at most one part to each",
        )
    if source["kind"] == "url" and not all(path.startswith(("http://", "https://")) for path in paths):
        raise DemixError(f"{place}.path", "is no address", "begin it with http:// or https://, or use kind: files")
    if source["kind"] == "hub" and not source["data_files"]:
        raise DemixError(f"{place}.data_files", "is missing", 'name files of the data set, such as ["data/*.parquet"]')
    if source["kind"] == "hub" and (source["sha256"] or source["bytes"]):
        raise DemixError(f"{place}.sha256", "is for files and addresses", "pin a commit by revision instead")
    if source["kind"] == "hub" and not source["revision"] and not all(Path(path).is_dir() for path in paths):
        raise DemixError(f"{place}.revision", "is missing", "pin a commit, or name a branch such as main")


def reference() -> str:
    """config/README.md: every key with its type, default and meaning, as Markdown."""
    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
    lines = [
        "# Config reference",
        "",
        "Made from `workflow/schemas/config.schema.yaml` by `demix config --reference > config/README.md`.",
        "Unknown keys are refused and the nearest known one is named. `demix config FILE` checks a file and prints it",
        "with all defaults filled in.",
        "",
        "| key | allowed | default | meaning |",
        "|---|---|---|---|",
    ]
    for place, part, required in _keys(schema, schema, ""):
        default = (
            "required"
            if required
            else f"`{yaml.safe_dump(part['default'], default_flow_style=True).strip().removesuffix('...').strip()}`"
            if "default" in part
            else "–"
        )
        lines.append(f"| `{place}` | {_allowed(part)} | {default} | {part.get('description', '')} |")
    return "\n".join(lines) + "\n"


def _keys(part: dict, schema: dict, place: str) -> Iterator[tuple[str, dict, bool]]:
    for name, child in part.get("properties", {}).items():
        child = schema["$defs"][child["$ref"].rsplit("/", 1)[1]] | child if "$ref" in child else child
        path = f"{place}{name}"
        yield path, child, name in part.get("required", ())
        if "overrides" in str(child.get("$ref")):
            continue
        yield from _keys(child, schema, f"{path}.")
        if isinstance(nested := child.get("additionalProperties"), dict) and path.endswith("training"):
            domain = schema["$defs"][nested["$ref"].rsplit("/", 1)[1]]
            yield from _keys(domain, schema, f"{path}.<domain>.".replace("training", "*"))


def _allowed(part: dict) -> str:
    if "enum" in part:
        return ", ".join(f"`{value}`" for value in part["enum"])
    if "anyOf" in part:
        return " or ".join(_allowed(choice) for choice in part["anyOf"])
    if "overrides" in part.get("$ref", ""):
        return "any key of `training`"
    kind = part.get("type", "")
    kind = " or ".join(kind) if isinstance(kind, list) else kind
    bounds = [
        f"{sign} {part[key]}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"))
        if key in part
    ]
    return " ".join([kind, *bounds])
