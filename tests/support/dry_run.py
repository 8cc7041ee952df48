"""Snakemake run to its end, and what `snakemake -n` says that it would run."""

import os
import re
import subprocess
import sys
from pathlib import Path

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
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def jobs_by_rule(output: str) -> dict[str, int]:
    """The number of jobs of each rule in the table that snakemake prints, `all` aside."""
    if "Nothing to be done" in output:
        return {}
    table = output.split("Job stats:")[1].split("Reasons:")[0]
    jobs = {rule: int(count) for rule, count in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)}
    return {rule: count for rule, count in jobs.items() if rule not in ("all", "total")}
