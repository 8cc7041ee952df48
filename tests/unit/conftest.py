"""What several test modules need: token shards, made-up runs, and a browser."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

from support.families_run import build_families
from support.once import once
from support.synthetic_run import MadeUp, build_run
from support.tokens import write_tokens

# Several threads, of several test processes at once, cost a tiny model ten times what one does. torch reads this when
# it is imported; processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokenizer.json and tokens/<domain>/<split>.arrow (`support.tokens`); not to be written to."""
    return once(tmp_path_factory, "tokens", write_tokens)


@pytest.fixture(scope="session")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> MadeUp:
    """The made-up run (`support.synthetic_run`); not to be written to."""
    return build_run(tmp_path_factory.mktemp("made-up"))


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> MadeUp:
    """The made-up run with rows of other families (`support.families_run`); not to be written to."""
    return build_families(tmp_path_factory.mktemp("families"))


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
