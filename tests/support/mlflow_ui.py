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

from demix.track.store import track
from demix.track.ui import MOST_BYTES
from support.synthetic_run import MadeUp, build_run

ROOT = Path(__file__).parents[2]
# Until a page has loaded on a busy machine.
PATIENCE = 180


@dataclass(frozen=True)
class Served:
    """MLflow as `make ui` serves it, its group of processes, and the run that it holds as experiment demix-made-up."""

    address: str
    run: MadeUp
    group: int


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """`make ui` while the block runs, with a made-up run in `folder`."""
    run, uri = build_run(folder / "results" / "made-up"), f"sqlite:///{folder}/mlflow.db"
    track(run.run, uri, "demix-made-up")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # All is installed, or this test would not run.
    command = ("make", "-o", ".venv/installed", "ui", f"URI={uri}", f"PORT={port}", f"ARTIFACTS={folder}/sent")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PATH": path}, stdout=log, stderr=log, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        until_up = urllib3.Retry(total=150, backoff_factor=0.5, backoff_max=2)
        try:
            urllib3.request("GET", f"{address}/health", retries=until_up)
        except urllib3.exceptions.MaxRetryError:
            pytest.fail((folder / "log").read_text())
        yield Served(address, run, server.pid)
    finally:
        before = (folder / "log").stat().st_size
        os.killpg(server.pid, signal.SIGINT)
        server.wait()
    said = (folder / "log").read_bytes()[before:].decode()
    assert said.endswith("MLflow has ended\n"), said
    assert "Traceback" not in said, said


def status(served: Served, method: str, path: str, **headers: str) -> int:
    # A kept connection may be closed by the other side just as a POST, which is not tried again, goes out.
    sent = {"Connection": "close"} | {name.replace("_", "-"): value for name, value in headers.items()}
    body = {"body": b'{"max_results": 1}'} if method == "POST" else {}
    return urllib3.request(method, served.address + path, headers=sent, **body).status


def first_line(served: Served, header: str, chunk: bytes) -> bytes:
    """What is answered to a request that goes on with `chunk` after its header until it is answered."""
    place, path = served.address.removeprefix("http://"), "/ajax-api/2.0/mlflow/experiments/search"
    name, port = place.split(":")
    with socket.create_connection((name, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: {place}\r\nContent-Type: application/json\r\n{header}\r\n\r\n".encode()
        )
        try:
            for _ in range(MOST_BYTES // len(chunk) + 2 if chunk else 0):
                connection.sendall(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
        except OSError:
            # It is answered and closed while more is sent.
            pass
        return connection.recv(12)
