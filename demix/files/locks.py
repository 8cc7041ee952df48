"""Locks that name their holder and end with the process that holds them."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from demix.errors import DemixError

log = logging.getLogger(__name__)


@contextmanager
def exclusive(lock: Path, doing: str, patience: float = 0.0) -> Iterator[None]:
    """Hold the file `lock`, which no second process can; DemixError says who holds it after `patience` seconds.

    `doing` is what the holder does, for the message. The lock ends with the process, however that ends. While it is
    held, the file names the node and the process.
    """
    # Importing it takes 0.1 s, and few commands hold a lock.
    from filelock import FileLock, Timeout

    file_lock = FileLock(lock, timeout=patience, poll_interval=0.5, fallback_to_soft=False)
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file_lock.acquire()
    except Timeout:
        cause = f"another process ({lock.read_text().strip() or 'unknown'}) {doing}"
        raise DemixError(lock.parent, cause, "wait until it ends, or end it, then rerun") from None
    except (OSError, NotImplementedError) as error:
        log.warning("%s: no lock here (%s); see to it that no second process %s", lock, error, doing)
    try:
        # On a full disk the lock still works; it only lacks the name of its holder.
        with suppress(OSError):
            lock.write_text(f"{os.uname().nodename} {os.getpid()}\n")
        yield
    finally:
        file_lock.release()
