"""What `make ui` starts: what guards MLflow's server, and a real server."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import urllib3
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from demix.launch.guarded import Guarded
from demix.run.run import Run
from demix.track.store import track
from support.frozen import with_models

ROOT = Path(__file__).parents[2]
PORT = 5000


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse(await Request(scope, receive).body())(scope, receive, send)


def answered(guarded: Guarded, *parts: bytes, method: str = "GET", path: str = "/", **headers: str) -> int:
    """The status of the answer to a request whose body comes in `parts`."""
    sent, left = [], [{"type": "http.request", "body": part, "more_body": True} for part in parts]

    async def receive() -> Message:
        return left.pop(0) if left else {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        sent.extend([message["status"]] if "status" in message else [])

    named = {"host": f"127.0.0.1:{PORT}"} | {name.replace("_", "-"): value for name, value in headers.items()}
    scope = {"type": "http", "method": method, "path": path, "server": ("127.0.0.1", PORT)}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in named.items()]
    asyncio.run(guarded(scope, receive, send))
    (found,) = sent
    return found


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 200),
        ({"host": f"localhost:{PORT}"}, 200),
        ({"origin": f"http://localhost:{PORT}"}, 200),
        # MLflow's own default takes this for an address of the private network 10.*.
        ({"host": "10.evil.example"}, 403),
        ({"host": "192.168.1.2"}, 403),
        ({"origin": "null"}, 403),
        # Another port of this machine is another origin.
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"origin": "http://localhost"}, 403),
        ({"origin": f"https://127.0.0.1:{PORT}"}, 403),
    ],
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/api/search"), ("GET", "/health"), ("OPTIONS", "/")])
def test_other_hosts_and_origins_are_refused(headers: dict[str, str], expected: int, method: str, path: str) -> None:
    assert answered(Guarded(echo, 10), method=method, path=path, **headers) == expected


def test_requests_are_of_bounded_size() -> None:
    guarded = Guarded(echo, 10)
    assert answered(guarded, content_length="11") == 413
    assert answered(guarded, b"a" * 10, transfer_encoding="chunked") == 200
    assert answered(guarded, b"a" * 6, b"b" * 5, transfer_encoding="chunked") == 413


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of MLflow as `make ui` serves it."""
    if not shutil.which("make"):
        pytest.skip("needs make")
    folder = tmp_path_factory.mktemp("ui")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # All is installed, or this test would not run.
    variables = (f"URI=sqlite:///{folder}/mlflow.db", f"PORT={port}", f"ARTIFACTS={folder}/sent")
    command = ["make", "-o", ".venv/installed", "ui", *variables]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with (folder / "log").open("w") as log:
        how = {"stdout": log, "stderr": log, "start_new_session": True}
        server = subprocess.Popen(command, cwd=ROOT, env=environment, **how)
    address = f"http://127.0.0.1:{port}"
    try:
        urllib3.request("GET", f"{address}/health", retries=urllib3.Retry(150, backoff_factor=0.5, backoff_max=2))
        yield address
    finally:
        before = (folder / "log").stat().st_size
        os.killpg(server.pid, signal.SIGINT)
        server.wait()
    assert "Traceback" not in (folder / "log").read_bytes()[before:].decode()


def status(method: str, address: str, **headers: str) -> int:
    """The status of the answer to a request with these headers."""
    # A kept connection may be closed by the other side just as a POST, which is not tried again, goes out.
    body = {"body": b'{"max_results": 1}'} if method == "POST" else {}
    return urllib3.request(method, address, headers={"Connection": "close"} | headers, **body).status


@pytest.mark.full
def test_mlflow_is_guarded_and_its_telemetry_is_off(served: str) -> None:
    own = served.removeprefix("http://")
    listening = (one.laddr for one in psutil.net_connections() if one.status == "LISTEN")
    assert {place.ip for place in listening if place.port == int(own.partition(":")[2])} == {"127.0.0.1"}
    assert [status("GET", f"{served}/", Host=host) for host in (own, "evil.example")] == [200, 403]
    assert status("POST", f"{served}/api/2.0/mlflow/experiments/search", Origin="http://localhost:1") == 403
    answer = urllib3.request("GET", f"{served}/ajax-api/3.0/mlflow/ui-telemetry").json()
    assert answer["disable_ui_telemetry"] is True


@pytest.mark.full
def test_a_server_takes_runs_too(served: str, frozen: Run, tmp_path: Path) -> None:
    run = with_models(frozen, tmp_path / "run", "demix", "dense", seeds=[])
    first, second = (track(run, served, "by-server") for _ in range(2))
    assert ", 0 replaced, 0 unchanged, 0 deleted" in first
    assert "0 new, 0 replaced" in second
