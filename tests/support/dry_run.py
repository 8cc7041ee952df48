"""Snakemake on a config, run to its end or only planned, and the jobs that it shows."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile

import yaml

from support.forks import FORKS
from support.warm import warm

REPOSITORY = Path(__file__).parents[2]
SNAKEFILE, PROFILES = REPOSITORY / "workflow" / "Snakefile", REPOSITORY / "profiles"
TINY = yaml.safe_load((REPOSITORY / "tests" / "workflow" / "tiny.yaml").read_text())
# The commands of the environment that the tests run in, whether or not it is activated.
ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def changed(config: dict, keys: dict[str, object]) -> dict:
    """The config with other values of `keys`, whose parts dots separate; None takes a key out."""
    made = copy.deepcopy(config)
    for key, value in keys.items():
        *above, last = key.split(".")
        place = made
        for part in above:
            place = place.setdefault(part, {})
        if value is None:
            del place[last]
        else:
            place[last] = value
    return made


def write_config(folder: Path, config: dict) -> str:
    """Write config.yaml into `folder`, beside the texts of the sample; returns the file's name."""
    if not (folder / "resources").exists():
        (folder / "resources").symlink_to(REPOSITORY / "resources")
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    return "config.yaml"


def command_line(config: Path | str, *arguments: str, profile: str = "default") -> list[str]:
    """The command that runs snakemake on a config as a person would in the repository, with a profile."""
    option = {"default": "--workflow-profile", "slurm": "--profile"}[profile]
    chosen = ["--snakefile", str(SNAKEFILE), "--configfile", str(config), option, str(PROFILES / profile)]
    return ["snakemake", *chosen, *arguments]


def dry_run(folder: Path, config: Path | str, *arguments: str) -> str:
    """What `snakemake -n` prints in `folder`, where the texts of the sample are linked."""
    if not (folder / "resources").exists():
        (folder / "resources").symlink_to(REPOSITORY / "resources")
    return ran(folder, config, "-n", *arguments)


def ran(folder: Path, config: Path | str, *arguments: str) -> str:
    """What snakemake prints that is run in `folder` and succeeds."""
    command = command_line(config, *arguments)
    if "-n" in arguments:
        return planned(folder, command)
    done = subprocess.run(command, cwd=folder, env=warm(ENVIRONMENT), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def planned(folder: Path, command: list[str]) -> str:
    """What the command `snakemake -n` prints in `folder`."""
    with NamedTemporaryFile("r") as output:
        process = FORKS.Process(target=snakemake, args=(folder, command, dict(ENVIRONMENT), output.name))
        process.start()
        process.join()
        shown = output.read()
    assert process.exitcode == 0, shown
    return shown


def snakemake(folder: Path, command: list[str], environment: dict[str, str], output: str) -> None:
    """Be a snakemake in `folder`, in a process that has imported snakemake; what it prints goes to `output`."""
    from snakemake import cli

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with open(output, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = command
    cli.main()


def shown_jobs(output: str) -> list[tuple[str, str]]:
    """The rule of each job that snakemake shows, and the lines about the job."""
    return re.findall(r"^(?:local)?rule (\w+):\n((?: {4}.*\n)*)", output, re.MULTILINE)


def jobs(output: str) -> set[str]:
    """The jobs that snakemake shows: the rule with the values of its wildcards, as in "read licenses 0000"."""
    found = set()
    for rule, lines in shown_jobs(output):
        wildcards = re.search(r"^ {4}wildcards: (.*)$", lines, re.MULTILINE)
        values = re.findall(r"=([^,]+)", wildcards[1]) if wildcards else []
        found.add(" ".join([rule, *values]))
    return found - {"all"}


def jobs_by_rule(output: str) -> dict[str, int]:
    """The number of jobs of each rule in the table that snakemake prints, `all` aside."""
    if "Nothing to be done" in output:
        return {}
    table = output.split("Job stats:")[1].split("Reasons:")[0]
    found = {rule: int(count) for rule, count in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)}
    return {rule: count for rule, count in found.items() if rule not in ("all", "total")}
