"""The benchmarks start, and what they compare with is the plain arithmetic."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_every_benchmark_starts(script: Path) -> None:
    """With their folder first in sys.path, where tokenize.py has the name of a module of Python."""
    command = [sys.executable, str(script), "--help"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if script.stem not in ("common", "peers"):
        assert "--json" in done.stdout


def test_mixtures_are_those_of_the_plain_arithmetic(tmp_path: Path) -> None:
    """On a table of a few blocks, by every mixture of the benchmark."""
    command = [sys.executable, str(ROOT / "benchmarks" / "mix.py"), "--tokens", "5000", "--experts", "3"]
    command += ["--json", str(tmp_path / "rows.json")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (apart,) = [row for row in json.loads((tmp_path / "rows.json").read_text()) if "difference" in row["name"]]
    # Its unit is 1e-12.
    assert apart["ours"] < 1000
