"""Texts of a config reach their stages as they are, whatever Snakemake or a shell would make of them."""

import subprocess
from pathlib import Path

import pytest
import yaml

from demix.files import read_json
from demix.launch.arguments import SHELL_FUNCTION
from support.dry_run import REPOSITORY, dry_run, jobs_by_rule, ran

TINY = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text())
# A wildcard of no rule, a wildcard of some, what a shell would run, and what JSON and YAML write in another way.
TEXT = "{x} {domain} \"a\" 'b' $(touch run) `touch run`\nü %s \\ {{y}}"
SOURCE = {"text": TEXT, "id": TEXT, "metadata": [TEXT], "where": {TEXT: TEXT}, "members": [TEXT], "instructions": TEXT}
TASK = {
    "label": TEXT,
    "choices": TEXT,
    "template": TEXT + "{text}" + TEXT + "{label}",
    "separator": TEXT,
    "text": [TEXT],
}

pytestmark = pytest.mark.workflow


def texts() -> dict:
    """The tiny config with every text that it may hold."""
    domains = {
        kind: {name: one | {"source": one["source"] | SOURCE, "licence": TEXT} for name, one in some.items()}
        for kind, some in TINY["domains"].items()
    }
    missing = (
        {"kind": "files", "path": f"no/{TEXT}/*.jsonl"} | SOURCE | {"bytes": {TEXT: 1}, "sha256": {TEXT: "0" * 64}}
    )
    hub = {"kind": "hub", "path": TEXT, "revision": TEXT, "data_files": [TEXT]} | SOURCE
    domains["novel"] |= {"missing": {"source": missing}, "hub": {"source": hub}}
    cluster = dict.fromkeys(("partition", "account", "qos", "constraint"), TEXT) | {"setup": [TEXT]}
    tasks = {
        "path": TASK | {"path": TEXT},
        "labels": {"path": "a.jsonl", "labels": {TEXT: TEXT, "b": "c"}},
        "sources": {"test": missing, "train": hub},
    }
    changed = {"domains": domains, "cluster": cluster, "tasks": tasks, "allow_branches": True}
    return TINY | changed | {"tracking": TINY["tracking"] | {"experiment": TEXT}}


def test_a_config_whose_every_text_holds_braces_quotes_and_lines_is_planned(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(texts(), allow_unicode=True))
    shown = dry_run(tmp_path, Path("config.yaml"), "--quiet", "rules")
    asked = {"examples": 3, "classify": 1, "run_config": 1, "fewshot_demix": 1, "track": 1}
    assert jobs_by_rule(shown).items() >= asked.items()


def test_the_recorded_config_is_the_given_one(tmp_path: Path) -> None:
    config = texts()
    del config["cluster"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
    (tmp_path / "resources").symlink_to(REPOSITORY / "resources")
    ran(tmp_path, "config.yaml", "--until", "run_config")
    kept = read_json(tmp_path / "results" / "tiny" / "config.json")
    for kind, some in config["domains"].items():
        for name, one in some.items():
            recorded = kept["domains"][kind][name]["source"]
            assert {key: recorded[key] for key in one["source"]} == one["source"]
    assert {key: kept["tasks"]["path"][key] for key in TASK} == TASK
    assert not [*tmp_path.rglob("run")]


def test_the_shell_of_every_job_hands_on_commands_of_any_length(tmp_path: Path) -> None:
    """Which bash has in a function: Linux passes some 2 MB of arguments to a process."""
    config = TINY | {"cluster": {"setup": ["trap 'type demix > function' EXIT"]}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "resources").symlink_to(REPOSITORY / "resources")
    ran(tmp_path, "config.yaml", "--until", "run_config")
    wanted = subprocess.run(["bash", "-c", f"{SHELL_FUNCTION}; type demix"], capture_output=True, check=True)
    assert (tmp_path / "function").read_bytes() == wanted.stdout
