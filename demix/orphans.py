"""What becomes of a job whose snakemake is killed: it ends too, rather than run on unseen and hold a lock."""

import os
import select
import signal
import threading
import time

# Names the snakemake that a command is a job of; the workflow sets it.
VARIABLE = "DEMIX_SNAKEMAKE"

# Set in the jobs of a snakemake.
is_job = threading.Event()
# Set when their snakemake has ended before them.
orphaned = threading.Event()


def end_with_snakemake() -> None:
    """In a job of snakemake: send this process SIGTERM, at which training saves its state, when snakemake is gone."""
    # For this process alone: what it starts it ends itself, and a SLURM job is to outlive it.
    pid = os.environ.pop(VARIABLE, "")
    if not pid.isdigit():
        return
    is_job.set()

    def watch() -> None:
        _wait(int(pid))
        orphaned.set()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _wait(pid: int) -> None:
    """Return when the process `pid`, which need not be a child, has ended."""
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


def is_alive(pid: int) -> bool:
    """Whether there is a process of this number on this node."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
