"""Declaring settings, and making typed objects of JSON or YAML.

Each setting is declared once, as a field of a class that `settings` made. The field states the type, the bounds, the
default, and a description with the unit. The sections of the config and the settings of the stages are such classes,
which share fields by inheritance. A wrong value raises an error that names its key.
"""

import copy
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, TypeVar, dataclass_transform

# pydantic would look for plug-ins of its own in every package that is installed, which takes a tenth of a second.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

from pydantic import (
    AfterValidator,
    AllowInfNan,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs, ErrorDetails, to_jsonable_python

from demix.errors import DemixError, nearest

T = TypeVar("T")

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
    # 1 and 1.0 are equal, but two values.
    if len({(type(one), one) for one in items}) < len(items):
        raise ValueError("holds one value twice", "name each value once")
    return items


# Strict types refuse 1.0e6 as a count, true as a number and .nan as a learning rate.
Integer = Annotated[int, Strict()]
Number = Annotated[float, Strict(), AllowInfNan(False)]
Text = Annotated[str, Strict()]
Switch = Annotated[bool, Strict()]
Positive = Annotated[Integer, Field(ge=1)]
Seed = Annotated[Integer, Field(ge=0, le=2**31 - 1)]
Items = Annotated[tuple[T, ...], BeforeValidator(_listed)]
DistinctItems = Annotated[Items[T], AfterValidator(_distinct), Field(json_schema_extra={"uniqueItems": True})]


def absent() -> Any:
    """The default of a key that settings without it stay without, as they do where it is null."""
    return None


def omitted() -> Any:
    """The default of a key that settings without it stay without, and that says something where it is null."""
    return None


def _remember(kind: Any, values: Any, make: Callable[[Any], Any]) -> Any:
    """Make an object of settings that knows the names of the values that it was given."""
    if isinstance(values, kind):
        return make(values)
    named: Iterable[str] = values if isinstance(values, Mapping) else ()
    if isinstance(values, ArgsKwargs):
        # Python gives the names of fields, of which some are words of Python's in a file.
        keys = {name: field.alias for name, field in vars(kind)["__pydantic_fields__"].items() if field.alias}
        values = ArgsKwargs(values.args, {keys.get(name, name): one for name, one in (values.kwargs or {}).items()})
        named = (*names_of(kind)[: len(values.args)], *(values.kwargs or {}))
    made = make(values)
    object.__setattr__(made, "_given", tuple(named))
    # What stands in a file beside the settings that are declared (`demix.model.manifest.Recorded`).
    object.__setattr__(made, "_file", values if isinstance(values, Mapping) else {})
    return made


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def settings(*, kw_only: bool = False, open: bool = False) -> Callable[[type[T]], type[T]]:
    """Make a class of settings: a frozen dataclass that checks its values.

    It refuses unknown keys; with `open` it leaves them out.
    """
    # A command uses few of the classes, whose checks take half a second to build in all.
    config = ConfigDict(extra="ignore" if open else "forbid", defer_build=True)
    made: Any = dataclass(frozen=True, kw_only=kw_only, config=config)

    def decorate(kind: Any) -> Any:
        kind._remember = model_validator(mode="wrap")(classmethod(_remember))  # type: ignore[arg-type]
        return made(kind)

    return decorate


def names_of(kind: type) -> tuple[str, ...]:
    """The names of the settings that a class declares or inherits, in order."""
    return tuple(field.name for field in dataclasses.fields(kind))


def partial(name: str, kind: type, /, **more: Any) -> type[Any]:
    """Make a class called `name` with all settings of `kind` and those in `more` (types by name), none required.

    No setting of the class has a default, because a missing key overrides nothing.
    """
    types = {}
    for key, info in vars(kind)["__pydantic_fields__"].items():
        field = info.asdict()
        described = Field(description=field["attributes"]["description"])
        types[key] = Annotated[(field["annotation"], *field["metadata"], described)]  # noqa: F821
    hints = more | types
    values = dict.fromkeys(hints, Field(default_factory=omitted)) | {"__annotations__": hints}
    return settings(kw_only=True)(type(name, (), values))


def written(given: Any) -> dict[str, Any]:
    """Settings as they stand in a file, those that were given first, with the defaults of the others.

    Keys that settings can be without are left out where nobody gave them (`absent`, `omitted`).
    """
    # A key may be a word of Python's, such as from, and its field then has another name.
    fields = {field.alias or name: (name, field) for name, field in vars(type(given))["__pydantic_fields__"].items()}
    named = [key for key in vars(given).get("_given", ()) if key in fields]
    values = {key: getattr(given, fields[key][0]) for key in (*named, *fields)}
    left_out = {absent: fields.keys(), omitted: fields.keys() - {*named}}
    return {
        key: _written(value)
        for key, value in values.items()
        if value is not None or key not in left_out.get(fields[key][1].default_factory, ())
    }


def _written(value: Any) -> Any:
    """A value of settings as JSON."""
    if dataclasses.is_dataclass(value):
        return written(value)
    if isinstance(value, dict):
        return {key: _written(each) for key, each in value.items()}
    return to_jsonable_python(value)


def settings_from(kind: type[T], values: Mapping[str, Any] | str, subject: str = "--settings") -> T:
    """Make an object of the settings class `kind` from a mapping or from its JSON text.

    Raises DemixError that names the first wrong key below `subject` and what is allowed there. For an unknown key the
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
            raise DemixError(f"{subject}.{key}".replace(" .", " "), "is no name of a setting", "write names as text")
    try:
        _refuse_huge(values, subject)
        found: T = _adapter(kind).validate_python(values)  # type: ignore[arg-type]
    except RecursionError:
        raise DemixError(subject, "is nested too deeply", f"give the fields of {kind.__name__}") from None
    except ValidationError as error:
        numbers = _with_numbers(error, values)
        if numbers != values:
            return settings_from(kind, numbers, subject)
        raise _readable(error, schema_of(kind), values, subject) from None
    return found


def _with_numbers(error: ValidationError, values: Mapping[str, Any]) -> Any:
    """The values with what stands there as text where `error` asks for a number: YAML reads 1e-3 as text."""
    found = copy.deepcopy(values)
    for fault in error.errors(include_url=False):
        place, value = _reached(fault["loc"], values)
        if fault["type"] == "float_type" and re.fullmatch(r"[+-]?\d+[eE][+-]?\d+", str(value)):
            holder: Any = found
            for part in place[:-1]:
                holder = holder[part]
            holder[place[-1]] = float(value)
    return found


def _refuse_huge(values: Any, subject: str) -> None:
    """Raise DemixError for a whole number of more than 64 bits, which no file holds and Python may refuse to write."""
    for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        place = f"{subject}.{key}".replace(" .", " ")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise DemixError(place, "is a whole number of more than 64 bits", "give a smaller number")
        if isinstance(value, Mapping | list | tuple):
            _refuse_huge(value, place)


def schema_of(kind: type) -> dict[str, Any]:
    """The JSON schema of a class of settings."""
    return _adapter(kind).json_schema()


@lru_cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _readable(error: ValidationError, schema: dict[str, Any], values: Any, subject: str) -> DemixError:
    """The error for the first fault, in the order of the keys' names."""
    faults = error.errors(include_url=False)
    # pydantic also reports a tuple of wrong items as too short.
    below = {fault["loc"][:end] for fault in faults for end in range(len(fault["loc"]))}
    fault = min((fault for fault in faults if fault["loc"] not in below), key=_order)
    place, value = _reached(fault["loc"], values)
    cause, cure = None, None
    match fault["type"]:
        case "unexpected_keyword_argument" | "extra_forbidden" | "invalid_key":
            holder = _part(schema, place[:-1])
            choices = [resolved(schema, choice) for choice in (holder, *holder.get("anyOf", ()))]
            known = [name for choice in choices for name in choice.get("properties", {})]
            cause, cure = "is not known", nearest(place[-1], known, "leave it out")
        case "missing":
            place = (*place, fault["loc"][-1])
            cause, cure = (
                "is missing",
                f"add it: {_part(schema, place).get('description', allowed(_part(schema, place)))}",
            )
        case "value_error":
            cause, cure = (*fault["ctx"]["error"].args, None, None)[:2]
    if cause is None or cure is None:
        cause, cure = f"is {value!r:.200}", f"allowed is {allowed(_part(schema, place))}"
    # A subject that ends in a space, such as "config key ", takes the key without a dot.
    return DemixError(f"{subject}.{'.'.join(map(str, place))}".replace(" .", " "), cause, cure)


_OF_A_KEY = ("unexpected_keyword_argument", "extra_forbidden", "invalid_key", "missing")


def _order(fault: ErrorDetails) -> tuple[list[str], int]:
    """The sort key of a fault: its place, or the mapping around a key that is unknown or missing."""
    place = [str(part) for part in fault["loc"]]
    if fault["type"] in _OF_A_KEY:
        return place[:-1], _OF_A_KEY.index(fault["type"])
    return place, -1


def _reached(location: tuple[int | str, ...], values: Any) -> tuple[tuple[int | str, ...], Any]:
    """The keys of a fault's location that exist in `values`, and the value at their end.

    pydantic writes the names of types among them.
    """
    place: list[int | str] = []
    for part in location:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            continue
        place.append(part)
    return tuple(place), values


def _part(schema: dict[str, Any], place: Sequence[int | str]) -> dict[str, Any]:
    """The subschema that a JSON schema has for one place."""
    found = schema
    for step in place:
        found = next(part for choice in (found, *found.get("anyOf", ())) if (part := _child(schema, choice, step)))
    return found


def _child(schema: dict[str, Any], part: dict[str, Any], step: int | str) -> dict[str, Any] | None:
    part = resolved(schema, part)
    children = part.get("properties", {})
    if isinstance(step, int) and "items" in part:
        return resolved(schema, part["items"])
    child = children.get(step, part.get("additionalProperties") or None)
    return None if child in (None, True) else resolved(schema, child)


def resolved(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """A subschema, merged with the definition that its `$ref` names."""
    return schema["$defs"][part["$ref"].rsplit("/", 1)[1]] | part if "$ref" in part else part


def allowed(part: dict[str, Any]) -> str:
    """The type and bounds that a subschema requires, in words."""
    if "anyOf" in part:
        return " or ".join(dict.fromkeys(allowed(choice) for choice in part["anyOf"]))
    if "$ref" in part:
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
