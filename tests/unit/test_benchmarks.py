"""The benchmarks start, and what they compare with is the plain arithmetic."""

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
