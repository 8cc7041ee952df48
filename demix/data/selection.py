"""Which of a record's fields become text, and which records are used."""

import re
from typing import Any


def select(fields: dict[str, Any], path: str) -> Any:
    """The value at `path` in a record: a field's name, or names joined by dots, where `[]` represents every item.

    `full_text[].paragraphs[]` gives the list of all paragraphs of all sections. A null on the way gives None, or no
    item. Raises LookupError with the step that the record lacks.
    """
    if path in fields:
        return fields[path]
    values: list[Any] = [fields]
    for step in path.split("."):
        name, *lists = step.split("[]")
        found = []
        for value in values:
            if not isinstance(value, dict) or name not in value:
                raise LookupError(name)
            found.append(value[name])
        for _ in lists:
            if any(not isinstance(value, list) for value in found if value is not None):
                raise LookupError(step)
            found = [item for value in found if value is not None for item in value]
        values = [value for value in found if value is not None]
    if "[]" in path:
        return values
    return values[0] if values else None


def select_or_none(fields: dict[str, Any], path: str) -> Any:
    """As `select`, and None for a path that the record lacks."""
    try:
        return select(fields, path)
    except LookupError:
        return None


def as_text(value: Any) -> str:
    """`value` as the text of a document: a list's items are joined by newlines, null is the empty text.

    Raises TypeError with the name of a type that is not text.
    """
    if isinstance(value, list):
        return "\n".join(map(as_text, value))
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(type(value).__name__)
    return value


def column(path: str, names: list[str]) -> str:
    """The column out of `names` that `path` starts from."""
    return path if path in names else re.split(r"[.\[]", path, maxsplit=1)[0]


def matches(fields: dict[str, Any], where: dict[str, Any]) -> bool:
    """Whether a record has, for each path in `where`, the value, one of the values, or a value within min and max.

    Bounds are inclusive; numbers are compared as numbers, all else (ISO dates) as text. A record without the field,
    or with a null there, does not match.
    """
    for path, wanted in where.items():
        value = select_or_none(fields, path)
        if value is None:
            return False
        if isinstance(wanted, dict):
            if not _within(value, wanted.get("min"), wanted.get("max")):
                return False
        elif not any(value == one or str(value) == str(one) for one in as_list(wanted)):
            return False
    return True


def _within(value: Any, low: Any, high: Any) -> bool:
    if isinstance(low if low is not None else high, str):
        value = str(value)
    else:
        try:
            # A whole number may be more than a float holds.
            value = value if isinstance(value, int) else float(value)
        except (TypeError, ValueError, OverflowError):
            return False
    return (low is None or low <= value) and (high is None or value <= high)


def as_list(value: Any) -> Any:
    """The values of a condition: a list, or one value as a list."""
    return value if isinstance(value, (list, tuple)) else [value]
