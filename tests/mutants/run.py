"""Whether tests see that code is wrong: `python tests/mutants/run.py [--jobs N] [WORD ...]`.

Each module of modules.toml gets each fault of `mutation.py`, one at a time, in a copy of the tree, and its tests run:
those that execute a line of the fault, the fastest first. A mutant is killed if one of them fails or hangs, and else it
lives. equivalent.toml lists mutants that compute the same as the code, which are neither run nor counted, and
by_hand.toml has faults of several lines. WORDs choose mutants whose name has one of them. Ends with status 1 if less
than 95% of the mutants are killed, and with status 2 if a test fails without a fault or a list names a mutant that
there is not.
"""

import argparse
import gc
import json
import math
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import hypothesis
import pytest
from mutation import Mutant, mutants

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
LEAST = 0.95
Verdicts = list[tuple[Mutant, bool]]
# What takes seconds to import is imported once; demix, which the mutants change, by each process.
FORKS = multiprocessing.get_context("forkserver")
IMPORTED = """torch torch.optim.adamw torch.distributed safetensors.torch pandas pyarrow.parquet duckdb scipy.special
scipy.optimize scipy.stats sklearn.metrics.pairwise hypothesis.strategies pytest typer.testing selenium.webdriver"""


@dataclass
class Measured:
    """What the tests of a module do without any fault.

    `lines` and `seconds` are by test; `alone` are the lines that Python runs as it imports the module. `starting` are
    the tests that start processes, whose lines nobody sees here.
    """

    lines: dict[str, list[int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    imported: list[int] = field(default_factory=list)
    starting: list[str] = field(default_factory=list)
    failed: str = ""

    def tests_of(self, mutant: Mutant) -> tuple[list[str], float]:
        """The tests that may see a mutant and their seconds: a file's together, fastest first, with processes last."""
        touched = [test for test, lines in self.lines.items() if mutant.lines & {*lines}]
        if not touched and mutant.function is None:
            touched = [test for test, lines in self.lines.items() if lines]
        files: dict[str, list[str]] = {}
        for test in sorted({*touched, *self.starting}, key=self.seconds.__getitem__):
            files.setdefault(test.partition("::")[0], []).append(test)
        found = [test for tests in files.values() for test in tests]
        return sorted(found, key=self.starting.__contains__), sum(map(self.seconds.__getitem__, found))

    def needs_import(self, mutant: Mutant) -> bool:
        """Whether a mutant shows only in a process that imports the module anew."""
        return mutant.function is None or bool(mutant.lines & {*self.imported})


class Measuring:
    """A plugin of pytest that finds out which lines of a file each test runs, its fixtures included."""

    def __init__(self, file: Path, output: Path) -> None:
        self.file, self.output, self.found = str(file), output, Measured()
        self.lines: set[int] = set()
        self.starts = False
        self.of_fixtures: dict[Any, set[int]] = {}
        start = BaseProcess.start
        BaseProcess.start = lambda process: self.started() or start(process)
        sys.addaudithook(lambda event, _: event in ("subprocess.Popen", "os.fork") and self.started())
        threading.settrace(self.trace)
        sys.settrace(self.trace)

    def trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != self.file:
            return None
        if event == "line":
            self.lines.add(frame.f_lineno)
        return self.trace

    def started(self) -> None:
        self.starts = True

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        around, self.lines = self.lines, self.of_fixtures.setdefault(fixturedef, set())
        try:
            return (yield)
        finally:
            self.lines = around

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.found.seconds[report.nodeid] = self.found.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.found.failed = report.nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.found.imported = sorted(self.lines)
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            self.lines, self.starts = set(), False
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            fixtures = item._fixtureinfo.name2fixturedefs.values()
            used = (self.of_fixtures.get(one, set()) for several in fixtures for one in several)
            self.found.lines[item.nodeid] = sorted(self.lines.union(*used))
            if self.starts:
                self.found.starting.append(item.nodeid)
        sys.settrace(None)
        self.output.write_text(json.dumps(vars(self.found)))
        return True


class Breaking:
    """A plugin of pytest that tries mutants of the file, each in a fork of the process that has collected the tests."""

    def __init__(self, file: Path, facts: Measured, chosen: Sequence[Mutant], output: Path) -> None:
        self.file, self.facts, self.chosen, self.output, self.forked = file, facts, chosen, output, False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.forked and report.failed:
            os._exit(1)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        before = self.file.read_text()
        for mutant in self.chosen:
            write(self.file, mutant.text)
            tests, seconds = self.facts.tests_of(mutant)
            pid = os.fork()
            if pid == 0:
                signal.alarm(math.ceil(8 + 6 * seconds))
                self.be_mutant(mutant, [items[test] for test in tests])
            killed = ended(pid) != 0
            write(self.file, before)
            for left in session.config._tmp_path_factory.getbasetemp().iterdir():
                shutil.rmtree(left, ignore_errors=True)
            with open(self.output, "a") as stream:
                stream.write(json.dumps([mutant.key, killed]) + "\n")
        return True

    def be_mutant(self, mutant: Mutant, items: list[pytest.Item]) -> None:
        """Run tests with a fault, and end with status 1 once one fails."""
        os.setsid()
        bound()
        self.forked = True
        status = 1
        try:
            exchange(self.file, mutant)
            for item, following in zip(items, [*items[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            status = 0
        finally:
            os._exit(status)


def bound() -> None:
    """Bound the memory of this process and the files that it writes: a loop may have lost its end."""
    resident = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (resident + (6 << 30), resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, resource.RLIM_INFINITY))


def exchange(file: Path, mutant: Mutant) -> None:
    """Give the functions of a mutant their other code."""
    codes = [compile(mutant.text, str(file), "exec")]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    (changed,) = (code for code in codes if code.co_qualname == mutant.function)
    for one in gc.get_objects():
        if isinstance(one, FunctionType) and one.__code__.co_filename == str(file):
            one.__code__ = changed if one.__code__.co_qualname == mutant.function else one.__code__


def ended(pid: int) -> int:
    """The status of a process that is the first of its group, all of which ends."""
    _, status = os.waitpid(pid, 0)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return status


def write(path: Path, text: str) -> None:
    path.write_text(text)
    # Python takes a compiled file for that of another text of the same second and length.
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


def in_process(
    tree: Path, tests: Sequence[str], plugin: Callable[[], object] | None, seconds: float
) -> tuple[int, str]:
    """The status of pytest on `tests` in `tree`, in a process of its own, and what it printed."""
    printed = tree.with_name("printed")
    process = FORKS.Process(target=be_pytest, args=(tree, [*tests], plugin, printed))
    process.start()
    process.join(seconds)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return process.exitcode, printed.read_text(errors="replace")


def be_pytest(tree: Path, tests: list[str], plugin: Callable[[], object] | None, printed: Path) -> None:
    """Be a process that runs `tests` in `tree`, whose packages come before the installed ones."""
    assert "demix" not in sys.modules, "the code of another tree is there"
    os.setsid()
    output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, str(tree))
    # The smallest example that fails is of no use here.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("mutants", phases=phases, database=None)
    hypothesis.settings.load_profile("mutants")
    options = ["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    plugins = [] if plugin is None else [plugin()]
    os._exit(pytest.main([*options, "--basetemp", str(tree.with_name("pytest")), *tests], plugins))


def in_trees(jobs: int, tasks: Sequence[Callable[[Path], Verdicts]]) -> Verdicts:
    """What each task finds, `jobs` at a time, each in a copy of the repository of its own."""
    listed = ["git", "-C", str(REPOSITORY), "ls-files", "-co", "--exclude-standard", "-z"]
    names = [name for name in subprocess.check_output(listed, text=True).split("\0") if name]

    def one(task: Callable[[Path], Verdicts]) -> Verdicts:
        with tempfile.TemporaryDirectory(prefix="demix-mutants-") as folder:
            tree = Path(folder).resolve() / "tree"
            for name in filter(lambda name: (REPOSITORY / name).is_file(), names):
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPOSITORY / name, tree / name)
            found = task(tree)
        for mutant in (mutant for mutant, killed in found if not killed):
            print(f"lived: {mutant}", flush=True)
        return found

    with ThreadPoolExecutor(jobs) as pool:
        return [verdict for found in pool.map(one, tasks) for verdict in found]


def of_module(path: str, tests: list[str], some: list[Mutant], tree: Path) -> Verdicts:
    """Whether the tests kill each mutant of a module. Raises ValueError where a test fails without any."""
    file, output = tree / path, tree.with_name("found.json")
    status, printed = in_process(tree, tests, partial(Measuring, file, output), 1200)
    if not output.exists() or (facts := Measured(**json.loads(output.read_text()))).failed:
        raise ValueError(f"{path}: {' '.join(tests)} fail without any fault ({status}):\n{printed}")
    timed = {one: facts.tests_of(one) for one in some}
    forked = [one for one, (found, _) in timed.items() if found and not facts.needs_import(one)]
    output.write_text("")
    limit = sum(40 + 6 * timed[one][1] for one in forked)
    status, printed = in_process(tree, tests, partial(Breaking, file, facts, forked, output), limit)
    verdicts = dict(map(json.loads, output.read_text().splitlines()))
    if missing := [one for one in forked if one.key not in verdicts]:
        raise ValueError(f"{missing[0]} was not tried ({status}):\n{printed}")
    for mutant, (found, seconds) in timed.items():
        if mutant not in forked:
            verdicts[mutant.key] = bool(found) and kills(found, mutant, 6 * seconds, tree)
    return [(one, verdicts[one.key]) for one in some]


def kills(tests: list[str], mutant: Mutant, seconds: float, tree: Path) -> bool:
    """Whether the tests see a mutant in a process that imports the module."""
    before = (tree / mutant.path).read_text()
    write(tree / mutant.path, mutant.text)
    status, _ = in_process(tree, tests, None, 40 + seconds)
    write(tree / mutant.path, before)
    return status != 0


def tests_named(words: str) -> list[str]:
    """The paths of files of tests/unit. Raises ValueError if there is no such file."""
    paths = [f"tests/unit/{word}.py" for word in words.split()]
    if missing := [path for path in paths if not (REPOSITORY / path).exists()]:
        raise ValueError(f"modules.toml or by_hand.toml: there is no {missing[0]}")
    return paths


def by_hand(path: str, old: str, new: str, tests: str) -> tuple[Mutant, list[str]]:
    """A fault that by_hand.toml describes. Raises ValueError if its old text does not stand once in its file."""
    text = (REPOSITORY / path).read_text()
    if text.count(old) != 1:
        raise ValueError(f"by_hand.toml: {path}: this text stands {text.count(old)} times in the file: {old}")
    change = f"{' '.join(old.split())} -> {' '.join(new.split()) or 'nothing'}"
    return Mutant(path, "", "by hand", change, text.replace(old, new), frozenset(), None), tests_named(tests)


def equivalent() -> dict[str, set[str]]:
    """The keys of the mutants of each file that are like the code."""
    found: dict[str, set[str]] = {}
    for group in tomllib.loads((HERE / "equivalent.toml").read_text()).get("group", []):
        if not group["why"]:
            raise ValueError(f"equivalent.toml: {group['path']}: a group without a reason")
        found.setdefault(group["path"], set()).update(group["mutants"])
    return found


def table(verdicts: list[tuple[Mutant, bool]], alike: Counter[str]) -> str:
    """Numbers of mutants by module, as Markdown."""
    lines = ["| module | mutants | killed | equivalent | share |", "|---|---|---|---|---|"]
    rows: dict[str, list[bool]] = {}
    for mutant, killed in verdicts:
        rows.setdefault("by hand" if mutant.operator == "by hand" else mutant.path, []).append(killed)
    rows = dict(sorted(rows.items(), key=lambda row: (row[0] == "by hand", row[0]))) | {"all": [k for _, k in verdicts]}
    for name, killed in rows.items():
        same = alike.total() if name == "all" else alike[name]
        shown = name if name in ("all", "by hand") else f"`{name}`"
        share = sum(killed) / max(1, len(killed))
        lines.append(f"| {shown} | {len(killed) + same} | {sum(killed)} | {same} | {100 * share:.1f}% |")
    return "\n".join(lines)


def chosen(words: Sequence[str], every: Iterable[Mutant]) -> list[Mutant]:
    """The mutants whose names have one of the words, all without words."""
    return [one for one in every if not words or any(word in str(one) for word in words)]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    FORKS.set_forkserver_preload(IMPORTED.split())
    begun, alike, killed = time.monotonic(), Counter[str](), equivalent()
    modules = tomllib.loads((HERE / "modules.toml").read_text())
    tasks: list[Callable[[Path], Verdicts]] = []
    try:
        if stray := killed.keys() - modules.keys():
            raise ValueError(f"equivalent.toml: modules.toml has no {', '.join(sorted(stray))}")
        for path, tests in modules.items():
            every, same = mutants(path, (REPOSITORY / path).read_text()), killed.get(path, set())
            if stale := same - {one.key for one in every}:
                raise ValueError(f"equivalent.toml: {path}: there is no mutant {min(stale)}")
            if found := chosen(asked.words, (one for one in every if one.key not in same)):
                tasks.append(partial(of_module, path, tests_named(tests), found))
                alike[path] = len(same)
        listed = tomllib.loads((HERE / "by_hand.toml").read_text())
        hand = dict(by_hand(path, *fault) for path, faults in listed.items() for fault in faults)
        for mutant in chosen(asked.words, hand):
            tasks.append(lambda tree, one=mutant: [(one, kills(hand[one], one, 360, tree))])
        verdicts = in_trees(asked.jobs, tasks)
    except ValueError as error:
        print(error)
        return 2
    print(f"\n{table(verdicts, alike)}\n\n{(time.monotonic() - begun) / 60:.0f} minutes")
    share = sum(killed for _, killed in verdicts) / max(1, len(verdicts))
    # Words that no mutant has ask only whether by_hand.toml quotes what there is.
    return int(bool(verdicts) and share < LEAST)


if __name__ == "__main__":
    sys.exit(main())
