"""Declaring settings, and building typed objects from JSON or YAML.

Each setting is declared once, as a field of a subclass of `Settings`. The field has the type, the bounds, the default,
and a description with the unit. The sections of the config and the settings of the stages are such classes, which share
fields by inheritance. A wrong value raises an error that names its key.
"""

import json
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

# pydantic would search every installed package for plug-ins, which needs 0.1 s.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    Strict,
    ValidationError,
    create_model,
    model_serializer,
)
from pydantic_core import ErrorDetails

from demix.errors import DemixError, nearest

T = TypeVar("T")
S = TypeVar("S", bound="Settings")

_SIGNS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "minItems": ", at least",
    "minProperties": ", at least",
}


def _listed(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError
    return tuple(value)


def _distinct(items: tuple[Any, ...]) -> tuple[Any, ...]:
    # 1 and 1.0 are equal, but count as two values.
    if len({(type(one), one) for one in items}) < len(items):
        raise ValueError("holds one value twice", "name each value once")
    return items


def _number(value: Any) -> Any:
    # YAML parses 1e-3 as text.
    return float(value) if isinstance(value, str) and re.fullmatch(r"[+-]?\d+[eE][+-]?\d+", value) else value


# Strict types do not accept 1.0e6 as a count, true as a number or .nan as a learning rate.
Integer = Annotated[int, Strict()]
Number = Annotated[float, Strict(), AllowInfNan(False), BeforeValidator(_number)]
Text = Annotated[str, Strict()]
Switch = Annotated[bool, Strict()]
Positive = Annotated[Integer, Field(ge=1)]
Seed = Annotated[Integer, Field(ge=0, le=2**31 - 1)]
Items = Annotated[tuple[T, ...], BeforeValidator(_listed)]
DistinctItems = Annotated[Items[T], AfterValidator(_distinct), Field(json_schema_extra={"uniqueItems": True})]


def absent() -> Any:
    """The default of a key that stays absent if it is not given or null."""
    return None


def omitted() -> Any:
    """The default of a key that stays absent if it is not given, but for which null is a value."""
    return None


class Settings(BaseModel):
    """The base of all classes of settings: frozen, strict about keys, and with checks that are built at first use.

    Building the checks of all classes needs half a second, and a command uses few of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, validate_default=False)

    def replace(self, **changes: Any) -> Self:
        """The same settings with other values, which are checked."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self).model_validate(values | changes, by_alias=False, by_name=True)

    def as_dict(self) -> dict[str, Any]:
        """All settings by name, including those that are absent in a file."""
        return self.model_dump(warnings=False)

    @model_serializer(mode="wrap")
    def _without_absent(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """In JSON leave out keys that settings can be without (`absent`, `omitted`)."""
        found: dict[str, Any] = handler(self)
        # There may be null instead of settings.
        declared = type(self).model_fields if isinstance(self, Settings) and info.mode == "json" else {}
        for name, field in declared.items():
            key, made = field.alias or name, field.default_factory
            if found[key] is None and (made is absent or (made is omitted and name not in self.model_fields_set)):
                del found[key]
        return found


class OpenSettings(Settings):
    """Settings that may occur together with undeclared keys, which are ignored."""

    model_config = ConfigDict(extra="ignore")


def names_of(kind: type[Settings]) -> tuple[str, ...]:
    """The names of the settings that a class declares or inherits, in order."""
    return tuple(kind.model_fields)


def partial(name: str, /, *kinds: type[Settings], **more: Any) -> type[Any]:
    """Make a class called `name` with all settings of `kinds` and those in `more` (types by name), none required.

    No setting of the class has a default, because a missing key overrides nothing.
    """
    fields: dict[str, Any] = {key: (hint, Field(default_factory=omitted)) for key, hint in more.items()}
    for key, info in (field for kind in kinds for field in kind.model_fields.items()):
        about = Field(description=info.description)
        hint: Any = Annotated.__class_getitem__((info.annotation, *info.metadata, about))  # type: ignore[attr-defined]
        fields.setdefault(key, (hint, Field(default_factory=omitted)))
    return create_model(name, __base__=Settings, **fields)


def written(given: Any) -> dict[str, Any]:
    """Settings as in a file, with defaults for those that were not given."""
    found: dict[str, Any] = given.model_dump(mode="json", by_alias=True, warnings=False)
    return found


def settings_from(kind: type[S], values: Mapping[str, Any] | str, subject: str = "--settings") -> S:
    """Make an object of the settings class `kind` from a mapping or from its JSON text.

    Raises DemixError that names the first wrong key below `subject` and its allowed values. For an unknown key, the
    error also names the nearest known one.
    """
    if isinstance(values, str):
        try:
            values = json.loads(values)
        except (ValueError, RecursionError) as error:
            raise DemixError(
                subject, f"is not JSON ({error})", "copy it from the command that snakemake prints"
            ) from None
    if not isinstance(values, Mapping):
        raise DemixError(subject, f"is {type(values).__name__}, not a mapping", f"give the fields of {kind.__name__}")
    for key in values:
        if not isinstance(key, str):
            raise DemixError(f"{subject}.{key}".replace(" .", " "), "is not a name of a setting", "use text as names")
    try:
        return kind.model_validate(values)
    except RecursionError:
        raise DemixError(subject, "is nested too deeply", f"give the fields of {kind.__name__}") from None
    except ValidationError as error:
        raise _readable(error, kind.model_json_schema(), values, subject) from None


def _readable(error: ValidationError, schema: dict[str, Any], values: Any, subject: str) -> DemixError:
    """The error for the first fault, in the order of the keys' names."""
    faults = error.errors(include_url=False)
    # pydantic also reports a tuple of wrong items as too short.
    below = {fault["loc"][:end] for fault in faults for end in range(len(fault["loc"]))}
    fault = min((fault for fault in faults if fault["loc"] not in below), key=_order)
    place, value, part = _reached(schema, fault["loc"], values)
    cause, cure = None, None
    match fault["type"]:
        case "extra_forbidden" | "invalid_key":
            known = [name for choice in _choices(schema, part) for name in choice.get("properties", {})]
            cause, cure = "is not known", nearest(place[-1], known, "remove it")
            kinds = _kinds(schema, _reached(schema, place[:-1], values)[2])
            if fitting := [kind for kind, of in kinds.items() if place[-1] in of["properties"]]:
                cause = f"is not a key of kind {fault['loc'][-2]}"
                cure = f"use kind: {' or '.join(fitting)}, or remove it"
        case "missing":
            place, part = (*place, fault["loc"][-1]), _inside(schema, part, fault["loc"][-1])
            cause, cure = "is missing", f"add it: {part.get('description', allowed(part))}"
        case "union_tag_not_found" | "union_tag_invalid":
            place, tag = (*place, "kind"), fault["ctx"].get("tag")
            cause = "is missing" if tag is None else f"is {tag}"
            cure = f"use one of {', '.join(_kinds(schema, part))}"
        case "value_error":
            cause, cure = (*fault["ctx"]["error"].args, None, None)[:2]
    if cause is None or cure is None:
        cause, cure = f"is {value!r:.200}", f"allowed is {allowed(part)}"
    # A subject that ends in a space, such as "config key ", is joined to the key without a dot.
    return DemixError(f"{subject}.{'.'.join(map(str, place))}".replace(" .", " "), cause, cure)


_OF_A_KEY = ("extra_forbidden", "invalid_key", "missing")


def _order(fault: ErrorDetails) -> tuple[list[str], int]:
    """The sort key of a fault: its location, or, for an unknown or missing key, that of the mapping around it."""
    place = [str(part) for part in fault["loc"]]
    if fault["type"] in _OF_A_KEY:
        return place[:-1], _OF_A_KEY.index(fault["type"])
    return place, -1


def _reached(
    schema: dict[str, Any], location: tuple[int | str, ...], values: Any
) -> tuple[tuple[int | str, ...], Any, dict[str, Any]]:
    """The keys of a fault's location that exist in `values`, and the value and the subschema at their end.

    pydantic's locations also contain the names of types and, for unions, the kinds.
    """
    place, found = list[int | str](), schema
    for step in location:
        try:
            values = values[step]
        except (KeyError, IndexError, TypeError):
            if step not in _kinds(schema, found):
                continue
        else:
            place.append(step)
        found = _inside(schema, found, step)
    return tuple(place), values, found


def _inside(schema: dict[str, Any], part: dict[str, Any], step: int | str) -> dict[str, Any]:
    """The subschema of a key, an item or a kind within `part`; `part` itself if there is none."""
    for choice in _choices(schema, part):
        named = choice.get("properties", {}).get(step) or choice.get("additionalProperties")
        child = choice.get("items") if isinstance(step, int) else named
        if isinstance(child, dict):
            return resolved(schema, child)
    return _kinds(schema, part).get(str(step), part)


def _choices(schema: dict[str, Any], part: dict[str, Any]) -> list[dict[str, Any]]:
    """A subschema and its alternatives."""
    return [part, *(resolved(schema, choice) for choice in part.get("anyOf", ()))]


def _kinds(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The subschema of each kind of a union that a subschema allows."""
    unions = [choice["discriminator"]["mapping"] for choice in _choices(schema, part) if "discriminator" in choice]
    return {kind: resolved(schema, {"$ref": of}) for union in unions for kind, of in union.items()}


def resolved(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """A subschema, merged with the definition that its `$ref` names."""
    return schema["$defs"][part["$ref"].rsplit("/", 1)[1]] | part if "$ref" in part else part


def allowed(part: dict[str, Any]) -> str:
    """The type and bounds that a subschema requires, in words."""
    if "anyOf" in part:
        return " or ".join(dict.fromkeys(allowed(choice) for choice in part["anyOf"]))
    if "$ref" in part or "oneOf" in part:
        return "object"
    if "enum" in part:
        return f"one of {', '.join(str(value) for value in part['enum'])}"
    if "const" in part:
        return str(part["const"])
    bounds = [f"{sign} {part[key]}" for key, sign in _SIGNS.items() if key in part]
    # Editors show this key of the schema, too.
    words = part.get("patternErrorMessage") or f"that matches {part.get('pattern')}"
    pattern = [words] if "pattern" in part else []
    items = [f"of {allowed(part['items'])}"] if "items" in part else []
    return " ".join([part.get("type", "any value"), *items, *bounds, *pattern]).replace(" ,", ",")
