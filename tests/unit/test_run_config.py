"""A run's config.json: it has the version of the run's files, and a run of another version is refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from demix.config.config import Config
from demix.errors import DemixError
from demix.files import read_json, write_json
from demix.run.kept import FORMAT, kept, read_run_config, refuse_other_domains, write_run_config
from support.cli import said
from support.configs import domains, small
from support.dry_run import ENVIRONMENT, dry_run
from support.synthetic_run import build_run, with_keys

REPOSITORY = Path(__file__).parents[2]
TINY = REPOSITORY / "tests" / "workflow" / "tiny.yaml"
# As older versions wrote it: no version, and a seal of blanks.
OLD = '\t{\n  "run": "old",\n  "seed": 1\n}' + " \t" * 64 + "\n"


def test_it_keeps_the_order_of_the_domains_and_has_a_version(tmp_path: Path) -> None:
    config = Config.complete(small(domains=domains(("news", "law"))))
    write_run_config(tmp_path / "config.json", config)
    written = [*json.loads((tmp_path / "config.json").read_text())]
    assert (written[0], written[-1], "cluster" in written) == ("format", "seal", False)
    assert read_json(tmp_path / "config.json")["format"] == FORMAT
    assert json.dumps(kept(read_run_config(tmp_path))) == json.dumps(kept(config))
    assert [*read_run_config(tmp_path).domains.training] == ["news", "law"]


def test_it_is_a_config_to_run_again(tmp_path: Path) -> None:
    config = Config.read(TINY)
    write_run_config(tmp_path / "config.json", config)
    again = Config.complete(json.loads((tmp_path / "config.json").read_text()))
    assert again == config
    assert again.values == config.values


@pytest.mark.parametrize("found", [None, 1, FORMAT + 1, "2", True])
def test_another_version_is_refused_in_one_line(tmp_path: Path, found: object) -> None:
    write_json(tmp_path / "config.json", {"run": "a"} | ({} if found is None else {"format": found}))
    version = "none" if found is None else repr(found)
    with pytest.raises(DemixError) as error:
        read_run_config(tmp_path)
    assert str(error.value) == (
        f"{tmp_path}/config.json: belongs to a run of another version of demix (format {version}, not {FORMAT}); "
        f"delete or rename {tmp_path}, then run the workflow again"
    )


def test_the_version_is_sealed_too(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"run": "a", "format": FORMAT - 1})
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace(f'"format": {FORMAT - 1}', f'"format": {FORMAT}'))
    with pytest.raises(DemixError, match="values changed"):
        read_run_config(tmp_path)


def test_every_command_that_reads_a_run_refuses_another_version(tmp_path: Path) -> None:
    run = build_run(tmp_path / "run", steps=2).path
    (run / "config.json").write_text(OLD)
    experts = run / "models" / "demix" / "experts"
    commands = {
        "report": (run, "--output", tmp_path / "report"),
        "card": (run, "--output", tmp_path / "cards"),
        "track": (run, "--output", tmp_path / "tracked.json"),
        "summary": (run,),
        "export": (run / "models" / "demix", "--expert", "law", "--tokenizer", experts, "--output", tmp_path / "hf"),
    }
    for command, arguments in commands.items():
        told = str(said([command, *map(str, arguments)]))
        assert f"demix: error: {run}/config.json: belongs to a run of another version of demix" in told, command
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "nothing was written"


def test_the_workflow_refuses_to_go_on_with_a_run_of_another_version(tmp_path: Path) -> None:
    place = tmp_path / "results" / "tiny"
    place.mkdir(parents=True)
    (place / "config.json").write_text(OLD)
    (tmp_path / "resources").symlink_to(REPOSITORY / "resources")
    shutil.copy(TINY, tmp_path / "config.yaml")
    command = [
        Path(sys.executable).parent / "snakemake",
        "-n",
        "--snakefile",
        REPOSITORY / "workflow" / "Snakefile",
        "--configfile",
        "config.yaml",
        "--workflow-profile",
        REPOSITORY / "profiles" / "default",
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    more = {"cwd": tmp_path, "env": os.environ | {"PATH": path}, "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, **more)
    assert done.returncode == 1
    assert (
        f"results/tiny/config.json: belongs to a run of another version of demix (format none, not {FORMAT}); "
        "delete or rename results/tiny, then run the workflow again"
    ) in done.stdout + done.stderr
    place.rename(tmp_path / "results" / "old")
    done = subprocess.run(command, check=False, **more)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_workflow_touches_no_run_of_other_domains(tmp_path: Path) -> None:
    run = tmp_path / "results" / "tiny"
    with_keys(run, small(domains=domains(("letters",))))
    before = (run / "config.json").read_bytes()
    (tmp_path / "resources").symlink_to(REPOSITORY / "resources")
    shutil.copy(TINY, tmp_path / "config.yaml")
    command = [
        "snakemake",
        "--snakefile",
        REPOSITORY / "workflow" / "Snakefile",
        "--configfile",
        "config.yaml",
        "--workflow-profile",
        REPOSITORY / "profiles" / "default",
    ]
    for more in (["-n"], ["--logger", "demix", "--cores", "1"]):
        done = subprocess.run(
            [*command, *more], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        told = [line for line in (done.stdout + done.stderr).splitlines() if "config.json" in line]
        assert told == [
            "results/tiny/config.json: is that of a run of other domains (letters); give the config another `run`, or "
            "`overwrite: true` to write over that run"
        ], more
    assert [path.name for path in run.rglob("*")] == ["config.json"]
    assert (run / "config.json").read_bytes() == before

    # The key changes nothing that a rule or a fingerprint reads.
    overwriting = tmp_path / "overwriting.yaml"
    overwriting.write_text(f"{TINY.read_text()}\noverwrite: true\n")
    shown = dry_run(tmp_path, overwriting, "--printshellcmds")
    assert "train_demix" in shown
    assert '"overwrite"' not in shown


def test_one_domain_in_common_makes_it_the_same_run(tmp_path: Path) -> None:
    write_run_config(tmp_path / "config.json", Config.read(TINY))
    for training, novel in (("licenses",), ()), (("letters",), ("parliament",)):
        refuse_other_domains(tmp_path, Config.complete(small(domains=domains(training, novel))))
    with pytest.raises(DemixError, match=r"other domains \(parliament, scripture, licenses, fantasy, fortunes\)"):
        refuse_other_domains(tmp_path, Config.complete(small(domains=domains(("letters",)))))
