"""Ending a process when the process that started it has ended."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable

from demix.files import is_alive

# The environment variable in which the workflow passes the process id of snakemake to its jobs.
VARIABLE = "DEMIX_SNAKEMAKE"

# Set in a job of snakemake.
is_job = threading.Event()
# Set when the process that waits for this one has ended first.
orphaned = threading.Event()


def end_with_snakemake() -> None:
    """In a job of snakemake, send this process SIGTERM when snakemake has ended.

    At SIGTERM a training saves its state.
    """
    # Child processes must not inherit the variable: this process ends local ranks itself, and SLURM jobs must go on.
    pid = os.environ.pop(VARIABLE, "")
    if pid.isdigit():
        is_job.set()
        when_ended(int(pid), terminate)


def terminate() -> None:
    """Send this process SIGTERM, because the process that waited for it has ended."""
    orphaned.set()
    os.kill(os.getpid(), signal.SIGTERM)


def when_ended(pid: int, act: Callable[[], None]) -> None:
    """Call `act` in a thread of its own when the process `pid` has ended. `pid` need not be a child process."""

    def watch() -> None:
        _wait(pid)
        act()

    threading.Thread(target=watch, daemon=True).start()


def _wait(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        # Only Linux has pidfd, and a container may forbid it.
        while is_alive(pid):
            time.sleep(1.0)
        return
    with open(descriptor, "rb", buffering=0):
        select.select([descriptor], [], [])
