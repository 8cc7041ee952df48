"""How often snakemake looks for jobs to start, and how many wait for trainings at a time."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from support.dry_run import ENVIRONMENT, REPOSITORY, ran

pytestmark = pytest.mark.workflow


def test_snakemake_looks_at_the_ready_jobs_once_for_each_that_ends(tmp_path: Path) -> None:
    """Each look reads the size of every file that a ready job takes: thousands in a run of many domains."""
    (tmp_path / "resources").symlink_to(REPOSITORY / "resources")
    shown = ran(tmp_path, Path(__file__).parent / "tiny.yaml", "--verbose", "--until", "download")
    ended = len(re.findall(r"^Finished jobid", shown, re.MULTILINE))
    assert ended == 6
    assert len(re.findall(r"^Ready jobs: ", shown, re.MULTILINE)) <= ended


WAITING = """
rule all:
    input: expand("{number}.txt", number=range(8))
rule wait:
    output: "{number}.txt"
    localrule: True
    shell:
        "mkdir {wildcards.number}; for try in $(seq 450); do [ $(ls -d ? | wc -l) -eq 8 ] && break; sleep 0.1; done;"
        " touch {output}; [ $try -lt 450 ]"
rule evaluate:
    output: "none.txt"
    shell: "true"
"""


def test_with_the_profile_for_slurm_more_than_five_jobs_wait_at_a_time(tmp_path: Path) -> None:
    """Each waits until all eight are there, as a process does for each of the experts that train at the same time."""
    (tmp_path / "Snakefile").write_text(WAITING)
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "squeue", "sacct", "sinfo", "scontrol"):
        (tmp_path / "bin" / name).symlink_to("/bin/true")
    command = ["snakemake", "--workflow-profile", REPOSITORY / "profiles" / "slurm"]
    environment = ENVIRONMENT | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{ENVIRONMENT['PATH']}"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
