"""What snakemake plans for a config, against the tables of `demix plan`, and what ends a run before its first job."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from demix.data.ready import CLIENTS
from demix.files import read_json
from demix.launch.snakemake import SHELL_FUNCTION
from demix.plan.jobs import count_jobs
from demix.run.check import load_run
from support.dry_run import (
    ENVIRONMENT,
    PROFILES,
    REPOSITORY,
    SNAKEFILE,
    TINY,
    changed,
    command_line,
    dry_run,
    jobs_by_rule,
    ran,
    shown_jobs,
    write_config,
)

SOURCE = {"path": "resources/sample/novels.jsonl.zst"}
# Domains that share a source, a suite, a row with a sweep and one with a seed phase.
STAGES = ("download", "anonymize", "corpus", "train", "adapt", "score", "evaluate")
WIDE = TINY | {
    "sources": {"corpus": {"source": SOURCE | {"parts": 2}, "by": "set"}},
    "domains": {
        kind: {name: {"from": "corpus", "value": name, "words": {"dev": 20, "test": 20}} for name in some}
        for kind, some in TINY["domains"].items()
    },
    "models": {
        "demix": {"sweep": {"learning_rates": [1e-3, 2e-3], "tokens": 7680}},
        "seeded": {"kind": "demix", "parent": "dense", "seed_tokens": 6000},
    },
    "evaluation": TINY["evaluation"] | {"suites": {"paloma": {"songs": {"source": SOURCE, "words": {"test": 1500}}}}},
}
NONE = ("", 0, 0, False)
# The stage of each rule by the beginning of its name; the others run where snakemake does.
ASKING = {
    "score_ngrams": "evaluate",
    **dict.fromkeys(("download", "read", "divide", "examples", "harness_documents"), "download"),
    **dict.fromkeys(("deduplicate", "tokenize", "overlap", "split", "hold_out", "fit_", "assign"), "corpus"),
    **dict.fromkeys(("cluster_", "join", "contamination"), "corpus"),
    "anonymize": "anonymize",
    **dict.fromkeys(("train", "sweep", "seed"), "train"),
    "adapt": "adapt",
    **dict.fromkeys(("score", "fewshot", "harness", "audit_domain"), "score"),
    **dict.fromkeys(
        ("average", "merge_", "combine", "route", "evaluate", "choose_mixing", "contexts", "classify"), "evaluate"
    ),
}


SITE = {"stages": {stage: {"partition": f"for-{stage}", "gpus": 1} for stage in STAGES}}
CONFIGS = {
    name: {"base": str(REPOSITORY / "config" / f"{name}.yaml"), "cluster": SITE}
    for name in ("sample", "families", "one-gpu", "paper-125m", "paper-1.3b")
}


@pytest.mark.parametrize("config", [*CONFIGS.values(), WIDE | {"cluster": SITE}], ids=[*CONFIGS, "wide"])
def test_the_plan_counts_the_jobs_of_each_rule_and_they_ask_for_what_their_stage_has(
    config: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("http_proxy", "https_proxy", "ALL_PROXY"):
        monkeypatch.setitem(ENVIRONMENT, variable, "http://127.0.0.1:9")
    path = tmp_path / write_config(tmp_path, config)
    run = load_run(path)
    shown = dry_run(tmp_path, path)
    assert not (tmp_path / "results").exists()
    assert count_jobs(run) == jobs_by_rule(shown)
    for rule, lines in shown_jobs(shown):
        if rule != "all":
            resources = re.search(r"^ {4}resources: (.*)$", lines, re.MULTILINE)
            given = dict(re.findall(r"(\w+)=([^, ]+)", resources[1] if resources else ""))
            memory, minutes = (int(given.get(name, 0)) for name in ("mem_mb", "runtime"))
            asked = given.get("slurm_partition", ""), memory, minutes, given.get("gpu") == "1"
            stage = next((stage for begin, stage in ASKING.items() if rule.startswith(begin)), None)
            site = run.config.cluster.of(stage) if stage else None
            assert asked == ((site.partition, site.memory_mb, site.minutes, stage == "score") if site else NONE), rule


# A wildcard of no rule, a wildcard of some, what a shell would run, and what JSON and YAML write in another way.
TEXT = "{x} {domain} \"a\" 'b' $(touch run) `touch run`\nü %s \\ {{y}}"
TEXTS = {"text": TEXT, "where": {TEXT: TEXT}, "members": [TEXT], "instructions": TEXT}
ANY_TASK = {"label": TEXT, "text": [TEXT]}
ANY_TASK |= {"template": TEXT + "{text}" + TEXT + "{label}"}


def any_texts() -> dict:
    """The tiny config with every text that it may hold."""
    domains = {
        kind: {name: one | {"source": one["source"] | TEXTS, "licence": TEXT} for name, one in some.items()}
        for kind, some in TINY["domains"].items()
    }
    missing = TEXTS | {"path": f"no/{TEXT}/*.jsonl", "sha256": {TEXT: "0" * 64}}
    hub = TEXTS | {"path": f"hf://{TEXT}", "revision": TEXT, "data_files": [TEXT]}
    domains["novel"] |= {"missing": {"source": missing}, "hub": {"source": hub}}
    tasks = {
        "file": ANY_TASK | {"test": {"path": TEXT}},
        "labels": {"test": {"path": "a.jsonl"}, "labels": {TEXT: TEXT, "b": "c"}},
        "sources": {"test": missing, "train": hub},
    }
    return TINY | {
        "domains": domains,
        "tasks": tasks,
        "allow_branches": True,
    }


def test_any_text_of_a_config_is_planned_and_kept_as_it_is(tmp_path: Path) -> None:
    cluster = dict.fromkeys(("partition", "account", "qos", "constraint"), TEXT) | {"setup": [TEXT]}
    shown = dry_run(tmp_path, write_config(tmp_path, any_texts() | {"cluster": cluster}), "--quiet", "rules")
    assert jobs_by_rule(shown).items() >= {"examples": 3, "classify": 1, "fewshot": 9, "track": 1}.items()
    config = any_texts()
    ran(tmp_path, write_config(tmp_path, config), "--until", "run_config")
    kept = read_json(tmp_path / "results" / "tiny" / "config.json")
    for kind, some in config["domains"].items():
        for name, one in some.items():
            recorded = kept["domains"][kind][name]["source"]
            assert {key: recorded[key] for key in one["source"]} == one["source"]
    assert {key: kept["tasks"]["file"][key] for key in ANY_TASK} == ANY_TASK
    assert not [*tmp_path.rglob("run")]


def test_the_shell_of_every_job_hands_on_commands_of_any_length(tmp_path: Path) -> None:
    """Which bash has in a function: Linux passes some 2 MB of arguments to a process."""
    config = TINY | {"cluster": {"setup": ["trap 'type demix > function' EXIT"]}}
    ran(tmp_path, write_config(tmp_path, config), "--until", "run_config")
    wanted = subprocess.run(["bash", "-c", f"{SHELL_FUNCTION}; type demix"], capture_output=True, check=True)
    assert (tmp_path / "function").read_bytes() == wanted.stdout


def failed(folder: Path, command: list[str], path: str = ENVIRONMENT["PATH"]) -> str:
    """What a snakemake prints that does not succeed."""
    environment = ENVIRONMENT | {"PATH": path}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout + done.stderr


# An address where nobody listens.
AWAY = {"path": "http://127.0.0.1:9/a.txt"}
CLUSTER = dict.fromkeys(CLIENTS, "exit") | {"sbatch": "touch submitted; exit 1", "sinfo": "echo all"}


@pytest.mark.parametrize(
    ("profile", "scripts", "source", "subject"),
    [
        ("default", {}, AWAY, AWAY["path"]),
        ("slurm", CLUSTER, AWAY, AWAY["path"]),
        ("slurm", {}, SOURCE, ", ".join(CLIENTS)),
    ],
)
def test_what_cannot_run_here_ends_before_its_first_job(
    profile: str, scripts: dict[str, str], source: dict, subject: str, tmp_path: Path
) -> None:
    """With a PATH that has what a run needs, and of SLURM's commands only scripts in their place."""
    (tmp_path / "bin").mkdir()
    for name, script in scripts.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    for folder in map(Path, ENVIRONMENT["PATH"].split(os.pathsep)):
        for command in folder.iterdir() if folder.is_dir() else ():
            link = tmp_path / "bin" / command.name
            if command.name not in CLIENTS and not link.is_symlink():
                link.symlink_to(command)
    config = changed(TINY, {"cluster": {"downloads": "login"}, "domains.training.licenses.source": source})
    command = command_line(write_config(tmp_path, config), profile=profile)
    shown = failed(tmp_path, command, str(tmp_path / "bin"))
    assert re.search(rf"^{re.escape(subject)}: ", shown, re.MULTILINE), shown
    assert not (tmp_path / "submitted").exists()
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("more", "subject"),
    [("evalution: {}", "config key evalution"), ("seed: 7\nseed: 8", r"config.yaml, line \d+")],
)
def test_a_bad_config_is_refused_in_one_line(more: str, subject: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"{yaml.safe_dump(TINY)}\n{more}\n")
    assert re.search(f"{subject}: ", failed(tmp_path, [*command_line("config.yaml"), "-n"]))


