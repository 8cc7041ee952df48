"""What breaks is broken here on purpose. Each case notes how it ended; `make faults` prints the table of all."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.breaking import Note, run_tiny
from support.disturbed import printed
from support.once import once

PRINTED: list[dict] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults")
    group.addoption("--all-faults", action="store_true", help="every case as often as the campaign has it")
    group.addoption("--kills", type=int, default=50, help="moments at which a run is killed")
    group.addoption("--fuzz", type=int, default=10_000, help="cases of each fuzzed reader")
    group.addoption("--faults-json", type=Path, default=None, help="where the table goes as JSON")


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Iterator[Note]:
    rows: list[dict] = []
    yield Note(rows)
    # Reports of tests go to the process that prints, whichever process ran them.
    request.node.user_properties.append(("faults", rows))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        PRINTED.extend(row for name, rows in report.user_properties if name == "faults" for row in rows)


def is_whole(config: pytest.Config) -> bool:
    return bool(config.getoption("--all-faults", default=False))


@pytest.fixture
def times(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """How often a case is tried: a few times in `make test`, as often as asked for in `make faults`."""
    return lambda few, many: many if is_whole(request.config) else few


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """The same choices each time, others for each test."""
    return random.Random(request.node.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not is_whole(config) or not PRINTED:
        return
    table: dict[tuple[str, str], list[float]] = {}
    for row in PRINTED:
        table.setdefault((row["fault"], row["outcome"]), []).append(row["seconds"])
    lines = [
        {"fault": fault, "times": len(all_), "outcome": outcome, "mean_s": sum(all_) / len(all_), "most_s": max(all_)}
        for (fault, outcome), all_ in table.items()
    ]
    width = max(len(line["fault"]) for line in lines)
    terminalreporter.section("faults")
    terminalreporter.line(f"{'fault':{width}}  times  mean s  most s  outcome")
    for line in lines:
        numbers = f"{line['times']:5}  {line['mean_s']:6.2f}  {line['most_s']:6.2f}"
        terminalreporter.line(f"{line['fault']:{width}}  {numbers}  {line['outcome']}")
    if (path := config.getoption("--faults-json")) is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(lines, indent=1) + "\n")
        terminalreporter.line(f"written to {path}")


def make_finished(folder: Path) -> None:
    assert run_tiny(folder).wait() == 0, printed(folder)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an undisturbed run of the tiny config; not to be written to."""
    # One that is there already, for who works on a single case.
    if "DEMIX_FINISHED" in os.environ:
        return Path(os.environ["DEMIX_FINISHED"])
    return once(tmp_path_factory, "finished", make_finished)


@pytest.fixture
def copied(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the undisturbed run, in which the process stands."""
    folder = tmp_path / "copy"
    # Without the columns that scoring would take instead of computing them.
    shutil.copytree(finished, folder, symlinks=True, ignore=shutil.ignore_patterns(".kept"))
    monkeypatch.chdir(folder)
    return folder
