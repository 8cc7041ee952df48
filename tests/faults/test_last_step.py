"""Kills at every write from the last step of a training on: a rerun never begins anew, and ends with the same bytes."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from demix.files import read_json_lines
from support.breaking import demix
from support.tokens import TRAINING, write_tokens
from support.training import ADAPT, TRAIN, novel_shards, shard_paths

# Of every process of demix whose rank is that of the plan: the signal comes before the write with that number.
HOOK = """
import glob, os, sys
if plan := os.environ.get("KILL_AT"):
    rank, number, name, folder, steps = plan.split(",")
    seen = 0

    def hook(event, args):
        global seen
        if event in ("os.rename", "os.remove", "os.rmdir", "os.link", "os.mkdir") or (
            event == "open" and {*str(args[1])} & {*"wax+"}
        ):
            files = glob.glob(f"{folder}/checkpoints/**/metrics.jsonl", recursive=True)
            seen += seen > 0 or any(open(path).read().count('"loss"') >= int(steps) for path in files)
            if seen == int(number):
                os.mkdir(f"{folder}/killed")
                os.kill(os.getpid(), int(name))

    if os.environ.get("RANK", "none") == rank:
        sys.addaudithook(hook)
"""
SETTINGS = TRAIN.replace(checkpoint_every=5, tokens=192 * 8, dev_blocks=2)
# The arguments, and the rank to be killed: none, of one process. A launcher writes nothing after the last step.
CASES = {
    "demix": (["train", "demix"], "none"),
    "first": (["train", "demix", "--ranks", "2"], "0"),
    "second": (["train", "demix", "--ranks", "2"], "1"),
    "expert": (["train", "branched", "--expert", "scripture"], "none"),
    "adapted": (["adapt"], "none"),
}


def run(words: list[str], tokens: Path, folder: Path) -> subprocess.CompletedProcess:
    # Two ranks train a domain each.
    shards, settings = shard_paths(tokens, TRAINING[:2]) + shard_paths(tokens, TRAINING[:2], "dev"), SETTINGS
    if words == ["adapt"]:
        shards, settings = [tokens / "dense" / "model", *novel_shards(tokens), *shards[2:]], ADAPT
    places = {"--output": "model", "--metrics": "metrics.jsonl", "--checkpoints": "checkpoints"}
    told = [word for option, name in places.items() for word in (option, folder / name)]
    return demix(*words, *shards, "--settings", json.dumps(settings.as_dict()), *told)


def results(folder: Path) -> dict[str, object]:
    """What was written in place, without the times."""
    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        if path.is_file() and "checkpoints" not in path.parts:
            rows = [row | {"tokens_per_second": 0} for row in read_json_lines(path)] if path.suffix == ".jsonl" else ()
            found[path.relative_to(folder).as_posix()] = rows or path.read_bytes()
    return found


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("case", CASES)
def test_an_ended_training_is_never_lost(
    case: str, number: int, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    write_tokens(tmp_path)
    words, rank = CASES[case]
    assert run(["train", "dense"], tmp_path, tmp_path / "dense").returncode == 0
    assert run(words, tmp_path, tmp_path / "whole").returncode == 0
    wanted = results(tmp_path / "whole")
    (steps,) = (sum("loss" in row for row in rows) for name, rows in wanted.items() if "jsonl" in name)
    for kill in range(1, 200, max(1, 60 // request.config.getoption("--kills"))):
        folder = tmp_path / f"{kill}"
        monkeypatch.setenv("KILL_AT", f"{rank},{kill},{number:d},{folder},{steps}")
        killed = run(words, tmp_path, folder)
        monkeypatch.delenv("KILL_AT")
        if not (folder / "killed").exists():
            break
        for name in results(folder) if killed.returncode else ():
            # Snakemake deletes the outputs of a job that fails.
            (folder / name).unlink()
        again = run(words, tmp_path, folder)
        assert again.returncode == 0, again.stderr
        assert re.search(r"resuming at step \d+ of", again.stderr) or "steps of" not in again.stderr, again.stderr
        assert results(folder) == wanted, kill
    assert kill > 1
