"""What a SLURM job trains and what it asks of the site."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from demix.errors import DemixError


@dataclass(frozen=True)
class Cluster:
    """What the config's section `cluster` says of one stage; see config/README.md."""

    launch: str
    partition: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    minutes: int
    memory_mb: int
    gpus: int
    ranks_per_node: int
    setup: tuple[str, ...]
    grace_seconds: int
    requeues: int
    retries: int
    on_interrupt: str
    downloads: str

    def nodes(self, ranks: int) -> int:
        """How many nodes so many ranks take; DemixError if they do not fill them."""
        nodes = -(-ranks // self.ranks_per_node)
        if ranks % nodes:
            cause = f"is {self.ranks_per_node}, and {ranks} ranks do not fill {nodes} nodes evenly"
            raise DemixError("cluster.ranks_per_node", cause, "give a divisor of the ranks")
        return nodes


@dataclass(frozen=True)
class TrainingJob:
    """A training to be done by a job.

    `command` are the arguments of `demix`. `fingerprint` tells two trainings apart. `outputs`
    are the options that name results, with the places where the results belong. `checkpoints` is the folder that all
    starts of the training share; all nodes must see it. `steps` is how many updates the training has, to tell how far
    it is.
    """

    command: tuple[str, ...]
    fingerprint: str
    outputs: Mapping[str, Path]
    ranks: int
    threads: int
    checkpoints: Path
    steps: int

    @property
    def name(self) -> str:
        """The job's name, by which it is found again: one for each folder of checkpoints."""
        place = hashlib.sha256(str(self.checkpoints.resolve()).encode()).hexdigest()[:12]
        return f"demix-{self.checkpoints.name}-{place}"

    @property
    def finished(self) -> Path:
        """Where the job leaves its results. They stay, as other names of the same files, until another is submitted."""
        return self.checkpoints / f"finished-{self.fingerprint}"

    @property
    def jobs(self) -> Path:
        """Where the files of the jobs and the logs of their ranks are."""
        return self.checkpoints / "jobs"


def training_fingerprint(*parts: object) -> str:
    """A hash that two trainings share when they are the same: 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
