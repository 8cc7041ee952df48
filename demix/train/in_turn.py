"""Several experts that are whole models, trained by one job, one after the other."""

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path

from demix.files import fingerprint
from demix.launch.job import TrainingJob
from demix.launch.slurm import collect, is_finished
from demix.train.branch import read_seed
from demix.train.stage import Training, identity_of, train_model
from demix.train.state import tell_done


def job_folder(checkpoints: Path, experts: Sequence[str]) -> Path:
    """The folder below `checkpoints` of the job that trains `experts`: that of the expert, where there is one."""
    first, *more = experts
    return checkpoints / (f"{first}-and-{len(more)}-more" if more else first)


def train_in_turn(
    kind: str,
    training: Training,
    shards: list[Path],
    experts: Sequence[str],
    output: Path,
    metrics: Path,
    checkpoints: Path,
    *,
    branch: Path | None = None,
    schedule: str = "continue",
    beside: Callable[[Path, Path], AbstractContextManager[None]],
) -> None:
    """Train `experts` of the domains in `shards`, each a whole model, as `demix.train.stage.train_model` does alone.

    Each has an entry of its own in `output`, `metrics` and `checkpoints`. Of several experts, those that are trained
    wait below `checkpoints` until the last is: Snakemake deletes the outputs of a job that was lost, and the next start
    goes on with the first expert that is left. `beside` is what runs beside a training with these checkpoints and
    metrics.
    """
    share = sum(path.stem != "dev" for path in shards)

    def train(name: str, output: Path, metrics: Path) -> None:
        own = [path for path in shards if path.parent.name == name]
        with beside(checkpoints / name, metrics):
            train_model(
                kind, training, own, output, metrics, checkpoints / name,
                branch=branch, share=share, schedule=schedule,
            )  # fmt: skip

    def as_job(name: str) -> TrainingJob:
        own = [path for path in shards if path.parent.name == name and path.stem != "dev"]
        identity = identity_of(kind, training, own, share=share)
        seed = None if branch is None else read_seed(branch, identity, schedule)
        outputs = {"--output": output / name, "--metrics": metrics / f"{name}.jsonl"}
        which = fingerprint([version("demix"), identity_of(kind, training, own, seed, share)])
        return TrainingJob((), which, outputs, 1, training.threads, checkpoints / name, 0)

    jobs = {name: as_job(name) for name in experts}
    # A job of more experts may have finished this one.
    if len(experts) == 1 and not is_finished(jobs[experts[0]]):
        train(experts[0], output / experts[0], metrics / f"{experts[0]}.jsonl")
        return
    done = os.environ.pop("DEMIX_DONE", None)
    try:
        for name, job in jobs.items():
            if not is_finished(job):
                job.finished.mkdir(parents=True, exist_ok=True)
                os.environ["DEMIX_DONE"] = str(job.finished / "done.json")
                train(name, job.finished / "output", job.finished / "metrics")
    finally:
        os.environ.pop("DEMIX_DONE", None)
        if done is not None:
            os.environ["DEMIX_DONE"] = done
    for job in jobs.values():
        collect(job)
    tell_done()
    for job in jobs.values():
        shutil.rmtree(job.finished)
