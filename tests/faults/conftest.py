"""What breaks is broken here on purpose: in every way by `make faults`, in a few ways of each kind otherwise."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.once import tiny_run


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults")
    group.addoption("--all-faults", action="store_true", help="every case as often as the campaign has it")
    group.addoption("--kills", type=int, default=50, help="moments at which a run is killed")


@pytest.fixture
def times(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """How often a case is tried: a few times, or many in `make faults`."""
    return lambda few, many: many if request.config.getoption("--all-faults", default=False) else few


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """The same choices each time, others for each test."""
    return random.Random(request.node.nodeid)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an undisturbed run of the tiny config; not to be written to."""
    return tiny_run(tmp_path_factory)


@pytest.fixture
def copied(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the undisturbed run, in which the process stands."""
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder, symlinks=True)
    monkeypatch.chdir(folder)
    return folder
