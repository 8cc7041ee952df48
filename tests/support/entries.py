"""Configs that name models: the tiny config of the workflow's tests with model entries of a test's own."""

from collections.abc import Mapping
from typing import Any

from demix.run.check import completed_run
from demix.run.models import Model
from demix.run.run import Run
from support.dry_run import TINY


def tiny(models: Mapping[str, Any] | None = None, **sections: Any) -> Run:
    """The run of the tiny config with these `models`; the keys of `sections` override those of its sections."""
    config = TINY | {"models": dict(models or {})}
    merged = {name: config.get(name, {}) | given for name, given in sections.items() if isinstance(given, dict)}
    return completed_run(config | sections | merged)


def trained(run: Run, name: str) -> Model:
    """The model `name` that a training makes."""
    return next(model for model in run.planned if model.name == name)
