"""The playground and `make ui` listen on this machine's loopback alone.

What they refuse of requests is in tests/unit/test_playground.py and test_ui.py.
"""

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import urllib3

from demix.run.run import Run
from support.mlflow_ui import serving, status


def assert_loopback_alone(port: int, pid: int | None = None) -> None:
    """Whatever listens on a port, that of the process `pid` where it is given, does so on 127.0.0.1."""
    connections = psutil.Process(pid).net_connections() if pid else psutil.net_connections()
    listening = {one.laddr for one in connections if one.status == "LISTEN" and (pid or one.laddr.port == port)}
    assert {(place.ip, place.port) for place in listening} == {("127.0.0.1", port)}
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                with pytest.raises(OSError, match="refused"):
                    socket.create_connection((address.address, port), timeout=5)


@pytest.mark.faults
def test_the_playground_listens_on_loopback_alone(finished: Path) -> None:
    model = finished / "results/tiny/models/demix"
    command = [sys.executable, "-m", "demix", "serve", str(model), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline().rpartition("127.0.0.1:")[2].partition("/")[0])
        assert_loopback_alone(port, process.pid)
        assert urllib3.request("GET", f"http://127.0.0.1:{port}/model").status == 200
        process.terminate()


@pytest.mark.faults
def test_the_pages_of_mlflow_are_on_loopback_alone(frozen: Run, tmp_path: Path) -> None:
    with serving(tmp_path, frozen) as ui:
        own = ui.address.removeprefix("http://")
        assert_loopback_alone(int(own.partition(":")[2]))
        assert status(ui, "GET", "/", Host=own) == 200
