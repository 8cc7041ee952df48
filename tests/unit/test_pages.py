"""The report's pages in a real browser."""

import base64
import html
import shutil
from pathlib import Path

import pandas as pd
import pytest
from axe_core_python.selenium import Axe
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from demix.report import write_report
from demix.report.card import card_page, model_card
from demix.report.compare import compare
from demix.report.compared import write_page
from demix.report.table import Table, part_of_page, render, write_table
from demix.run.run import Run
from support.frozen import evaluate_again, with_models

pytestmark = pytest.mark.browser

PAGES = [
    *("index.html", "claims.html", "tables/table5.html", "tables/table13.html", "figures/training.html"),
    *("cards/demix.html", "comparison.html"),
]
DRAWN = "#figure summary, div.dt-container, table.claims, .card table"


@pytest.fixture(scope="module")
def pages(frozen: Run, report: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the run with a card; the first page and a comparison are of a part of its models."""
    folder = shutil.copytree(report, tmp_path_factory.mktemp("pages") / "report")
    (folder / "cards").mkdir()
    (folder / "cards" / "demix.html").write_text(card_page(frozen, "demix", model_card(frozen, "demix")))
    part = with_models(frozen, folder.parent / "part", "demix", "dense", "dense_unbalanced", "domain_token")
    write_report(part, folder.parent / "short")
    shutil.copy(folder.parent / "short" / "index.html", folder)
    pair = with_models(frozen, folder.parent / "pair", "demix", "dense")
    evaluate_again(pair)
    copy = shutil.copytree(pair.folder, folder.parent / "copy")
    write_page(compare([pair.folder, copy]), folder / "comparison.html")
    return folder


def column(browser: webdriver.Chrome, number: int) -> list[str]:
    """The first line of one column's cells, as a reader sees it."""
    return browser.execute_script(
        "return [...document.querySelectorAll(`tbody tr > :nth-child(${arguments[0]})`)]"
        ".map(cell => cell.innerText.split('\\n')[0])",
        number,
    )


def nothing_fetched(browser: webdriver.Chrome) -> bool:
    """Whether the page is whole in itself and ran without an error."""
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    return severe == [] == [name for name in loaded if not name.startswith("blob:")]


def test_a_table_is_sorted_searched_and_copied(browser: webdriver.Chrome, pages: Path) -> None:
    browser.get((pages / "tables" / "table7.html").as_uri())
    wait = WebDriverWait(browser, 30)
    wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, "div.dt-container"))
    before = column(browser, 1)
    summary = next(number for number, label in enumerate(before) if label.startswith("Mean"))
    for turned in (False, True):
        browser.find_elements(By.CSS_SELECTOR, "thead th")[1].click()
        wait.until(lambda _, before=before: column(browser, 1) != before)
        numbers = [float(text) for text in column(browser, 2)]
        assert numbers[:summary] == sorted(numbers[:summary], reverse=turned)
        before, means = column(browser, 1), [label.startswith("Mean") for label in before]
        assert [label.startswith("Mean") for label in before] == means, "means stay below what they are of"

    # Copying asks the clipboard, which a page of a test has not: what is copied is caught on the way.
    browser.execute_script(
        "document.execCommand = () => { window.copied = document.activeElement.value; return true; }"
    )
    browser.find_element(By.CSS_SELECTOR, "button.buttons-copy").click()
    copied = wait.until(lambda _: browser.execute_script("return window.copied"))
    assert [line.split("\t")[0] for line in copied.strip().splitlines()][1:] == before

    browser.find_element(By.CSS_SELECTOR, "input[type=search]").send_keys("licen")
    wait.until(lambda _: column(browser, 1) == ["licenses"])
    assert nothing_fetched(browser)


def test_each_long_table_of_a_page_has_a_landmark_of_its_own(browser: webdriver.Chrome, tmp_path: Path) -> None:
    frame = pd.DataFrame({"number": range(70)}, index=[f"line {number}" for number in range(70)])
    parts = [part_of_page(Table(frame, name, name=name, title=name)) for name in ("one", "other")]
    (tmp_path / "page.html").write_text(render("comparison", title="both", paragraphs=[], notes=[], parts=parts))
    browser.get((tmp_path / "page.html").as_uri())
    WebDriverWait(browser, 30).until(lambda _: len(browser.find_elements(By.CSS_SELECTOR, "div.dt-container")) == 2)
    labels = {nav.get_attribute("aria-label") for nav in browser.find_elements(By.TAG_NAME, "nav")}
    assert len(labels) == 2
    assert Axe().run(browser)["violations"] == []


