"""Whose domain a text is, as the playground's page tells it: in the words of `demix eval`, of one text or several."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_core_python.selenium import Axe
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from demix.generate.playground.answers import MOST_JUDGED
from demix.generate.playground.server import Playground
from demix.run.run import Run
from support.cli import demix
from support.playground import ask, served

TEXT = "the sea was calm and the law of the sea was long " * 30


@pytest.fixture(scope="module")
def server(frozen: Run) -> Iterator[Playground]:
    """The playground of a model with a dense model beside it, in a run that says what is usual."""
    with served(frozen.folder / "models" / "demix") as server:
        yield server


def evaluated(server: Playground, text: str) -> dict:
    status, answer, _ = ask(server, "POST", "/eval", {"text": text})
    assert status == 200, answer
    return json.loads(answer)


def test_the_answer_is_that_of_the_command(server: Playground, tmp_path: Path) -> None:
    texts = {"a.txt": TEXT, "b.txt": "the sea"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = evaluated(server, TEXT)
    shown = " ".join(demix("eval", server.model.directory, tmp_path / "a.txt").output.split())
    assert shown.startswith(found["headline"])
    assert found["doubt"] in shown
    told = json.loads(demix("eval", server.model.directory, tmp_path / "a.txt", "--json").output)
    best = {line["name"]: line["bits_per_byte"] for line in told["experts"]}
    assert {one["name"]: one["bits"] for one in found["ranked"]}.keys() == best.keys()
    assert found["ranked"][0]["name"] == min(best, key=best.get) == found["line"][0]
    assert [one["bits"] for one in found["ranked"]] == sorted(one["bits"] for one in found["ranked"])
    lines = demix("eval", server.model.directory, tmp_path / "a.txt", tmp_path / "b.txt").output
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")][1:] for line in lines.splitlines() if "│" in line]
    assert [row[:5] for row in rows if row[0]] == [evaluated(server, text)["line"][:5] for text in texts.values()]


@pytest.mark.browser
def test_files_are_judged_and_compared_in_a_browser(
    server: Playground, browser: webdriver.Chrome, tmp_path: Path
) -> None:
    browser.get(server.address)
    wait = WebDriverWait(browser, 30)

    def find(selector: str) -> list:
        return browser.find_elements(By.CSS_SELECTOR, selector)

    def says(text: str) -> bool:
        found = evaluated(server, text)
        return [find(f"#{name}")[0].text for name in ("answer", "doubt")] == [found["headline"], found["doubt"]]

    wait.until(lambda _: says(server.model.example))
    assert find("#text")[0].get_property("value") == server.model.example

    texts = {"a.txt": TEXT, "b.md": "the court said no", "c.txt": ""}
    paths = [tmp_path / name for name in (*texts, "d.png")]
    for path in paths[:-1]:
        path.write_text(texts[path.name])
    paths[-1].write_bytes(b"\x89PNG\r\n\x1a\n\0")
    find("#files")[0].send_keys("\n".join(map(str, paths)))
    wait.until(lambda _: len(find("#texts tr")) == 4 and says(TEXT))
    rows = [[cell.text for cell in row.find_elements(By.CSS_SELECTOR, "th, td")] for row in find("#texts tr")]
    assert rows[:2] == [[name, *evaluated(server, texts[name])["line"]] for name in ("a.txt", "b.md")]
    assert [row[0] for row in rows[2:]] == ["c.txt", "d.png"]
    best = evaluated(server, TEXT)["ranked"]
    assert [row.text.split("\n")[0] for row in find("#experts li")] == [one["name"] for one in best]
    assert [row.text.split("\n")[0] for row in find("#experts li.best")] == [best[0]["name"]]

    # By the keyboard: back to a text of the table, and the text in the page into the table.
    find("#texts button")[1].send_keys(Keys.ENTER)
    wait.until(lambda _: says(texts["b.md"]))
    find("#compare")[0].send_keys(Keys.ENTER)
    wait.until(lambda _: len(find("#texts tr")) == 5)
    assert find("#texts tr:last-child td:nth-child(3)")[0].text == rows[1][2]

    # A file that is dropped on the page; of a long one the beginning.
    browser.execute_script(
        "const moved = new DataTransfer(); moved.items.add(new File([arguments[0].repeat(arguments[1])], 'long.txt'));"
        "document.body.dispatchEvent(new DragEvent('drop', {dataTransfer: moved, bubbles: true, cancelable: true}));",
        TEXT,
        MOST_JUDGED // len(TEXT) + 1,
    )
    wait.until(lambda _: len(find("#text")[0].get_property("value")) == MOST_JUDGED)
    assert len(find("#texts tr")) == 5, "one file alone is no comparison"

    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        find("#example")[0].click()
        wait.until(lambda _: says(server.model.example))
        faults = Axe().run(browser)["violations"]
        assert [(fault["id"], fault["nodes"][0]["html"]) for fault in faults] == []
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert [entry for entry in severe if "/eval" not in entry["message"]] == []
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
