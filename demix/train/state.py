"""Training state on disk: what a killed run needs to go on as if nothing had happened."""

import json
import shutil
from pathlib import Path

import torch

from demix.errors import DemixError
from demix.files import read_json, replacing, sha256_file, write_json
from demix.model.checkpoint import load_verified, save_tensors

KEPT = 2


def save_state(directory: Path, step: int, tensors: dict[str, torch.Tensor], metrics: list[dict]) -> None:
    """Write `directory/step-<step>/`: tensors, the metrics so far, and last the manifest with their sha256.

    Only the newest few are kept.
    """
    with replacing(directory / f"step-{step:08d}", directory=True) as temporary:
        save_tensors(tensors, temporary / "state.safetensors")
        (temporary / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
        write_json(
            temporary / "manifest.json",
            {"step": step, "sha256": {path.name: sha256_file(path) for path in sorted(temporary.iterdir())}},
        )
    for old in _steps(directory)[:-KEPT]:
        shutil.rmtree(old)


def newest_state(directory: Path) -> tuple[int, dict[str, torch.Tensor], list[dict]] | None:
    """Step, tensors and metrics of the newest complete checkpoint below `directory`; None if there is none.

    A checkpoint without a manifest was never finished and is passed over; one whose bytes changed is an error.
    """
    for path in reversed(_steps(directory)):
        if (path / "manifest.json").is_file():
            manifest = read_json(path / "manifest.json")
            tensors = load_verified(path / "state.safetensors", manifest["sha256"]["state.safetensors"])
            if sha256_file(path / "metrics.jsonl") != manifest["sha256"]["metrics.jsonl"]:
                cure = "delete this checkpoint; training goes on from the one before"
                raise DemixError(path / "metrics.jsonl", "differs from its recorded sha256", cure)
            metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
            return manifest["step"], tensors, metrics
    return None


def _steps(directory: Path) -> list[Path]:
    return sorted(directory.glob("step-*"))
