"""Small real configs, for tests of what follows from single sections."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from demix.config.config import Config
from demix.files import read_json, write_json
from demix.run.run import Run, write_run_config

TEXT = {"source": {"path": "text.jsonl"}}


def domains(training: Iterable[str], novel: Iterable[str] = ()) -> dict[str, Any]:
    """The section `domains` of domains of these names."""
    return {"training": dict.fromkeys(training, TEXT), "novel": dict.fromkeys(novel, TEXT)}


def small(**sections: Any) -> dict[str, Any]:
    """The keys of a small config, whose sections have the keys of `sections` too."""
    keys = {
        "run": "x",
        "domains": domains(("law", "news"), ("songs",)),
        "architecture": {"layers": 1, "width": 8, "heads": 1, "context": 8},
        "training": {"tokens": 1000, "sequences": 1, "learning_rate": 1e-3},
    }
    merged = {name: keys.get(name, {}) | given for name, given in sections.items() if isinstance(given, dict)}
    return keys | sections | merged


def small_run(folder: Path = Path(), **sections: Any) -> Run:
    """The run in `folder` of a small config, of which no file is there."""
    return Run(Config.complete(small(**sections)), folder)


def with_keys(folder: Path, keys: dict[str, Any]) -> Run:
    """The run in `folder` of a config with these `keys`, completed as by the workflow. Its config.json is written."""
    config = Config.complete(keys)
    write_run_config(folder / "config.json", config)
    return Run(config, folder)


def changed(run: Run, **sections: Any) -> Run:
    """The run of the config of `run`, whose sections have the keys of `sections` too."""
    keys = run.config.values
    merged = {name: keys.get(name, {}) | given for name, given in sections.items() if isinstance(given, dict)}
    return Run(Config.complete(keys | sections | merged), run.folder)


def written_by_hand(run: Path, **sections: Any) -> None:
    """Put other `sections` into the config.json of the run in the folder `run`, whatever a config allows."""
    path = run / "config.json"
    write_json(path, read_json(path) | sections, sort_keys=False)
