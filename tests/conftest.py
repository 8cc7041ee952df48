"""Which tests `make test` runs, the order of the test files, and what holds for all tests."""

import json
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from demix.run.run import Run
from support.frozen import copied, unpack
from support.once import once

# A background job of a shell ignores Ctrl-C, and so would what its tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# For `make faults`: more made-up values wherever a test does not say how many.
settings.register_profile("many", max_examples=3000)

# Seconds of each test file, written by `pytest --save-durations`. The longest begin first, so that all processes of
# xdist end together.
DURATIONS = Path(__file__).with_name("durations.json")
# Whole workflows, real clusters, faults and browsers: in `make test-all`, but for what is marked `quick`.
FULL_FOLDERS, FULL_MARKS = {"workflow", "slurm", "faults"}, ("browser", "slurm")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped fails, but for those marked gpu")
    parser.addoption(
        "--save-durations", action="store_true", help=f"write the seconds of each file to {DURATIONS.name}"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out, before `-m` selects; sort the files by their durations, unknown ones first."""
    for item in items:
        in_folder = item.path.parent.name in FULL_FOLDERS and item.get_closest_marker("quick") is None
        if in_folder or any(item.get_closest_marker(name) for name in FULL_MARKS):
            item.add_marker("full")
    seconds = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), 1e9))


def file_of(nodeid: str) -> str:
    """The path of the file of a test, from its node id."""
    return nodeid.partition("::")[0].removeprefix("tests/")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--save-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations())


class Durations:
    """Adds up the seconds of the tests that run, by file; other files keep the seconds that they had."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        before = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
        known = {name: value for name, value in before.items() if (DURATIONS.parent / name).exists()}
        known |= {name: round(value, 1) for name, value in self.seconds.items()}
        DURATIONS.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if item.get_closest_marker("gpu") is None:
        refuse_skip(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    refuse_skip(report, collector.config)
    return report


def refuse_skip(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> None:
    """With --no-skips, make a failure of a skipped test or file; a test that is expected to fail is none."""
    if report.skipped and not hasattr(report, "wasxfail") and config.getoption("--no-skips"):
        report.outcome, (*_, why) = "failed", report.longrepr
        report.longrepr = f"--no-skips: {why}"


@pytest.fixture(scope="session")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that the workflow made (`support.frozen`); not to be written to."""
    return Run.read(once(tmp_path_factory, "frozen", unpack))


@pytest.fixture
def frozen_copy(frozen: Run, tmp_path: Path) -> Run:
    """A copy of the run that the workflow made, which a test may change."""
    return copied(frozen, tmp_path / "results" / "frozen")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs with some options, as root can."""
    place = tmp_path / "disk"

    def mount(options: str) -> Path:
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", place], check=False, capture_output=True)
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs here: {done.stderr.decode().strip()}")
        return place

    yield mount
    # What a failed command mapped may still be.
    subprocess.run(["umount", "--lazy", place], check=False)
