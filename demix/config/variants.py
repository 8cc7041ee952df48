"""Rows of `models` with options of `architecture` of their own, and the rows that they are compared with."""

from collections.abc import Mapping
from typing import Any

from demix.config.architecture import USUAL
from demix.config.rows import is_masked, model_rows


def variant_rows(config: Mapping[str, Any]) -> dict[str, str]:
    """The causal rows that differ from the row named like their kind in options alone, and the names of those rows."""
    rows = {name: row for name, row in model_rows(config).items() if not is_masked(config, row[1])}
    rest = {
        name: {key: value for key, value in settings.items() if key != "architecture"}
        for name, (_, settings) in rows.items()
    }
    return {
        name: kind.name
        for name, (kind, _) in rows.items()
        if rest[name] == rest.get(kind.name) and options_of(config, name) != options_of(config, kind.name)
    }


def options_of(config: Mapping[str, Any], row: str) -> dict[str, str]:
    """The options of `architecture` of a row of `models`."""
    given = (config.get("architecture") or {}) | (model_rows(config)[row][1].get("architecture") or {})
    return {name: given.get(name, usual) for name, usual in USUAL.items()}
