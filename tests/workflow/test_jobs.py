"""The plan's table of jobs and the resources of the rules, held against what `snakemake -n` plans."""

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml

from demix.plan.jobs import plan_jobs
from demix.plan.ready import CLIENTS
from demix.run.check import load_run
from support.dry_run import ENVIRONMENT, REPOSITORY, dry_run, jobs_by_rule

pytestmark = pytest.mark.workflow

RULES = [path for path in sorted((REPOSITORY / "workflow" / "rules").glob("*.smk")) if path.stem != "common"]
STAGES = ("download", "anonymize", "corpus", "train", "adapt", "score", "evaluate")


@pytest.mark.parametrize("name", ["sample", "families-tasks", "paper-125m"])
def test_the_plan_counts_the_jobs_of_the_workflow(name: str, tmp_path: Path) -> None:
    path = REPOSITORY / "config" / f"{name}.yaml"
    counted: Counter[str] = Counter()
    for jobs in plan_jobs(load_run(path), "cpu"):
        counted.update(jobs.rules)
    assert {rule: count for rule, count in counted.items() if count} == jobs_by_rule(
        dry_run(tmp_path, path, "--quiet", "rules")
    )


def test_every_rule_asks_for_the_resources_of_its_stage(tmp_path: Path) -> None:
    config = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text())
    config["models"] = {"demix": {"sweep": {"learning_rates": [1e-3, 2e-3], "tokens": 7680}}}
    config["models"] |= {"seeded": {"kind": "demix", "parent": "dense", "seed_tokens": 6000}}
    config["cluster"] = {"stages": {stage: {"partition": f"for-{stage}", "gpus": 1} for stage in STAGES}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    expected = {
        rule: {
            (jobs.site.partition, jobs.site.memory_mb, jobs.site.minutes, jobs.stage == "score")
            if jobs.site
            else ("", 0, 0, False)
        }
        for jobs in plan_jobs(load_run(path), "cpu")
        for rule, count in jobs.rules.items()
        if count
    }
    assert asked(dry_run(tmp_path, path)) == expected


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_a_rule_without_resources_runs_where_snakemake_does(path: Path) -> None:
    rules = re.split(r"^ *rule\b.*:$", path.read_text(), flags=re.MULTILINE)[1:]
    assert rules
    for text in rules:
        assert ("**RULES.site(" in text) != ("localrule: True" in text), text


@pytest.mark.parametrize(("option", "profile"), [("--profile", "slurm"), ("--workflow-profile", "default")])
def test_a_run_that_can_download_nothing_ends_before_its_first_job(option: str, profile: str, tmp_path: Path) -> None:
    """With commands of SLURM that are scripts, and a port of this machine where nobody listens."""
    config = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text())
    config["domains"]["training"]["licenses"]["source"] = {"kind": "url", "path": "http://127.0.0.1:9/a.txt"}
    config["cluster"] = {"downloads": "login"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (tmp_path / "resources").symlink_to(REPOSITORY / "resources")
    scripts = dict.fromkeys(CLIENTS, "exit") | {"sbatch": "touch submitted; exit 1", "sinfo": "echo all"}
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["snakemake", "--snakefile", REPOSITORY / "workflow" / "Snakefile", "--configfile", "config.yaml",
         option, REPOSITORY / "profiles" / profile],
        cwd=tmp_path, env=ENVIRONMENT | {"PATH": f"{tmp_path}:{ENVIRONMENT['PATH']}"},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode
    assert "Traceback" not in done.stdout + done.stderr
    assert re.search(r"^http://127\.0\.0\.1:9/a\.txt: does not answer here .*; mend the network", done.stderr, re.M)
    assert not (tmp_path / "submitted").exists()
    assert not (tmp_path / "results").exists()


def test_a_run_on_slurm_without_the_commands_of_slurm_ends_in_one_line(tmp_path: Path) -> None:
    """With a PATH that has what the run needs, and none of SLURM's commands, wherever this machine has them."""
    (tmp_path / "resources").symlink_to(REPOSITORY / "resources")
    (tmp_path / "bin").mkdir()
    for folder in map(Path, ENVIRONMENT["PATH"].split(os.pathsep)):
        for command in folder.iterdir() if folder.is_dir() else ():
            link = tmp_path / "bin" / command.name
            if command.name not in CLIENTS and not link.is_symlink():
                link.symlink_to(command)
    done = subprocess.run(
        ["snakemake", "--snakefile", REPOSITORY / "workflow" / "Snakefile", "--configfile",
         Path(__file__).parent / "tiny.yaml", "--profile", REPOSITORY / "profiles" / "slurm"],
        cwd=tmp_path, env=ENVIRONMENT | {"PATH": str(tmp_path / "bin")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode
    told = "SLURM's commands are not installed here; log in to the cluster, or leave out --profile"
    assert f"{', '.join(CLIENTS)}: {told}" in done.stderr.splitlines()
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "results").exists()


def asked(output: str) -> dict[str, set[tuple[str, int, int, bool]]]:
    """Partition, memory (MB), minutes and use of a GPU that the jobs of each rule ask for."""
    found: dict[str, set[tuple[str, int, int, bool]]] = {}
    for rule, lines in re.findall(r"^rule (\w+):\n((?: {4}.*\n)*)", output, re.MULTILINE):
        resources = re.search(r"^ {4}resources: (.*)$", lines, re.MULTILINE)
        given = dict(re.findall(r"(\w+)=([^, ]+)", resources[1] if resources else ""))
        memory, minutes = (int(given.get(name, 0)) for name in ("mem_mb", "runtime"))
        found.setdefault(rule, set()).add((given.get("slurm_partition", ""), memory, minutes, given.get("gpu") == "1"))
    found.pop("all", None)
    return found


def test_an_error_in_finding_out_what_to_run_is_no_success(tmp_path: Path) -> None:
    """Of a file that is there already, too: Snakemake by itself warns and takes the file as it is."""
    (tmp_path / f"{'ha' * 30}.txt").write_text("made before\n")
    rules = f"""include: "{REPOSITORY}/workflow/Snakefile"

rule loop:
    output: "{{name}}.txt"

rule wanted:
    input: "{"ha" * 30}.txt"
"""
    (tmp_path / "Snakefile").write_text(rules)
    tiny = str(Path(__file__).parent / "tiny.yaml")
    command = ["snakemake", "-n", "wanted", "--snakefile", "Snakefile", "--configfile", tiny]
    command += ["--workflow-profile", str(REPOSITORY / "profiles" / "default")]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert "The value ha in wildcard name is periodically repeated" in done.stdout
    assert done.returncode == 1
