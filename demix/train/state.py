"""Training state on disk, from which a killed run resumes with the same results on any number of ranks."""

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from demix.errors import DemixError
from demix.files import exclusive, fsync, read_json, sha256_file, write_json
from demix.launch.snakemake import is_job
from demix.model.directory import SHARED, load_verified, save_tensors
from demix.train.parallel import World

log = logging.getLogger(__name__)

# A row of metrics, for an update or an evaluation.
Row = dict[str, Any]


def step_folder(step: int) -> str:
    """The name of the folder of the state after `step` updates."""
    return f"step-{step:08d}"


def expert_file(name: str) -> str:
    """The name of the file with the state of an expert, next to `SHARED`."""
    return f"expert-{name}.safetensors"


@dataclass(frozen=True)
class State:
    """The part of a run's state after `step` updates that one rank holds.

    `shared` are the tensors that are equal on all ranks. `experts` are the tensors of each expert on this rank.
    """

    step: int
    shared: dict[str, torch.Tensor]
    experts: dict[str, dict[str, torch.Tensor]]
    metrics: list[Row]


@contextmanager
def training_lock(directory: Path, world: World) -> Iterator[None]:
    """Lock the folder of a run's checkpoints, so that no second process trains the same run."""
    if world.rank:
        yield
        return
    # After the loss of a node, SLURM may restart a job before the node has ended the old one. A job whose snakemake was
    # killed needs time to save its state.
    patience = 600.0 if "SLURM_JOB_ID" in os.environ else 60.0 if is_job.is_set() else 0.0
    with exclusive(directory / "lock", "trains this run", patience):
        # Processes that were killed while writing may have left such folders.
        for partial in directory.glob(".*.partial"):
            shutil.rmtree(partial, ignore_errors=True)
        yield


def save_state(directory: Path, state: State, world: World, keep: int, steps: Sequence[int] = ()) -> None:
    """Write the checkpoint `directory/step-<step>/`. All ranks must call this function, and each writes its part.

    The manifest with the sha256 of all files is written last; then the folder is renamed. Older checkpoints are
    removed, except the newest `keep` and those of `steps`.
    """
    path = directory / step_folder(state.step)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        if world.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        world.wait()
        if world.writes_experts:
            for name, tensors in state.experts.items():
                _save(tensors, temporary / expert_file(name))
        if world.rank == 0:
            _save(state.shared, temporary / SHARED)
            (temporary / "metrics.jsonl").write_text(lines_of(state.metrics))
            fsync(temporary / "metrics.jsonl")
        world.wait()
        if world.rank == 0:
            sha256 = {file.name: sha256_file(file) for file in sorted(temporary.iterdir())}
            manifest = {"step": state.step, "sha256": sha256}
            write_json(temporary / "manifest.json", manifest)
            fsync(temporary)
            if path.exists():
                # This checkpoint is damaged; otherwise training would have resumed from it.
                path.rename(path.with_name(f".{path.name}.old.partial"))
            temporary.rename(path)
            fsync(directory)
            _remove_old(directory, path, keep, steps)
        world.wait()
    except OSError as error:
        cure = "free space or fix its permissions, then rerun: training resumes from the previous checkpoint"
        raise DemixError(path, f"cannot be written ({os.strerror(error.errno or 0)})", cure) from error


def newest_state(directory: Path, experts: tuple[str, ...], world: World) -> State | None:
    """The newest complete checkpoint below `directory` with the named experts; None if there is none.

    A checkpoint without a manifest is incomplete and ignored. A checkpoint whose bytes changed is skipped with a
    warning. All ranks choose the same checkpoint.
    """
    for path in reversed(_steps(directory)):
        state = None
        try:
            state = load_state(path, experts)
        except DemixError as error:
            log.warning("%s; using the previous checkpoint instead", error)
        if world.sum([state is None])[0] == 0:
            return state
    return None


def tell_done() -> None:
    """Notify the process that waits for a SLURM job (`demix.launch.slurm`) that all results of the job are written."""
    if done := os.environ.get("DEMIX_DONE"):
        files = [path for path in Path(done).parent.rglob("*") if path.is_file()]
        write_json(done, {"files": {str(path.relative_to(Path(done).parent)): path.stat().st_size for path in files}})


def remove_states(directory: Path, steps: Sequence[int] = ()) -> None:
    """Remove the checkpoints of a finished run, except those of `steps`.

    Call this after all results are written. The process that waits for a SLURM job (`demix.launch.slurm`) is notified
    before anything is removed.
    """
    tell_done()
    for path in _steps(directory):
        if _step(path) not in steps:
            shutil.rmtree(path)
    (directory / "metrics.jsonl").unlink(missing_ok=True)
    if not _steps(directory):
        shutil.rmtree(directory, ignore_errors=True)


def load_state(path: Path, experts: tuple[str, ...]) -> State:
    """The checkpoint in the folder `path` with the named experts. Raises DemixError if it is missing or damaged."""
    manifest = read_json(path / "manifest.json")
    try:
        sha256, step = manifest["sha256"], int(manifest["step"])
        files = [SHARED, *map(expert_file, experts)]
        shared, *own = [load_verified(path / file, sha256[file]) for file in files]
        if sha256_file(path / "metrics.jsonl") != sha256["metrics.jsonl"]:
            raise DemixError(path / "metrics.jsonl", "differs from its recorded sha256", "delete this checkpoint")
        metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise DemixError(path, f"is not a checkpoint ({error!r})", "delete it") from None
    return State(step, shared, dict(zip(experts, own, strict=True)), metrics)


def lines_of(rows: Iterable[Row]) -> str:
    """Rows as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_tensors(tensors, path)
    fsync(path)


def _steps(directory: Path) -> list[Path]:
    return sorted(path.parent for path in directory.glob("step-*/manifest.json"))


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _remove_old(directory: Path, newest: Path, keep: int, kept: Sequence[int]) -> None:
    """Remove all checkpoints except `newest`, the `keep` - 1 before it, and those of the steps `kept`."""
    steps = [path for path in _steps(directory) if path == newest or _step(path) not in kept]
    place = steps.index(newest)
    # The resumed run skipped every checkpoint after the newest, so these are damaged.
    for old in steps[: max(0, place - keep + 1)] + steps[place + 1 :]:
        shutil.rmtree(old)
    for partial in directory.glob(".*.partial"):
        shutil.rmtree(partial, ignore_errors=True)
