"""The report's pages in a real browser."""

import shutil
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from demix.report import FIGURES, write_report
from support.synthetic_run import build_run

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="needs Chromium: apt-get install chromium chromium-driver",
    ),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = build_run(tmp_path_factory.mktemp("run"))
    write_report(run.path, run.config, run.path / "report")
    return run.path / "report"


def column(browser: webdriver.Chrome, number: int) -> list[str]:
    """The first line of one column's cells, as a reader sees it."""
    return [
        cell.text.split("\n")[0] for cell in browser.find_elements(By.CSS_SELECTOR, f"tbody tr > :nth-child({number})")
    ]


def test_a_click_on_a_heading_sorts_the_table(browser: webdriver.Chrome, report: Path) -> None:
    browser.get((report / "tables" / "table5.html").as_uri())
    assert "Table 5" in browser.title
    before = [float(text) for text in column(browser, 2)]
    heading = browser.find_elements(By.CSS_SELECTOR, "thead th")[1]
    heading.click()
    WebDriverWait(browser, 10).until(lambda _: [float(text) for text in column(browser, 2)] != before)
    once = [float(text) for text in column(browser, 2)]
    assert once in (sorted(before), sorted(before, reverse=True))
    browser.find_elements(By.CSS_SELECTOR, "thead th")[1].click()
    WebDriverWait(browser, 10).until(lambda _: [float(text) for text in column(browser, 2)] == once[::-1])


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_tells_the_numbers_under_the_pointer(browser: webdriver.Chrome, report: Path, name: str) -> None:
    browser.get((report / "figures" / f"{name}.html").as_uri())
    assert browser.title in (report / "figures" / f"{name}.svg").read_text()
    wait = WebDriverWait(browser, 60)
    marks = "#figure .mark-rect.role-mark path, #figure .mark-symbol.role-mark path"
    mark = wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, marks))[0]
    # The points of a line are not to be seen, and a text may lie on a cell.
    browser.execute_script(
        "for (const kind of ['pointermove', 'mousemove']) arguments[0].dispatchEvent("
        "new PointerEvent(kind, {bubbles: true, clientX: 200, clientY: 200}))",
        mark,
    )
    told = wait.until(lambda _: browser.find_element(By.CSS_SELECTOR, "#vg-tooltip-element.visible").text)
    assert any(word in told for word in ("domain", "expert", "perplexity", "model")), told
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert loaded == []
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_claims_are_readable(browser: webdriver.Chrome, report: Path) -> None:
    browser.get((report / "claims.html").as_uri())
    text = browser.find_element(By.TAG_NAME, "body").text
    assert "Claims of the paper, judged on this run" in text
    assert "DEMix (cached prior)" in text
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
