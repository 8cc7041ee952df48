"""demix: language models made of domain experts (Gururangan et al. 2021, "DEMix Layers").

`demix.load` opens a model and `demix.open_run` a run; `demix.api` describes them. They are imported when they are first
used.
"""

# Type checkers treat this name like `typing.TYPE_CHECKING`. Importing `typing` would be most of the import time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from demix.api import NextToken, OpenedModel, OpenedRun, TextFigures, TokenScores, load, open_run
    from demix.errors import DemixError

__all__ = ["DemixError", "NextToken", "OpenedModel", "OpenedRun", "TextFigures", "TokenScores", "load", "open_run"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'demix' has no attribute {name!r}")
    from demix import api

    value: object = getattr(api, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
