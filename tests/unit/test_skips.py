"""`--no-skips`, by which CI sees that a machine with all that the tests need skips none but those for a GPU."""

import os
import subprocess
import sys
from pathlib import Path

SKIPPING = """
import pytest

@pytest.fixture
def absent():
    pytest.skip("needs a lion")

def test_by_its_fixture(absent): ...

@pytest.mark.skipif(True, reason="needs a tiger")
def test_by_its_mark(): ...

@pytest.mark.gpu
@pytest.mark.skipif(True, reason="needs a GPU")
def test_on_a_gpu(): ...

@pytest.mark.xfail
def test_expected_to_fail(): assert False

def test_that_runs(): ...
"""
COUNTS = "1 passed, 1 skipped, 1 xfailed, 2 errors"


def test_only_tests_for_a_gpu_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").symlink_to(Path(__file__).parents[1] / "conftest.py")
    (tmp_path / "test_some.py").write_text(SKIPPING)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: needs a GPU\n    full: takes long\n")
    # CI hands its own options to all of its tests.
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--no-skips"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1].rpartition(" in ")[0]) == (1, COUNTS), done.stdout
