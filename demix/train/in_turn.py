"""Several experts that are whole models, trained by one job, one after the other."""

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from demix.launch.job import Places, TrainingJob, fingerprint_of
from demix.launch.slurm import collect, is_finished
from demix.train.stage import ModelTraining, train_model
from demix.train.state import tell_done


def job_folder(checkpoints: Path, experts: Sequence[str]) -> Path:
    """The folder below `checkpoints` of the job that trains `experts`: that of the expert, where there is one."""
    first, *more = experts
    return checkpoints / (f"{first}-and-{len(more)}-more" if more else first)


def train_in_turn(
    training: ModelTraining,
    experts: Sequence[str],
    places: Places,
    beside: Callable[[Path, Path | None], AbstractContextManager[None]],
) -> None:
    """Train `experts` of the domains of `training`, each a whole model, as `demix.train.stage.train_model` does alone.

    `places` are folders, with an entry for each expert. Of several experts, those that are trained wait below their
    checkpoints until the last is: Snakemake deletes the outputs of a job that was lost, and the next start goes on with
    the first expert that is left. `beside` is what runs beside a training with these checkpoints and metrics.
    """
    own = {name: (training.alone(name), places.of(name)) for name in experts}
    # Apart from where a job of this expert alone keeps its results.
    waiting = {name: at.checkpoints / "waiting" for name, (_, at) in own.items()}
    jobs = {
        name: TrainingJob((), fingerprint_of([one.identity]), at.results, 1, one.settings.threads, waiting[name], 0)
        for name, (one, at) in own.items()
    }

    def train(name: str, at: Places) -> None:
        with beside(at.checkpoints, at.metrics):
            train_model(own[name][0], at)

    # A job of more experts may have finished this one.
    if len(experts) == 1 and not is_finished(jobs[experts[0]]):
        train(experts[0], places.of(experts[0]))
        return
    done = os.environ.pop("DEMIX_DONE", None)
    try:
        for name, job in jobs.items():
            if not is_finished(job):
                job.finished.mkdir(parents=True, exist_ok=True)
                os.environ["DEMIX_DONE"] = str(job.done)
                train(name, own[name][1].below(job.finished))
    finally:
        os.environ.pop("DEMIX_DONE", None)
        if done is not None:
            os.environ["DEMIX_DONE"] = done
    for job in jobs.values():
        collect(job)
    tell_done()
    for job in jobs.values():
        shutil.rmtree(job.checkpoints)