def test_names_are_no_markup(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """DataTables takes cells apart and puts them together anew: in rows, lists and what it searches."""
    name = "<img src=x onerror='window.ran = true'>"
    frame = pd.DataFrame({name: [f"{name}{row % 3}" for row in range(70)]}, index=[f"{name}{row}" for row in range(70)])
    write_table(Table(frame, name, name="names", title=name), tmp_path)
    browser.get((tmp_path / "names.html").as_uri())
    wait = WebDriverWait(browser, 30)
    wait.until(lambda _: len(column(browser, 2)) == 50)
    browser.find_element(By.CSS_SELECTOR, "button.dtcc-button_dropdown").click()
    listed = wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, ".dtcc-list-buttons .dtcc-button-text"))
    assert [one.text for one in listed] == [f"{name}{number}" for number in range(3)]
    browser.find_element(By.CSS_SELECTOR, "input[type=search]").send_keys("ran = true'>69")
    wait.until(lambda _: column(browser, 1) == [f"{name}69"])
    assert browser.execute_script("return [document.images.length, window.ran]") == [0, None]


def test_a_table_works_alone_in_a_frame(browser: webdriver.Chrome, pages: Path, tmp_path: Path) -> None:
    """As Snakemake's report (a data address) and MLflow (a frame without an origin) show it."""
    page = (pages / "tables" / "table3.html").read_text()
    data = base64.b64encode(page.encode()).decode()
    frames = f'<iframe src="data:text/html;base64,{data}"></iframe>'
    frames += f'<iframe sandbox="allow-scripts" srcdoc="{html.escape(page)}"></iframe>'
    (tmp_path / "frames.html").write_text(f'<meta charset="utf-8">{frames}')
    browser.get((tmp_path / "frames.html").as_uri())
    for frame in browser.find_elements(By.TAG_NAME, "iframe"):
        browser.switch_to.frame(frame)
        WebDriverWait(browser, 30).until(lambda _: browser.find_elements(By.CSS_SELECTOR, "button.buttons-copy"))
        browser.switch_to.default_content()


@pytest.mark.parametrize("name", ["figure2", "figure4", "figure6", "figure7", "figure8", "training"])
def test_a_figure_tells_the_numbers_under_the_pointer(browser: webdriver.Chrome, pages: Path, name: str) -> None:
    browser.get((pages / "figures" / f"{name}.html").as_uri())
    assert browser.title in (pages / "figures" / f"{name}.svg").read_text()
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
    assert nothing_fetched(browser)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_axe_finds_no_fault(browser: webdriver.Chrome, pages: Path, page: str, scheme: str) -> None:
    """Names, roles, contrast: what axe-core checks by the rules of WCAG."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get((pages / page).as_uri())
    WebDriverWait(browser, 60).until(lambda _: browser.find_elements(By.CSS_SELECTOR, DRAWN))
    browser.execute_script("document.querySelectorAll('details:not(#figure *)').forEach(one => one.open = true)")
    faults = Axe().run(browser)["violations"]
    assert [(fault["id"], fault["nodes"][0]["html"]) for fault in faults] == []
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_rows_of_the_first_page_sort_by_a_key_and_oracles_stay_last(browser: webdriver.Chrome, pages: Path) -> None:
    browser.get((pages / "index.html").as_uri())
    wait = WebDriverWait(browser, 30)
    wait.until(lambda _: browser.find_elements(By.CSS_SELECTOR, "div.dt-container"))
    summary = browser.find_element(By.XPATH, "//details[.//table]/summary")
    summary.send_keys(Keys.ENTER)
    rows = (
        "return [...document.querySelector('details .dt-container').querySelectorAll('tbody tr')]"
        ".map(row => row.innerText)"
    )
    for way in ("asc", "desc"):
        browser.find_elements(By.CSS_SELECTOR, "details .dt-container thead th")[1].click()
        sorted_so = f"details .dt-container thead th.dt-ordering-{way}"
        wait.until(lambda _, sorted_so=sorted_so: browser.find_elements(By.CSS_SELECTOR, sorted_so))
        shown = browser.execute_script(rows)
        means = [float(text.split("\t")[1].split()[0]) for text in shown]
        oracles = ["(naive)" in text for text in shown]
        assert any(oracles)
        assert oracles == sorted(oracles)
        fair = [mean for mean, oracle in zip(means, oracles, strict=True) if not oracle]
        assert fair == sorted(fair, reverse=way == "desc")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_as_narrow_as_a_telephone(browser: webdriver.Chrome, pages: Path, page: str) -> None:
    """Wide tables and figures move in frames of their own; the first page has a drawing of this width."""
    size = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get((pages / page).as_uri())
    WebDriverWait(browser, 60).until(lambda _: browser.find_elements(By.CSS_SELECTOR, DRAWN))
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    if page == "index.html":
        frames = browser.find_elements(By.CSS_SELECTOR, ".broad, .narrow")
        assert [frame.is_displayed() for frame in frames] == [False, True]
        assert browser.execute_script("return arguments[0].scrollWidth <= arguments[0].clientWidth", frames[1])
    assert nothing_fetched(browser)
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
