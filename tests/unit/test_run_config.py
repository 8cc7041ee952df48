"""A run's config.json: it has the version of the run's files, and a run of another version is refused."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from demix.config.config import Config
from demix.files import read_json, write_json
from demix.run.check import load_run
from demix.run.run import FORMAT, Run, kept, refuse_other_domains, write_run_config
from support.cli import said
from support.configs import domains, small
from support.dry_run import ENVIRONMENT, REPOSITORY, command_line
from support.errors import refused

TINY = REPOSITORY / "tests" / "workflow" / "tiny.yaml"
# As older versions wrote it: no version, and a seal of blanks.
OLD = '\t{\n  "run": "old",\n  "seed": 1\n}' + " \t" * 64 + "\n"


def test_it_keeps_the_order_of_the_domains_and_has_a_version(tmp_path: Path) -> None:
    config = Config.complete(small(domains=domains(("news", "law"))))
    write_run_config(tmp_path / "config.json", config)
    written = [*json.loads((tmp_path / "config.json").read_text())]
    assert (written[0], written[-1], "cluster" in written) == ("format", "seal", False)
    assert read_json(tmp_path / "config.json")["format"] == FORMAT
    assert json.dumps(kept(Run.read(tmp_path).config)) == json.dumps(kept(config))
    assert [*Run.read(tmp_path).config.domains.training] == ["news", "law"]


def test_it_is_a_config_to_run_again(frozen: Run) -> None:
    again = Config.complete(json.loads((frozen.folder / "config.json").read_text()))
    assert again == frozen.config
    assert again.values == frozen.config.values


@pytest.mark.parametrize("found", [None, 1, FORMAT + 1, "2", True])
def test_another_version_is_refused(tmp_path: Path, found: object) -> None:
    write_json(tmp_path / "config.json", {"run": "a"} | ({} if found is None else {"format": found}))
    with refused(tmp_path / "config.json") as error:
        Run.read(tmp_path)
    assert str(FORMAT) in error.value.cause


@pytest.mark.parametrize("command", ["report", "card", "track", "summary", "export", "sql", "compare"])
def test_every_command_that_reads_a_run_refuses_another_version(
    frozen: Run, frozen_copy: Run, tmp_path: Path, command: str
) -> None:
    run, model = frozen_copy.folder, frozen_copy.folder / "models" / "demix"
    (run / "config.json").write_text(OLD)
    output = ("--output", tmp_path / "output")
    arguments = {
        "report": (run, *output),
        "card": (run, *output),
        "track": (run, *output),
        "export": (model, "--expert", "parliament", "--tokenizer", run / "tokenizer.json", *output),
        "sql": (run, "select 1"),
        "compare": (frozen.folder, run),
    }
    told = str(said([command, *map(str, arguments.get(command, (run,)))]))
    assert told.startswith(f"demix: error: {run}/config.json: ")
    assert [path.name for path in tmp_path.iterdir()] == ["results"], "nothing was written"


@pytest.mark.parametrize(
    "kept", [pytest.param(OLD, id="version", marks=pytest.mark.full), pytest.param(None, id="domains")]
)
def test_the_workflow_refuses_a_run_of_another_version_or_of_other_domains(tmp_path: Path, kept: str | None) -> None:
    file = tmp_path / "results" / "tiny" / "config.json"
    write_run_config(file, Config.complete(small(domains=domains(("letters",)))))
    if kept:
        file.write_text(kept)
    before = file.read_bytes()
    (tmp_path / "resources").symlink_to(REPOSITORY / "resources")
    shutil.copy(TINY, tmp_path / "config.yaml")
    command = command_line("config.yaml", "--logger", "demix")
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "\nresults/tiny/config.json: " in f"\n{done.stdout}{done.stderr}"
    assert [path for path in file.parent.rglob("*") if path != file] == []
    assert file.read_bytes() == before


def test_one_domain_in_common_makes_it_the_same_run(tmp_path: Path) -> None:
    write_run_config(tmp_path / "config.json", load_run(TINY).config)
    for training, novel in (("licenses",), ()), (("letters",), ("parliament",)):
        refuse_other_domains(tmp_path, Config.complete(small(domains=domains(training, novel))))
    with refused(tmp_path / "config.json"):
        refuse_other_domains(tmp_path, Config.complete(small(domains=domains(("letters",)))))
