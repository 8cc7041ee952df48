"""The description of a training for a SLURM job, and the resources that the job requests."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from demix.errors import DemixError
from demix.files import fingerprint, read_json
from demix.settings import Integer, Items, Positive, Settings, Text

# Options of sbatch that other keys, or demix itself, set.
OWN_OPTIONS = re.compile(
    "account|array|chdir|clusters|comment|constraint|cpus-per-gpu|cpus-per-task|dependency|error|export|gpus"
    "|gpus-per-node|gpus-per-task|gres|job-name|mem|mem-per-cpu|mem-per-gpu|no-requeue|nodes|ntasks|ntasks-per-gpu"
    "|ntasks-per-node|open-mode|output|parsable|partition|qos|requeue|signal|test-only|time|wait|wrap"
)


def _further(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if OWN_OPTIONS.fullmatch(name):
            raise ValueError(f"has {name}, which demix sets itself", "remove it, and set the key of that name")
        if not re.fullmatch("[a-z][a-z0-9-]+", name):
            raise ValueError(f"has {name!r:.40}, which is not an option's name", "write it without dashes: reservation")
    return options


class Site(Settings):
    """The resources that a job requests from the cluster."""

    partition: Text | None = Field(default=None, description="Partition of the jobs; null: the site's default.")
    account: Text | None = Field(default=None, description="Account to which the jobs are charged.")
    qos: Text | None = Field(default=None, description="Quality of service.")
    constraint: Text | None = Field(default=None, description="Features that a node must have.")
    sbatch: Annotated[dict[Text, Text | Integer | Literal[True]], AfterValidator(_further)] = Field(
        default={},
        description='Further options of sbatch by their long names, such as `{reservation: course, exclude: "n[1-2]", '
        "wckey: project, exclusive: true}`. An option that another key sets is an error.",
    )
    minutes: Positive = Field(
        default=720,
        description="Time limit of a job, in minutes. A training that reaches the limit saves its state, is requeued "
        "and resumes.",
    )
    memory_mb: Positive = Field(default=4000, description="Memory of a job, or of each rank in training, in MB.")
    gpus: Integer = Field(default=0, ge=0, le=1, description="GPUs of a scoring job, and of each rank in training.")
    gpu_type: Text | None = Field(default=None, description="Type of the GPUs, as SLURM names it, such as a100.")

    @property
    def options(self) -> list[str]:
        """The options in `sbatch` as words of a command line."""
        return [f"--{name}" if value is True else f"--{name}={value}" for name, value in self.sbatch.items()]


class Cluster(Site):
    """The settings of the config's section `cluster` for one stage."""

    launch: Literal["local", "slurm"] = Field(
        default="local",
        description="How training starts its ranks: local (as processes on this machine) or slurm (in a separate SLURM "
        "job, through submitit; profiles/slurm sets this value).",
    )
    ranks_per_node: Positive = Field(
        default=8,
        description="Maximum number of ranks of a training job per node. If there are more ranks, they must fill whole "
        "nodes.",
    )
    setup: Items[Text] = Field(
        default=(),
        description="Shell lines that run before every command, such as module load cuda or export "
        "NCCL_SOCKET_IFNAME=ib0.",
    )
    grace_seconds: Positive = Field(
        default=120,
        description="Seconds before a job's time limit at which SLURM signals a training to save its state. "
        "One step and one checkpoint must fit into this time.",
    )
    downloads: Literal["compute", "login"] = Field(
        default="compute",
        description="Where downloads run: compute (as jobs) or login (on the machine of snakemake, if compute nodes "
        "have no internet).",
    )

    def nodes(self, ranks: int) -> int:
        """The number of nodes for `ranks` ranks. Raises DemixError if the ranks do not fill these nodes evenly."""
        nodes = -(-ranks // self.ranks_per_node)
        if ranks % nodes:
            cause = f"is {self.ranks_per_node}, and {ranks} ranks do not fill {nodes} nodes evenly"
            raise DemixError("cluster.ranks_per_node", cause, "give a divisor of the ranks")
        return nodes


@dataclass(frozen=True)
class Places:
    """Paths to which a training writes: `output` (a model directory or state), the file `metrics`, and `checkpoints`.

    None means that the result is not kept.
    """

    output: Path | None
    metrics: Path | None
    checkpoints: Path

    @property
    def results(self) -> dict[str, Path]:
        """The results that are kept, by the options of the command that name them."""
        named = {"--output": self.output, "--metrics": self.metrics}
        return {option: path for option, path in named.items() if path is not None}

    @property
    def options(self) -> list[str]:
        """The options of the command that name the results."""
        return [word for option, path in self.results.items() for word in (option, str(path))]

    def below(self, folder: Path) -> "Places":
        """The same results in `folder`, where they wait until all are complete."""
        return Places(self.output and folder / "output", self.metrics and folder / "metrics", self.checkpoints)


def fingerprint_of(about: Sequence[object], shards: Sequence[Path] = ()) -> str:
    """The fingerprint of a training: of demix's version, of `about`, and of the data of `shards`."""
    data = {str(path): read_json(path.with_suffix(".json"))["sha256"] for path in shards}
    return fingerprint([version("demix"), *about, *([data] if shards else [])])


@dataclass(frozen=True)
class TrainingJob:
    """A training that a SLURM job or processes on this machine do.

    `command` holds the arguments of `demix`. `fingerprint` identifies the training. All starts of the training share
    the folder `places.checkpoints`, which must be visible on all nodes. `steps` is the number of optimizer updates, for
    the display of progress.
    """

    command: tuple[str, ...]
    fingerprint: str
    places: Places
    ranks: int
    threads: int
    steps: int

    @property
    def checkpoints(self) -> Path:
        """The folder of the training's states."""
        return self.places.checkpoints

    @property
    def label(self) -> str:
        """The name of the training for people: its path below the run's checkpoints, such as demix or btm/law."""
        above = next((folder for folder in self.checkpoints.parents if folder.name == "checkpoints"), None)
        return self.checkpoints.relative_to(above or self.checkpoints.parent).as_posix()

    @property
    def name(self) -> str:
        """The job's name in SLURM, by which a later process finds the job. Each folder of checkpoints has one name."""
        place = hashlib.sha256(str(self.checkpoints.resolve()).encode()).hexdigest()[:12]
        return f"demix-{self.label.replace('/', '-')}-{place}"

    @property
    def finished(self) -> Path:
        """The folder to which the job writes its results.

        They stay there until another job is submitted; weights are hard links to the collected files.
        """
        return self.checkpoints / f"finished-{self.fingerprint}"

    @property
    def done(self) -> Path:
        """The file that marks all results next to it as complete."""
        return self.finished / "done.json"

    @property
    def jobs(self) -> Path:
        """The folder for the files of the jobs and the logs of their ranks."""
        return self.checkpoints / "jobs"