def test_an_error_in_finding_out_what_to_run_is_no_success(tmp_path: Path) -> None:
    """Of a file that is there already, too: Snakemake by itself warns and takes the file as it is."""
    (tmp_path / f"{'ha' * 30}.txt").write_text("made before\n")
    (tmp_path / "Snakefile").write_text(f"""include: "{SNAKEFILE}"

rule loop:
    output: "{{name}}.txt"

rule wanted:
    input: "{"ha" * 30}.txt"
""")
    command = command_line(write_config(tmp_path, TINY), "-n", "wanted")
    command[command.index(str(SNAKEFILE))] = "Snakefile"
    assert "periodically repeated" in failed(tmp_path, command)


def test_the_first_error_is_last_on_the_screen_and_names_its_log(tmp_path: Path) -> None:
    config = changed(TINY, {"domains.training.scripture.source.text": "body"})
    targets = [f"results/tiny/documents/{domain}/0000.parquet" for domain in ("scripture", "parliament")]
    command = command_line(write_config(tmp_path, config), *targets, "--logger", "demix", "--cores", "1")
    last = failed(tmp_path, command).rstrip().splitlines()[-1]
    assert "demix: error: " in last
    assert "results/tiny/logs/read/scripture.0000.log" in last
    assert (tmp_path / targets[1]).is_file(), "what does not need it goes on"


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
    for name in CLIENTS:
        (tmp_path / "bin" / name).symlink_to("/bin/true")
    command = ["snakemake", "--workflow-profile", PROFILES / "slurm"]
    environment = ENVIRONMENT | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{ENVIRONMENT['PATH']}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
