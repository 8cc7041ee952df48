"""Runs of the tiny config on SLURM, and trainings that can be disturbed."""

import copy
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import yaml

from demix.files import read_json_lines

REPOSITORY = Path(__file__).parents[2]
# The commands of the environment that the tests run in, whether or not it is activated.
ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
TINY = yaml.safe_load((REPOSITORY / "tests" / "workflow" / "tiny.yaml").read_text())
# Four ranks on two nodes, one domain on two of them: each rank begins with seconds of imports.
SITE = {"memory_mb": 900, "ranks_per_node": 2, "minutes": 30, "grace_seconds": 20}
FOUR = {"ranks": 4, "replicas": {"parliament": 2, "scripture": 1, "licenses": 1}}


def snakemake(
    folder: Path, config: dict, *arguments: str, profile: str = "slurm", environment: dict[str, str] = ENVIRONMENT
) -> subprocess.Popen:
    """Start snakemake in `folder`, in a session of its own; what it prints goes to printed.log there."""
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    chosen = {"slurm": "--profile", "default": "--workflow-profile"}[profile]
    command = [
        "snakemake", "--snakefile", str(REPOSITORY / "workflow" / "Snakefile"), "--configfile", "config.yaml",
        chosen, str(REPOSITORY / "profiles" / profile), *arguments,
    ]  # fmt: skip
    with open(folder / "printed.log", "ab") as log:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def printed(folder: Path) -> str:
    """What snakemake said in `folder`, in all of its runs."""
    return (folder / "printed.log").read_text()


def config_with(**sections: dict) -> dict:
    """The tiny config with some keys of its sections replaced."""
    config = copy.deepcopy(TINY)
    for name, values in sections.items():
        config[name] = config.get(name, {}) | values
    return config


def until(condition: Callable[[], object], seconds: float = 120.0) -> object:
    """Wait until `condition()` is true, and return what it is."""
    give_up = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < give_up, f"not within {seconds} s"
        time.sleep(0.2)
    return value


class Trained:
    """The training of DEMix in a copy of a prepared folder, long enough to be disturbed."""

    def __init__(self, prepared: Path, folder: Path, **cluster: object):
        self.folder = folder
        shutil.copytree(prepared, folder, symlinks=True, dirs_exist_ok=True)
        (folder / "printed.log").unlink()
        self.config = config_with(
            training=FOUR | {"tokens": 240 * 384, "precision": "fp64", "checkpoint_every": 20},
            cluster=SITE | cluster,
        )
        self.checkpoints = folder / "results" / "tiny" / "checkpoints" / "demix"
        self.started = time.time()

    def start(self) -> subprocess.Popen:
        return snakemake(self.folder, self.config, "--until", "train_demix")

    def step(self) -> int:
        """The last step that the running training has recorded."""
        lines = [line for path in self.checkpoints.glob("*/metrics.jsonl") for line in path.read_text().splitlines()]
        return json.loads(lines[-1])["step"] if lines else 0

    def job(self) -> str:
        return json.loads((self.checkpoints / "jobs" / "job.json").read_text())["job"]

    def losses(self) -> list[float]:
        path = self.folder / "results" / "tiny" / "metrics" / "demix.jsonl"
        return [row["loss"] for row in read_json_lines(path) if "loss" in row]

    def runs(self) -> list[tuple[str, str, str]]:
        """(start, end, state) of every start of every training job of this folder, in order."""
        from demix.launch.job import TrainingJob

        name = TrainingJob((), "", {}, 4, 1, self.checkpoints, 0).name
        command = ["sacct", "-X", "-D", "-n", "-P", "--name", name, "-S", "now-3hours", "-o", "Start,End,State"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        return sorted(tuple(line.split("|")[:3]) for line in lines if not line.startswith(("Unknown", "None")))

    def assert_one_at_a_time(self) -> None:
        runs = until(lambda: (found := self.runs()) and "RUNNING" not in found[-1][2] and found)
        for (_, end, _), (start, _, _) in pairwise(runs):
            assert end <= start, runs
