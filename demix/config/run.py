"""The config that a run keeps in its folder, with the format version of the run's files."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demix.errors import DemixError, nearest, printable
from demix.files import fingerprint, read_json, write_json
from demix.files.json_files import SEAL, read_unsealed

# Every change that makes files of older runs unreadable raises this version.
FORMAT = 3
# The pattern of a run's name, and the pattern in words.
# Names of folders, experiments and jobs hold it; a file system takes 255 bytes.
NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
NAMED = "of at most 100 letters, digits, dots, _ and -, the first a letter or digit"
# The keys of a run's config.json that are no keys of a config.
BESIDE = ("format", SEAL)


def write_run_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write the completed `config` of a run with the format version of its files.

    The keys keep their order, because the report shows the domains in this order.
    """
    write_json(path, {"format": FORMAT, **config}, sort_keys=False)


def read_run_config(run: Path) -> dict[str, Any]:
    """The config of the run in the folder `run`. Raises DemixError for a run of another version or a damaged file."""
    if not os.path.isfile(run / "config.json"):
        runs = {path.parent: None for folder in (run.parent, Path("results")) for path in folder.glob("*/config.json")}
        cause = "is missing, so its folder is none of a run"
        raise DemixError(run / "config.json", cause, nearest(run, sorted(runs), "name results/<run>"))
    refuse_other_format(run)
    config = read_json(run / "config.json")
    del config["format"]
    return config


def config_fingerprint(config: Mapping[str, Any]) -> str:
    """A digest of all settings of a run but its name: equal for runs of the same settings."""
    return fingerprint({key: value for key, value in config.items() if key != "run"})


def refuse_other_domains(run: Path, config: Mapping[str, Any]) -> None:
    """Raise DemixError if the folder `run` is that of a run with none of the domains of the completed `config`."""
    path = run / "config.json"
    there = {} if not path.exists() else read_unsealed(path).get("domains") or {}
    before, after = ([name for kind in domains.values() for name in kind] for domains in (there, config["domains"]))
    if before and not {*before} & {*after}:
        cause = f"is that of a run of other domains ({printable(', '.join(before[:5]))}{', …' * (len(before) > 5)})"
        cure = "give the config another `run`, or `overwrite: true` to write over that run"
        raise DemixError(path, cause, cure)


def refuse_other_format(run: Path) -> None:
    """Raise DemixError if the run in the folder `run` has files of another format version."""
    path = run / "config.json"
    if path.exists() and (found := read_unsealed(path).get("format")) != FORMAT:
        version = "none" if found is None else repr(found)
        cause = f"belongs to a run of another version of demix (format {version}, not {FORMAT})"
        raise DemixError(path, cause, f"delete or rename {run}, then run the workflow again")
