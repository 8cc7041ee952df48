"""The config that a run keeps in its folder, with the format version of the run's files."""

import os
from pathlib import Path
from typing import Any

from demix.config.config import Config
from demix.errors import DemixError, nearest, printable
from demix.files import fingerprint, read_json, write_json
from demix.files.json_files import read_unsealed
from demix.settings import settings_from

# Every change that makes files of older runs unreadable raises this version.
FORMAT = 7


def kept(config: Config) -> dict[str, Any]:
    """What a run keeps of its config, as JSON: every key that defines the run, completed, in the config's order."""
    # The cluster changes no result, and `overwrite` is about files that are there.
    return {key: value for key, value in config.values.items() if key not in ("cluster", "overwrite")}


def write_run_config(output: Path, config: Config) -> None:
    """Write the completed `config` of a run, with the format version of its files.

    The keys keep their order, because the report shows the domains in this order.
    """
    write_json(output, {"format": FORMAT, **kept(config)}, sort_keys=False)


def read_run_config(run: Path) -> Config:
    """The config of the run in the folder `run`. Raises DemixError for a run of another version or a damaged file."""
    if not os.path.isfile(run / "config.json"):
        runs = {path.parent: None for folder in (run.parent, Path("results")) for path in folder.glob("*/config.json")}
        cause = "is missing, so the folder holds no run"
        # Snakemake removes the file for the moment in which a rerun with other settings writes it.
        if (run / "logs").is_dir():
            cause = "is missing: a rerun is writing it, or ended before it had"
            raise DemixError(run / "config.json", cause, "ask again in a moment, or rerun the workflow: it goes on")
        raise DemixError(run / "config.json", cause, nearest(run, sorted(runs), "name results/<run>"))
    refuse_other_format(run)
    values = read_json(run / "config.json")
    del values["format"]
    return settings_from(Config, values, f"{run / 'config.json'}, config key ")


def config_fingerprint(config: Config) -> str:
    """A digest of all settings that define a run, but its name: equal for runs of the same settings."""
    return fingerprint({key: value for key, value in kept(config).items() if key != "run"})


def refuse_other_domains(run: Path, config: Config) -> None:
    """Raise DemixError if the folder `run` is that of a run with none of the domains of `config`."""
    path = run / "config.json"
    there = {} if not path.exists() else read_unsealed(path).get("domains") or {}
    before = [name for kind in there.values() for name in kind]
    if before and not {*before} & {*config.domains.all}:
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
