"""Locks that end with the process that holds them, and name it to others."""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from demix.errors import DemixError

log = logging.getLogger(__name__)


@contextmanager
def exclusive(lock: Path, doing: str, patience: float = 0.0) -> Iterator[None]:
    """Hold the file `lock`, which no second process can; DemixError says who holds it after `patience` seconds.

    `doing` is what the holder does, for the message. It ends with the process, however that ends.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    give_up = time.monotonic() + patience
    with open(lock, "a+") as held:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < give_up:
                    time.sleep(0.5)
                    continue
                held.seek(0)
                cause = f"another process ({held.read().strip() or 'unknown'}) {doing}"
                raise DemixError(lock.parent, cause, "wait until it ends, or end it, then rerun") from None
            except OSError as error:
                log.warning("%s: no lock here (%s); see to it that no second process %s", lock, error, doing)
                break
        # On a full disk nobody is told who holds it, that is all.
        with suppress(OSError):
            held.truncate(0)
            os.pwrite(held.fileno(), f"{os.uname().nodename} {os.getpid()}\n".encode(), 0)
        yield


def holder(lock: Path) -> str | None:
    """Who holds the file `lock` (`exclusive`), as "node pid"; None if nobody does."""
    try:
        with open(lock) as held:
            try:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return held.read().strip() or "unknown"
    except OSError:
        pass
    return None
