"""The playground and `make ui` listen on this machine's loopback alone.

What they refuse of requests is in tests/unit/test_playground.py and test_ui.py.
"""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import urllib3

from demix.run.run import Run
from support.breaking import Note
from support.mlflow_ui import Served as ServedUi
from support.mlflow_ui import serving, status

# As a stage that has a model makes it.
Served = tuple[subprocess.Popen, int]


@pytest.fixture(scope="module")
def ui(frozen: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedUi]:
    with serving(tmp_path_factory.mktemp("ui"), frozen) as one:
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
    assert urllib3.request("GET", f"http://127.0.0.1:{port}/model").status == 200


@pytest.mark.faults
def test_the_pages_of_mlflow(ui: ServedUi, note: Note) -> None:
    own = ui.address.removeprefix("http://")
    with note.timed("make ui: where it listens", "127.0.0.1 alone"):
        assert_loopback_alone(int(own.partition(":")[2]))
    assert status(ui, "GET", "/", Host=own) == 200
