"""Which rank of a training failed first, and why: ranks note their errors, and launchers see signals."""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from demix.errors import DemixError
from demix.files import read_json, write_json


@dataclass(frozen=True)
class Failure:
    """The end of one rank.

    `expected` marks an error of demix's own, which the same command would raise again. `time` is in seconds since 1970,
    by the clock of the rank's node. With `killed` a signal ended the rank, and `message` names the signal.
    """

    rank: int
    node: str
    message: str
    expected: bool = False
    time: float = 0.0
    killed: bool = False

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Self:
        """The end of this process, which is that `rank`, by an error."""
        message = str(error).splitlines()[0] if str(error) else repr(error)
        return cls(rank, socket.gethostname(), message, isinstance(error, DemixError), time.time())


def key_of_failure() -> str:
    """The key of the ranks' store that holds the first error of one of them, as JSON."""
    # torchrun's store outlives its ranks, which it starts again.
    return f"demix/failure/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


@contextmanager
def noting(folder: Path, rank: int) -> Iterator[None]:
    """Note in `folder` the error that ends a rank, so that the rank which failed first can be named."""
    try:
        yield
    except BaseException as error:
        # On a full disk the note is lost, but the error itself must still be raised.
        with suppress(DemixError):
            write_json(folder / f"rank-{rank}.json", asdict(Failure.of(rank, error)))
        raise


def noted_in(folder: Path) -> list[Failure]:
    """The errors that ranks noted in `folder`."""
    noted = list[Failure]()
    for path in folder.glob("rank-*.json"):
        # An unreadable note must not hide the other notes.
        with suppress(DemixError, TypeError):
            noted.append(Failure(**read_json(path)))
    return noted


def first_failure(noted: Sequence[Failure], killed: Sequence[Failure]) -> Failure | None:
    """The first failure: that of a rank which a signal ended, else the earliest error that a rank noted.

    `killed` are the ranks that a signal ended, in the order in which their ends were seen. Returns None if nothing is
    known.
    """
    for failure in killed:
        # NCCL's watchdog aborts every rank that waits for a failed rank.
        aborted = failure.message.startswith(("Abort", "SIGABRT"))
        if failure.rank not in [note.rank for note in noted] and not (noted and aborted):
            return failure
    return min(noted, key=lambda note: note.time, default=None)
