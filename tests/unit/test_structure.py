"""The tests themselves: their helpers, skipped tests in CI, and the faults of `make mutants`."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mutants.mutation import mutants

TESTS = Path(__file__).parents[1]


def imported(text: str) -> Iterator[str]:
    """The name of each module that a module imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_helpers_come_from_support_alone() -> None:
    for path in TESTS.rglob("*.py"):
        parts = {part for name in imported(path.read_text()) for part in name.split(".")}
        assert not [part for part in parts if part == "conftest" or part.startswith("test_")], path
        assert path.parent.name != "support" or not path.name.startswith("test_")


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


REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("path", ["demix/mix/logs.py", "demix/files/atomic.py"])
def test_names_are_unique_and_outlive_another_format(path: str) -> None:
    text = (REPOSITORY / path).read_text()
    found = mutants(path, text)
    assert len({mutant.key for mutant in found}) == len({mutant.text for mutant in found}) == len(found) > 50
    for mutant in found:
        compile(mutant.text, path, "exec")
    again = mutants(path, "# A line.\n\n" + ast.unparse(ast.parse(text)))
    assert [mutant.key for mutant in again] == [mutant.key for mutant in found]
