"""Kills at every write from the last step of a training on: a rerun never begins anew, and ends with the same bytes."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from support.tokens import write_tokens
from support.training import ADAPT, TRAIN, novel_shards, rows, shard_paths, tensors

# Of every process of demix whose rank is that of the plan: what it does to the file with that number is its last act.
HOOK = """
import glob, os, signal, sys
if plan := os.environ.get("KILL_AT"):
    rank, number, name, pattern, steps, note = plan.split(",")
    seen, begun = 0, False

    def hook(event, args):
        global seen, begun
        writes = event in ("os.rename", "os.remove", "os.rmdir", "os.link", "os.mkdir")
        if not writes and not (event == "open" and isinstance(args[1], str) and {*args[1]} & {*"wax+"}):
            return
        begun = begun or any(sum('"loss"' in row for row in open(path)) >= int(steps) for path in glob.glob(pattern))
        seen += begun
        if begun and seen == int(number):
            os.mkdir(note)
            os.kill(os.getpid(), int(name))

    if os.environ.get("RANK", "none") == rank:
        sys.addaudithook(hook)
"""
SETTINGS = json.dumps(asdict(replace(TRAIN, checkpoint_every=5, tokens=192 * 8, dev_blocks=2)))
# Its arguments, the rank to be killed (none: the one process, or the launcher of several), and its updates.
CASES = {
    "demix": (["train", "demix"], "none", 8),
    "rank 0 of 2": (["train", "demix", "--ranks", "2"], "0", 8),
    "rank 1 of 2": (["train", "demix", "--ranks", "2"], "1", 8),
    "launcher of 2": (["train", "demix", "--ranks", "2"], "none", 8),
    "expert": (["train", "branched", "--experts", "scripture"], "none", 8),
    "adapted": (["adapt-dense"], "none", 20),
}


def run(words: list[str], tokens: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    shards = [*shard_paths(tokens), *shard_paths(tokens, split="dev")]
    settings, metrics = SETTINGS, "metrics" if "branched" in words else "metrics.jsonl"
    if words == ["adapt-dense"]:
        shards = [tokens / "dense" / "model", *novel_shards(tokens), *shards[3:]]
        settings = json.dumps(asdict(ADAPT))
    places = {"output": "model", "metrics": metrics, "checkpoints": "checkpoints"}
    told = [word for option, name in places.items() for word in (f"--{option}", folder / name)]
    command = [sys.executable, "-m", "demix", *words, *shards, "--settings", settings, *told]
    return subprocess.run(
        [*map(str, command)], check=False, env=os.environ | environment, capture_output=True, text=True
    )


def results(folder: Path) -> tuple[object, ...]:
    metrics = folder / "metrics" / "scripture.jsonl"
    if metrics.exists():
        metrics.rename(folder / "metrics.jsonl")
    return tensors(folder), rows(folder), sorted(path.name for path in (folder / "model").rglob("*.json"))


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
@pytest.mark.parametrize("case", CASES)
def test_an_ended_training_is_never_lost(
    case: str, number: signal.Signals, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    write_tokens(tmp_path)
    words, rank, steps = CASES[case]
    assert run(["train", "dense"], tmp_path, tmp_path / "dense").returncode == 0
    assert run(words, tmp_path, tmp_path / "whole").returncode == 0
    wanted, most = results(tmp_path / "whole"), request.config.getoption("--kills")
    for kill in range(1, 200, max(1, 60 // most)):
        folder = tmp_path / f"{kill}"
        depth = "*/*" if case == "expert" else "*"
        plan = f"{rank},{kill},{int(number)},{folder}/checkpoints/{depth}/metrics.jsonl,{steps},{folder}/killed"
        killed = run(words, tmp_path, folder, KILL_AT=plan, PYTHONPATH=f"{tmp_path}:{os.environ['PYTHONPATH']}")
        if not (folder / "killed").exists():
            break
        for path in [*folder.glob("model/**/*.*"), *folder.glob("metrics*/**/*.*"), folder / "metrics.jsonl"]:
            # Snakemake deletes the outputs of a job that fails.
            if killed.returncode and path.is_file():
                path.unlink()
        again = run(words, tmp_path, folder)
        assert again.returncode == 0, again.stderr
        begins = re.findall(r"resuming at step (\d+) of", again.stderr)
        assert begins or "steps of" not in again.stderr, (kill, again.stderr)
        assert results(folder) == wanted, kill
    assert kill > 1
