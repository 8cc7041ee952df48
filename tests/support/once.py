"""Folders that take long to make, made once for all the processes of a session of tests."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from support.disturbed import printed, snakemake
from support.dry_run import ENVIRONMENT, TINY
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


def tiny_run(factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of the tiny config, whose commands are in printed.log. Not to be written to."""
    # One that is there already, for who works on a single test.
    if "DEMIX_FINISHED" in os.environ:
        return Path(os.environ["DEMIX_FINISHED"])
    return once(factory, "tiny", run_tiny_config)


def run_tiny_config(folder: Path) -> None:
    assert snakemake(folder, TINY, profile="default", environment=warm(ENVIRONMENT)).wait() == 0, printed(folder)
