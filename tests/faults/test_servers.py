"""The playground and `make ui`: this machine's loopback alone, a bounded number of questions of bounded size.

What else they refuse of requests (foreign origins, forms, chunks) is in tests/unit/test_playground.py and test_ui.py.
"""

import http.client
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from demix.generate.playground.server import CONNECTIONS, SECONDS
from demix.track.ui import MOST_BYTES
from support.breaking import Note
from support.disturbed import until
from support.mlflow_ui import Served as ServedUi
from support.mlflow_ui import first_line, serving
from support.mlflow_ui import status as ui_status

# As a stage that has a model makes it.
Served = tuple[subprocess.Popen, int]


@pytest.fixture(scope="module")
def ui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedUi]:
    with serving(tmp_path_factory.mktemp("ui")) as one:
        yield one


@pytest.fixture
def served(finished: Path) -> Iterator[Served]:
    model = finished / "results/tiny/models/demix"
    command = [sys.executable, "-m", "demix", "playground", str(model), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    shown = process.stdout.readline()
    yield process, int(shown.rpartition("127.0.0.1:")[2].partition("/")[0])
    process.terminate()
    process.wait()


def status(port: int, host: str | None = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS + 20)
    connection.putrequest("GET", "/model", skip_host=host is not None)
    if host is not None:
        connection.putheader("Host", host)
    connection.endheaders()
    return connection.getresponse().status


def assert_loopback_alone(port: int, pid: int | None = None) -> None:
    """Whatever listens on a port, that of the process `pid` where it is given, does so on 127.0.0.1."""
    connections = psutil.Process(pid).net_connections() if pid else psutil.net_connections()
    listening = {one.laddr for one in connections if one.status == "LISTEN" and (pid or one.laddr.port == port)}
    assert {(place.ip, place.port) for place in listening} == {("127.0.0.1", port)}
    others = {
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    }
    for address in others:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((address, port), timeout=5)


@pytest.mark.faults
def test_it_listens_on_loopback_alone(served: Served, note: Note) -> None:
    process, port = served
    with note.timed("playground: where it listens", "127.0.0.1 alone"):
        assert_loopback_alone(port, process.pid)
    with note.timed("playground: a foreign host", "refused"):
        assert status(port, "evil.example") == 403
    assert status(port) == 200


@pytest.mark.faults
def test_who_says_nothing_is_hung_up_on(served: Served, note: Note) -> None:
    """More connections than are served, all silent: the server is back when their time is over."""
    _, port = served
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS + 8)]
    for each in silent:
        each.sendall(b"POST /analyse HTTP/1.1\r\nContent-Le")
    with note.timed("playground: silent connections", f"served again after their {SECONDS} s"):

        def answers() -> bool:
            try:
                return status(port) == 200
            except OSError:
                return False
            except http.client.HTTPException:
                return False

        until(answers, 3 * SECONDS)
    for each in silent:
        each.close()


@pytest.mark.faults
def test_the_pages_of_mlflow(ui: ServedUi, note: Note) -> None:
    own = ui.address.removeprefix("http://")
    with note.timed("make ui: where it listens", "127.0.0.1 alone"):
        assert_loopback_alone(int(own.partition(":")[2]))
    with note.timed("make ui: a foreign host", "refused"):
        assert ui_status(ui, "GET", "/", Host="evil.example") == 403
    with note.timed("make ui: a request of too many bytes", "refused"):
        assert first_line(ui, f"Content-Length: {MOST_BYTES + 1}", b"") == b"HTTP/1.1 413"
        assert first_line(ui, "Transfer-Encoding: chunked", b" " * (1 << 20)) == b"HTTP/1.1 413"
    assert ui_status(ui, "GET", "/", Host=own) == 200
