"""Folders that take long to make, made once for all the processes of a session of tests."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from support.disturbed import ENVIRONMENT, REPOSITORY, TINY, printed, snakemake
from support.warm import warm


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name`, filled by `make` in the process that asks first; the others wait. Not to be written to."""
    base = factory.getbasetemp()
    # The processes of xdist have a folder each below the session's.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = shared / name, shared / f"{name}.done"
    with FileLock(shared / f"{name}.lock"):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def run_with_progress(folder: Path) -> None:
    """Run the whole workflow on the tiny config in `folder`, its progress shown."""
    (folder / "resources").symlink_to(REPOSITORY / "resources")
    process = snakemake(folder, TINY, "--logger", "demix", profile="default", environment=warm(ENVIRONMENT))
    assert process.wait() == 0, printed(folder)
    shown = printed(folder)
    assert re.search(r"\[ *\d+% done, \d+ of \d+ jobs, \d+:\d\d so far, .* left\] \w+", shown), shown
    assert re.search(r"^\[100% done, (\d+) of \1 jobs, \d+:\d\d\]$", shown, re.MULTILINE), shown
    assert shown.count("Tables, figures, claims: results/tiny/report") == 1, shown
