"""What `make ui` starts: what guards MLflow's server, and MLflow's pages in a real browser."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import urllib3
from mlflow.tracking import MlflowClient
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support import expected_conditions
from selenium.webdriver.support.ui import WebDriverWait
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from demix.files import read_json_lines
from demix.launch.guarded import Guarded
from demix.run.run import Run
from demix.track.store import track
from support.frozen import with_models
from support.mlflow_ui import EXPERIMENT, Served, serving, status

PORT = 5000
# Until a page has loaded on a busy machine.
PATIENCE = 180


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
def served(frozen: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if not shutil.which("make"):
        pytest.skip("needs make")
    with serving(tmp_path_factory.mktemp("ui"), frozen) as one:
        yield one


@pytest.mark.full
def test_mlflow_is_guarded_and_its_telemetry_is_off(served: Served) -> None:
    own = served.address.removeprefix("http://")
    listening = (one.laddr for one in psutil.net_connections() if one.status == "LISTEN")
    assert {place.ip for place in listening if place.port == int(own.partition(":")[2])} == {"127.0.0.1"}
    assert [status(served, "GET", "/", Host=host) for host in (own, "evil.example")] == [200, 403]
    assert status(served, "POST", "/api/2.0/mlflow/experiments/search", Origin="http://localhost:1") == 403
    answer = urllib3.request("GET", f"{served.address}/ajax-api/3.0/mlflow/ui-telemetry").json()
    assert answer["disable_ui_telemetry"] is True


@pytest.mark.full
def test_a_server_takes_runs_too(served: Served, frozen: Run, tmp_path: Path) -> None:
    run = with_models(frozen, tmp_path / "run", "demix", "dense", seeds=[])
    first, second = (track(run, served.address, "by-server") for _ in range(2))
    assert ", 0 replaced, 0 unchanged, 0 deleted" in first
    assert "0 new, 0 replaced" in second


@pytest.mark.browser
def test_the_page_of_a_model_draws_the_curves_of_its_metrics_file(browser: webdriver.Chrome, served: Served) -> None:
    browser.set_window_size(1600, 1200)
    client = MlflowClient(served.address)
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    browser.get(f"{served.address}/#/experiments/{experiment}/runs")
    listed = expected_conditions.visibility_of_element_located((By.XPATH, "//a[normalize-space()='pipeline']"))
    WebDriverWait(browser, PATIENCE).until(listed, "pipeline is not in the list of runs")
    lines = "return [...document.querySelectorAll('.js-plotly-plot')].filter(one => one.querySelector('path.js-line'))"
    lines += ".map(one => one.data.map(line => Array.from(line.y)))"
    (run,) = client.search_runs([experiment], "attributes.run_name = 'demix'")
    browser.get(f"{served.address}/#/experiments/{experiment}/runs/{run.info.run_id}/model-metrics")
    browser.refresh()
    wanted = [row["loss/licenses"] for row in read_json_lines(served.run.folder / "metrics/demix.jsonl")]

    def drawn(page: webdriver.Chrome) -> bool:
        return any(curve == pytest.approx(wanted) for chart in page.execute_script(lines) for curve in chart)

    WebDriverWait(browser, PATIENCE).until(drawn, "not the file's curve")
    fetched = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert fetched
    assert [name for name in fetched if not name.startswith((f"{served.address}/", "data:", "blob:"))] == []
