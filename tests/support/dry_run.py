"""Snakemake run to its end, and what `snakemake -n` says that it would run."""

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile

from support.forks import FORKS
from support.warm import warm

REPOSITORY = Path(__file__).parents[2]
# The commands of the environment that the tests run in, whether or not it is activated.
ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def dry_run(folder: Path, config: Path, *arguments: str) -> str:
    """What `snakemake -n` prints in `folder`, where the sample's texts are linked."""
    if not (folder / "resources").exists():
        (folder / "resources").symlink_to(REPOSITORY / "resources")
    return ran(folder, config, "-n", *arguments)


def ran(folder: Path, config: Path | str, *arguments: str) -> str:
    """What snakemake prints that is run in `folder`."""
    command = [
        "snakemake", "--snakefile", str(REPOSITORY / "workflow" / "Snakefile"), "--configfile", str(config),
        "--workflow-profile", str(REPOSITORY / "profiles" / "default"), *arguments,
    ]  # fmt: skip
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


def jobs_by_rule(output: str) -> dict[str, int]:
    """The number of jobs of each rule in the table that snakemake prints, `all` aside."""
    if "Nothing to be done" in output:
        return {}
    table = output.split("Job stats:")[1].split("Reasons:")[0]
    jobs = {rule: int(count) for rule, count in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)}
    return {rule: count for rule, count in jobs.items() if rule not in ("all", "total")}
