"""Snakemake in the background, and trainings on SLURM that can be disturbed."""

import copy
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from demix.files import read_json_lines
from support.dry_run import ENVIRONMENT, TINY, command_line, write_config

# Six ranks on two nodes, one domain on both of them: each rank begins with seconds of imports.
SITE = {"sbatch": {"nice": 5}, "memory_mb": 900, "ranks_per_node": 3, "minutes": 30, "grace_seconds": 20}
SIX = {"ranks": 6}


def snakemake(
    folder: Path, config: dict, *arguments: str, profile: str = "slurm", environment: dict[str, str] = ENVIRONMENT
) -> subprocess.Popen:
    """Start snakemake in `folder`, in a session of its own; what it prints goes to printed.log there."""
    folder.mkdir(parents=True, exist_ok=True)
    command = command_line(write_config(folder, config), *arguments, profile=profile)
    with open(folder / "printed.log", "ab") as log:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
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


def until(condition: Callable[[], object], seconds: float = 600.0) -> object:
    """Wait until `condition()` is true, and return what it is."""
    give_up = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < give_up, f"not within {seconds} s"
        time.sleep(0.2)
    return value


def copy_run(prepared: Path, folder: Path) -> Path:
    """Copy the folder of a finished run, without what snakemake printed there."""
    return shutil.copytree(
        prepared, folder, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns("printed.log")
    )


def step_of(checkpoints: Path) -> int:
    """The last step that a running training has recorded."""
    lines = [line for path in checkpoints.glob("*/metrics.jsonl") for line in path.read_text().splitlines()]
    return json.loads(lines[-1])["step"] if lines else 0


def starts_of(checkpoints: Path) -> list[tuple[str, str]]:
    """(start, end) of every start of every SLURM job of a training that has ended, in order, by the accounting."""
    from demix.launch.job import Places, TrainingJob

    name = TrainingJob((), "", Places(None, None, checkpoints), 1, 1, 0).name
    command = ["sacct", "-X", "-D", "-n", "-P", "--name", name, "-S", "now-3hours", "-o", "Start,End,State"]

    def ended() -> list[list[str]]:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        rows = [line.split("|") for line in lines if not line.startswith(("Unknown", "None"))]
        return [] if any("RUNNING" in state for *_, state in rows) else rows

    return sorted((start, end) for start, end, _ in until(ended))


def losses_of(metrics: Path) -> list[float]:
    return [row["loss"] for row in read_json_lines(metrics) if "loss" in row]


def ranks_of(checkpoints: Path) -> list[int]:
    """The process numbers of the ranks of a training's job."""
    command = ["pgrep", "-f", f"submitit.core._submit {checkpoints / 'jobs'}"]
    pids = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return [int(pid) for pid in pids if b"srun" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]]


class Trained:
    """The training of DEMix in a copy of a prepared folder, long enough to be disturbed."""

    def __init__(self, prepared: Path, folder: Path, **cluster: object):
        self.folder = copy_run(prepared, folder)
        self.config = config_with(
            training=SIX | {"tokens": 240 * 384, "precision": "fp64", "checkpoint_every": 20},
            cluster=SITE | cluster,
        )
        self.checkpoints = folder / "results" / "tiny" / "checkpoints" / "demix"

    def start(self) -> subprocess.Popen:
        return snakemake(self.folder, self.config, "--until", "results/tiny/models/demix/model.json")

    def start_and_wait(self, step: int = 45) -> subprocess.Popen:
        """Start the run and wait until its training is past a step."""
        process = self.start()
        until(lambda: step_of(self.checkpoints) > step)
        return process

    def job(self) -> str:
        return json.loads((self.checkpoints / "jobs" / "job.json").read_text())["job"]

    def losses(self) -> list[float]:
        return losses_of(self.folder / "results" / "tiny" / "metrics" / "demix.jsonl")

    def starts(self) -> list[tuple[str, str]]:
        """(start, end) of every start of the training's jobs, of which none began before the one before had ended."""
        found = starts_of(self.checkpoints)
        for (_, end), (start, _) in pairwise(found):
            assert end <= start, found
        return found
