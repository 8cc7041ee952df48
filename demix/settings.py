"""Settings that a stage is given as JSON, as frozen dataclasses."""

import dataclasses
import json
import types
import typing
from typing import Any, TypeVar

from demix.errors import DemixError

T = TypeVar("T")


def settings_from(kind: type[T], values: dict[str, Any] | str, subject: str = "--settings") -> T:
    """A (nested) frozen dataclass from a mapping or its JSON text; unknown and missing keys are refused.

    Raises DemixError naming the key.
    """
    if isinstance(values, str):
        try:
            values = json.loads(values)
        except ValueError as error:
            raise DemixError(
                subject, f"is not JSON ({error})", "copy it from the command that snakemake prints"
            ) from None
    if not isinstance(values, dict):
        raise DemixError(subject, f"is {type(values).__name__}, not a mapping", f"give the fields of {kind.__name__}")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in values:
        if key not in fields:
            raise DemixError(f"{subject}.{key}", "is not a known setting", f"allowed are {', '.join(fields)}")
    arguments = {}
    for name, field in fields.items():
        if name not in values:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise DemixError(f"{subject}.{name}", "is missing", f"add it ({hints[name]})")
            continue
        value = values[name]
        nested = [a for a in (hints[name], *typing.get_args(hints[name])) if dataclasses.is_dataclass(a)]
        if nested and isinstance(value, dict) and not _is_mapping(hints[name]):
            value = settings_from(nested[0], value, f"{subject}.{name}")
        elif nested and isinstance(value, list) and typing.get_origin(hints[name]) is tuple:
            value = tuple(settings_from(nested[0], item, f"{subject}.{name}[{n}]") for n, item in enumerate(value))
        elif not _fits(value, hints[name]):
            raise DemixError(f"{subject}.{name}", f"is {value!r}", f"give {_told(hints[name])}")
        elif isinstance(value, list):
            value = tuple(value)
        arguments[name] = value
    return kind(**arguments)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value is of the type that a field declares; a list stands for a tuple."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if isinstance(hint, types.UnionType):
        return any(_fits(value, choice) for choice in inner)
    if origin is tuple:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, inner[1]) for item in value.values())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _told(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _is_mapping(hint: Any) -> bool:
    return typing.get_origin(hint) is dict
