"""What a SLURM job trains and what it asks of the site."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from demix.errors import DemixError
from demix.settings import Integer, Items, Positive, Text, settings


@settings()
class Site:
    """What a job asks of the cluster."""

    partition: Text | None = Field(default=None, description="Partition of the jobs; null is the site's default.")
    account: Text | None = Field(default=None, description="Account that is charged.")
    qos: Text | None = Field(default=None, description="Quality of service.")
    constraint: Text | None = Field(default=None, description="Features that a node must have.")
    minutes: Positive = Field(
        default=720,
        description="Time limit of a job, in minutes. Training that reaches it saves its state, is queued again and "
        "goes on.",
    )
    memory_mb: Positive = Field(default=4000, description="Memory of a job, or of each rank in training, in MB.")
    gpus: Integer = Field(default=0, ge=0, le=1, description="GPUs of a scoring job, and of each rank in training.")


@settings()
class Cluster(Site):
    """What the config's section `cluster` says of one stage."""

    launch: Literal["local", "inline", "slurm"] = Field(
        default="local",
        description="How training starts its ranks - as processes of this machine, as the calling process alone, or as "
        "a SLURM job of their own through submitit (what profiles/slurm sets).",
    )
    ranks_per_node: Positive = Field(
        default=8, description="Most ranks of a training job on one node. More ranks than this must fill whole nodes."
    )
    setup: Items[Text] = Field(
        default=(),
        description="Shell lines that come before every command, such as module load cuda or export "
        "NCCL_SOCKET_IFNAME=ib0.",
    )
    grace_seconds: Positive = Field(
        default=120,
        description="How long before its time limit a training job is told to save its state. A step and a checkpoint "
        "must fit.",
    )
    requeues: Integer = Field(
        default=100,
        ge=0,
        description="How often a training job may be queued again, after its time limit, preemption or the loss of a "
        "node, before it fails.",
    )
    retries: Integer = Field(
        default=2,
        ge=0,
        description="How often a training job that broke down (a killed rank, an error that is none of demix's own) is "
        "submitted again by the same run; it goes on from its last checkpoint.",
    )
    on_interrupt: Literal["leave", "cancel"] = Field(
        default="leave",
        description="What becomes of running training jobs when snakemake is interrupted; a later run finds those that "
        "are left and waits for them.",
    )
    downloads: Literal["compute", "login"] = Field(
        default="compute",
        description="Where downloads run - as jobs, or where snakemake runs, for compute nodes without internet.",
    )

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
