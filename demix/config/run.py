"""The config that a run keeps below its folder, with the version of the run's files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demix.errors import DemixError
from demix.files import read_json, write_json
from demix.files.json_files import SEAL, read_unsealed

# Goes up with every change after which files of an older run cannot be read.
FORMAT = 2
# What a run's config.json has beside the keys of a config.
BESIDE = ("format", SEAL)


def write_run_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write the completed `config` of a run with the version of its files.

    Its keys keep their order: that of the domains is the order that the report shows.
    """
    write_json(path, {"format": FORMAT, **config}, sort_keys=False)


def read_run_config(run: Path) -> dict[str, Any]:
    """The config of the run in the folder `run`. Raises DemixError for a run of another version or a damaged file."""
    refuse_other_format(run)
    config = read_json(run / "config.json")
    del config["format"]
    return config


def refuse_other_format(run: Path) -> None:
    """Raise DemixError if the folder `run` holds the config of a run whose files have another version."""
    path = run / "config.json"
    if path.exists() and (found := read_unsealed(path).get("format")) != FORMAT:
        told = "none" if found is None else repr(found)
        cause = f"is of a run of another version of demix (format {told}, not {FORMAT})"
        raise DemixError(path, cause, f"delete or rename {run}, then run the workflow again")
