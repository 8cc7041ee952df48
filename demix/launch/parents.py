"""Ending a process when the process that started it has been killed."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable

from demix.files import is_alive

# The variable in which the workflow names the snakemake that a command is a job of.
VARIABLE = "DEMIX_SNAKEMAKE"

# Set in the jobs of a snakemake.
is_job = threading.Event()
# Set when the process that this one works for has ended before it.
orphaned = threading.Event()


def end_with_snakemake() -> None:
    """In a job of snakemake: send this process SIGTERM, at which training saves its state, when snakemake is gone."""
    # Child processes must not inherit the variable: this process ends its own children, and a SLURM job outlives it.
    pid = os.environ.pop(VARIABLE, "")
    if pid.isdigit():
        is_job.set()
        when_ended(int(pid), terminate)


def terminate() -> None:
    """Send this process SIGTERM, because the process that waited for it has ended."""
    orphaned.set()
    os.kill(os.getpid(), signal.SIGTERM)


def when_ended(pid: int, act: Callable[[], None]) -> None:
    """Call `act`, in a thread of its own, once the process `pid` has ended; `pid` need not be a child."""

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
        # Not on Linux, or not allowed there.
        while is_alive(pid):
            time.sleep(1.0)
        return
    with open(descriptor, "rb", buffering=0):
        select.select([descriptor], [], [])
