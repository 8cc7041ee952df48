"""Texts that are generated from the declared settings: config/README.md, and the JSON schema for editors."""

import re
import sys
from collections.abc import Iterator
from typing import Any

import yaml

from demix.config.config import Config
from demix.config.models import KINDS
from demix.settings import allowed, resolved


def reference() -> str:
    """The text of config/README.md: every key with its type, bounds, default and meaning, as Markdown."""
    lines = [
        "# Config reference",
        "",
        "Generated from `demix/config/config.py` by `demix config --reference > config/README.md`. An unknown",
        "key is an error, which names the nearest known key. `demix config FILE` checks a file and prints what it",
        "runs; `demix config --values FILE` prints it with all defaults filled in.",
        "",
        "| key | allowed | default | meaning |",
        "|---|---|---|---|",
    ]
    schema = Config.model_json_schema()
    for place, part, required in _keys(schema, schema, ""):
        # An optional section is empty by default.
        empty: dict[str, Any] = {"default": {}} if part.get("type") == "object" else {}
        default = (
            "required"
            if required
            else f"`{inline(declared['default'])}`"
            if "default" in (declared := empty | part)
            else "–"
        )
        # Without code marks, Markdown would read the brackets of a pattern as a link.
        kinds = re.sub(r"(?<=that matches )(\S+)", r"`\1`", allowed(part)).replace("|", "\\|")
        lines.append(f"| `{place}` | {kinds} | {default} | {part.get('description', '')} |")
    return "\n".join(lines) + "\n"


def editor_schema() -> str:
    """The text of workflow/schemas/config.schema.yaml, with which editors complete and check keys."""
    head = "# Generated from demix/config/config.py by `demix config --schema > workflow/schemas/config.schema.yaml`.\n"
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | _short(Config.model_json_schema())
    return head + str(yaml.safe_dump(schema, sort_keys=False, allow_unicode=True, width=1000, default_flow_style=None))


def _short(part: Any) -> Any:
    """A JSON schema without titles (they repeat the keys), and with null as a further type instead of an alternative.

    No key is required, because a key that a file lacks may be in its base.
    """
    if isinstance(part, list):
        return [_short(item) for item in part]
    if not isinstance(part, dict):
        return part
    match part.get("anyOf"):
        case [{"type": str(kind), **bounds}, {"type": "null"}] if "enum" not in bounds:
            part = {"type": [kind, "null"]} | bounds | {key: part[key] for key in part if key != "anyOf"}
    kinds = {"title": str, "required": list}
    return {key: _short(item) for key, item in part.items() if not isinstance(item, kinds.get(key, ()))}


def inline(value: Any) -> str:
    """A value as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=sys.maxsize, allow_unicode=True)
    return str(text.strip().removesuffix("...").strip())


def _keys(schema: dict[str, Any], part: dict[str, Any], above: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Each key below a part of the schema: path, subschema, and whether the key is required."""
    for name, child in part.get("properties", {}).items():
        path, child = f"{above}{name}", resolved(schema, child)
        yield path, child, name in part.get("required", ())
        yield from _keys(schema, child, f"{path}.")
        if path == "domains.training":
            yield from _keys(schema, schema["$defs"]["DomainSection"], "domains.*.<domain>.")
        if path == "lm_eval":
            yield from _keys(schema, schema["$defs"]["HarnessSection"], "lm_eval.")
        if path == "sources":
            shared = _keys(schema, schema["$defs"]["SharedSource"], "sources.<source>.")
            # The keys of a domain's source are listed only once, at shared sources.
            yield from (key for key in shared if not key[0].startswith("sources.<source>.source."))
        if path == "models":
            keys = f"any key of `training`, and {', '.join(_own_of_entries(schema))}"
            yield f"{path}.<name>", {"type": keys, "description": "The entry of one model, or null."}, False


def _own_of_entries(schema: dict[str, Any]) -> list[str]:
    """The keys that entries of `models` have in addition to those of `training`."""
    training = schema["$defs"]["TrainingSection"]["properties"]
    entries = [schema["$defs"][f"{kind}_entry"]["properties"] for kind in KINDS]
    found = {name: part for entry in entries for name, part in entry.items() if name not in training}
    found["kind"] = {"enum": [*KINDS]}
    return [f"`{name}` ({allowed(part)})" for name, part in found.items()]
