"""MLflow as `make ui` serves it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import urllib3

from demix.run.run import Run
from demix.track.store import track
from support.frozen import with_models

ROOT = Path(__file__).parents[2]
EXPERIMENT = "demix-frozen"


@dataclass(frozen=True)
class Served:
    """MLflow as `make ui` serves it, its group of processes, what they print, and the run that it holds."""

    address: str
    run: Run
    group: int
    log: Path


@contextmanager
def serving(folder: Path, run: Run) -> Iterator[Served]:
    """`make ui` while the block runs, with a copy in `folder` of two models of `run`."""
    made, uri, said = (
        with_models(run, folder / "results", "demix", "dense"),
        f"sqlite:///{folder}/mlflow.db",
        folder / "log",
    )
    track(made, uri, EXPERIMENT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # All is installed, or this test would not run.
    command = ("make", "-o", ".venv/installed", "ui", f"URI={uri}", f"PORT={port}", f"ARTIFACTS={folder}/sent")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with said.open("w") as log:
        server = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PATH": path}, stdout=log, stderr=log, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        until_up = urllib3.Retry(total=150, backoff_factor=0.5, backoff_max=2)
        try:
            urllib3.request("GET", f"{address}/health", retries=until_up)
        except urllib3.exceptions.MaxRetryError:
            pytest.fail(said.read_text())
        yield Served(address, made, server.pid, said)
    finally:
        before = said.stat().st_size
        os.killpg(server.pid, signal.SIGINT)
        server.wait()
    assert "Traceback" not in said.read_bytes()[before:].decode()


def status(served: Served, method: str, path: str, **headers: str) -> int:
    """The status of the answer to a request with these headers, whose names have _ for -."""
    # A kept connection may be closed by the other side just as a POST, which is not tried again, goes out.
    sent = {"Connection": "close"} | {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"body": b'{"max_results": 1}'} if method == "POST" else {}
    return urllib3.request(method, served.address + path, headers=sent, **body).status
