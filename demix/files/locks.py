"""Locks that name the process that holds them and end with it."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from demix.errors import DemixError

log = logging.getLogger(__name__)


@contextmanager
def exclusive(lock: Path, doing: str, patience: float = 0.0) -> Iterator[None]:
    """Hold the file `lock`, which only one process at a time can hold.

    If another process still holds the lock after `patience` seconds, a DemixError names that process; `doing` is the
    part of the message that says what the holder does. While the lock is held, its file contains the node and the
    process id of the holder. The operating system releases the lock when the process ends in any way.
    """
    # Importing filelock needs 0.1 s, and few commands hold a lock.
    from filelock import FileLock, Timeout

    file_lock = FileLock(lock, timeout=patience, poll_interval=0.5, fallback_to_soft=False)
    lock.parent.mkdir(parents=True, exist_ok=True)
    # A file that cannot be opened is an error. A file system without locks is only a warning, below.
    with open(lock, "a"):
        pass
    try:
        file_lock.acquire()
    except Timeout:
        cause = f"another process ({lock.read_text().strip() or 'unknown'}) {doing}"
        raise DemixError(lock.parent, cause, "wait until it ends, or end it, then rerun") from None
    except (OSError, NotImplementedError) as error:
        log.warning("%s: cannot be locked (%s); make sure that no second process %s", lock, error, doing)
    try:
        # On a full disk the lock still works, but does not name its holder.
        with suppress(OSError):
            lock.write_text(f"{os.uname().nodename} {os.getpid()}\n")
        yield
    finally:
        file_lock.release()
