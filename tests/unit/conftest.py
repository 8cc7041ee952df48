"""What several test modules need: token shards, the report of a run, and a browser."""

import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from socket import socket

import pytest
from selenium import webdriver

from demix.report import write_report
from demix.run.run import Run
from support.once import once
from support.tokens import write_tokens

# Several threads, of several test processes at once, cost a tiny model ten times what one does. torch reads this when
# it is imported; processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokenizer.json and tokens/<domain>/<split>.arrow (`support.tokens`); not to be written to."""
    return once(tmp_path_factory, "tokens", write_tokens)


@pytest.fixture(scope="session")
def report(frozen: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the run that the workflow made; not to be written to."""
    return once(tmp_path_factory, "report", lambda folder: write_report(frozen, folder))


@pytest.fixture(scope="module")
def nobody() -> Iterator[str]:
    """The address of a port of this machine where nobody listens; while it is bound, no other process can take it."""
    with closing(socket()) as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (
        "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync", f"user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):  # fmt: skip
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()
