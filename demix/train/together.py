"""Ending all ranks of a training after an error of one rank."""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist

from demix.errors import DemixError
from demix.launch.progress import Failure, key_of_failure

FOR_EVER = timedelta(days=3650)
# Seconds that a failed rank has to report its error before the others end.
LAST_WORDS = 5.0


@contextmanager
def ending_together(rank: int, size: int) -> Iterator[None]:
    """Report an error of this rank to the others, and end this process if another rank reports an error first.

    This is needed because with NCCL a rank waits as long for a rank that has ended as for a slow one. The first error
    is in the store at which the ranks met.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # A connection that waits cannot be used for anything else.
    store, waiting = (
        dist.TCPStore(host, port, wait_for_workers=False, timeout=FOR_EVER)  # type: ignore[attr-defined]
        for _ in range(2)
    )
    key, done = key_of_failure(), threading.Event()

    def end(text: bytes) -> None:
        failure = Failure(**json.loads(text))
        # The launcher prints the error.
        if "DEMIX_LAUNCHER" not in os.environ:
            print(f"demix: error: rank {failure.rank} of {size}: {failure.message}", file=sys.stderr, flush=True)
        os._exit(1)

    def watch() -> None:
        # If the process of the first rank has the store, the store ends with it.
        with suppress(dist.DistError):
            text = waiting.get(key)
            if not done.wait(LAST_WORDS):
                end(text)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except BaseException as error:
        own = json.dumps(asdict(Failure.of(rank, error))).encode()
        with suppress(dist.DistError):
            first = store.compare_set(key, "", own.decode())
            # A lost connection is not the cause of an error.
            if first != own and not isinstance(error, DemixError):
                end(first)
        raise
    finally:
        done.set()
