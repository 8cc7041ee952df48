"""Whether tests see that code is wrong: one edit of edits.toml at a time, in a copy of the tree, and the tests named.

    python tests/mutants/run.py [--jobs N] [--unchecked] [WORD ...]

An edit is killed if a test of those named with it fails or hangs, and else it lives. WORDs choose edits whose file or
text holds one of them. Ends with status 1 if less than 95% are killed. An edit whose old text does not stand exactly
once in its file is an error, and so is a test that fails without any edit: the list has to be true.
"""

import argparse
import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import hypothesis
import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
LEAST = 0.95
# The slowest tests named take two minutes of one busy core.
SECONDS = 600.0
T = TypeVar("T")
# What takes seconds to import is imported once; demix, which the edits change, by each process.
FORKS = multiprocessing.get_context("forkserver")
IMPORTED = [
    "torch", "torch.optim.adamw", "torch.distributed", "safetensors.torch", "pandas", "pyarrow.parquet", "duckdb",
    "scipy.special", "scipy.optimize", "hypothesis.strategies", "pytest", "typer.testing", "mlflow.tracking",
]  # fmt: skip


@dataclass(frozen=True)
class Edit:
    """`old` becomes `new` in the file `path` of the repository, which one of `tests` should see."""

    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self) -> str:
        """The text of the file with the edit."""
        return (REPOSITORY / self.path).read_text().replace(self.old, self.new)

    def fault(self) -> str:
        """Why the edit cannot be; empty if it can."""
        if (count := (REPOSITORY / self.path).read_text().count(self.old)) != 1:
            return f"{self}: the old text stands {count} times in the file"
        try:
            if self.path.endswith(".py"):
                compile(self.applied(), self.path, "exec")
        except SyntaxError as error:
            return f"{self}: {error}"
        return ""

    def __str__(self) -> str:
        return f"{self.path}: {' '.join(self.old.split())} -> {' '.join(self.new.split()) or 'nothing'}"


def edits() -> list[Edit]:
    """The edits of edits.toml.

    A test is a file of tests/unit (or `<folder>/<file>` of tests) without its suffix, and may have `::name` behind it.
    """
    found = []
    for file in tomllib.loads((HERE / "edits.toml").read_text())["file"]:
        for old, new, *tests in file["edits"]:
            named = (tests[0] if tests else file["tests"]).split()
            words = (word if "/" in word else f"unit/{word}" for word in named)
            places = (word.partition("::") for word in words)
            found.append(Edit(file["path"], old, new, tuple(f"tests/{a}.py{b}{c}" for a, b, c in places)))
    return found


def passed(tree: Path, tests: Iterable[str]) -> tuple[bool, str]:
    """Whether `tests` pass in `tree`, and what pytest printed. Raises ValueError where there is no such test."""
    printed = tree.with_name("printed")
    process = FORKS.Process(target=run_tests, args=(tree, [*tests], printed))
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    if process.exitcode in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise ValueError(printed.read_text(errors="replace"))
    return process.exitcode == 0, printed.read_text(errors="replace")


def run_tests(tree: Path, tests: list[str], printed: Path) -> None:
    """Be a process that runs `tests` in `tree`, whose packages come before the installed ones."""
    os.setsid()
    output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, str(tree))
    # The smallest example that fails is of no use here.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("mutants", phases=phases)
    hypothesis.settings.load_profile("mutants")
    options = ["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    sys.exit(pytest.main([*options, "--basetemp", str(tree.with_name("pytest")), *tests]))


def lives(tree: Path, edit: Edit) -> bool:
    """Whether the tests of `edit` pass in `tree` with it. The tree is as before afterwards."""
    path = tree / edit.path
    before = path.read_text()
    try:
        _write(path, edit.applied())
        return passed(tree, edit.tests)[0]
    finally:
        _write(path, before)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    # Python takes a compiled file for that of another text of the same second and length.
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


def in_trees(jobs: int, work: Callable[[Path, T], str], things: list[T]) -> list[str]:
    """What `work` says of each of `things`, `jobs` at a time, each in a copy of the repository of its own."""
    listed = ["git", "-C", str(REPOSITORY), "ls-files", "-co", "--exclude-standard", "-z"]
    names = [name for name in subprocess.check_output(listed, text=True).split("\0") if name]
    with tempfile.TemporaryDirectory(prefix="demix-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            tree = Path(folder) / str(number) / "tree"
            for name in filter(lambda name: (REPOSITORY / name).is_file(), names):
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPOSITORY / name, tree / name)
            trees.put(tree)

        def one(thing: T) -> str:
            tree = trees.get()
            try:
                return work(tree, thing)
            finally:
                trees.put(tree)

        return list(pool.map(one, things))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--unchecked", action="store_true", help="take for granted that the tests pass without edits")
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    FORKS.set_forkserver_preload(IMPORTED)
    chosen = [edit for edit in edits() if not asked.words or any(word in str(edit) for word in asked.words)]
    if wrong := [*filter(None, (edit.fault() for edit in chosen))]:
        print("\n".join(wrong))
        return 2

    def fails(tree: Path, tests: list[str]) -> str:
        done, printed = passed(tree, tests)
        return "" if done else f"{' '.join(tests)} fail without any edit:\n{printed}"

    def verdict(tree: Path, edit: Edit) -> str:
        begun = time.monotonic()
        found = "lived" if lives(tree, edit) else "killed"
        print(f"{found} {edit} ({time.monotonic() - begun:.0f} s)", flush=True)
        return found

    by_file: dict[str, set[str]] = {}
    for test in (test for edit in chosen for test in edit.tests):
        by_file.setdefault(test.partition("::")[0], set()).add(test)
    together = [] if asked.unchecked else [sorted(tests) for tests in by_file.values()]
    if wrong := [*filter(None, in_trees(asked.jobs, fails, together))]:
        print("\n".join(wrong))
        return 2
    found = in_trees(asked.jobs, verdict, chosen)
    for edit in (edit for edit, said in zip(chosen, found, strict=True) if said == "lived"):
        print(f"lived: {edit}")
    killed, number = found.count("killed"), len(found)
    share = killed / max(1, number)
    print(f"mutants: {killed} killed, {number - killed} lived of {number} ({100 * share:.1f}%)")
    return int(share < LEAST)


if __name__ == "__main__":
    sys.exit(main())
