"""The checkpoint formats of other software: a module per family, or for families that differ in few options.

A module's `FORMATS` are its formats. Nothing lists the modules: a new module adds a family that can be imported and
exported.
"""

import pkgutil
from importlib import import_module

from demix.model.format import Format


def _found() -> dict[str, Format]:
    modules = [import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return {one.name: one for module in modules for one in module.FORMATS}


# By model_type. Of several that can hold a model, the first does.
FORMATS = _found()
