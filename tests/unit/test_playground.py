"""The playground: what its page is answered, what is refused, and the page in a real browser."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import urllib3
from axe_core_python.selenium import Axe
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from demix.generate.completions import MAX_TOKENS, Opened, opened
from demix.generate.server import MAX_JUDGED, RULES, server_of
from demix.run.run import Run
from support.cli import demix
from support.decoding import write_run
from support.models import THREE
from support.serving import running

TEXT = "And the Lord said unto Noah: “naïve” <b>b</b> & <script>alert(1)</script>\n  two spaces"


@dataclass
class Playground:
    """A playground that answers at a port."""

    model: Opened
    port: int


@contextmanager
def served(model: Path) -> Iterator[Playground]:
    one = opened(model)
    with running(server_of(one, "")) as port:
        yield Playground(one, port)


def ask(
    server: Playground, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, str, Mapping[str, str]]:
    """Status, text and headers of the answer to a request as the page sends it, but for `headers`."""
    own = f"http://127.0.0.1:{server.port}"
    sent = {"Origin": own, "Content-Type": "application/json"} | headers
    content = None if body is None else json.dumps(body)
    answer = urllib3.request(method, own + path, body=content, headers=sent, retries=False, timeout=60)
    return answer.status, answer.data.decode(), answer.headers


@pytest.fixture(scope="module")
def server(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Playground]:
    folder = write_run(tmp_path_factory.mktemp("run"), tokens)
    with served(folder / "models" / "demix") as server:
        yield server


def question(**changes: object) -> dict:
    return {"text": TEXT, "experts": list(THREE), "weights": "history", "prior": "updating"} | changes


def test_the_first_tokens_of_a_long_text_are_shown(server: Playground) -> None:
    found = json.loads(ask(server, "POST", "/analyse", question(text="x " * 3000))[1])
    assert len(found["pieces"]) == len(found["nats"]) == len(found["weights"]) - 1 == MAX_TOKENS
    assert found["left_out"] == len(server.model.tokenizer.encode("x " * 3000)) - MAX_TOKENS > 0
    empty = json.loads(ask(server, "POST", "/analyse", question(text=""))[1])
    assert (empty["pieces"], len(empty["weights"])) == ([], 1)


def test_the_page_may_run_its_own_script_alone(server: Playground) -> None:
    status, _, headers = ask(server, "GET", "/")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("sha256-") == 2
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert ask(server, "GET", "/model", Host=f"localhost:{server.port}")[0] == 200


LINK = {"text": "a", "experts": ["law"], "weights": "tempered", "prior": "uniform"}
REFUSALS = {
    "another host": ("GET", "/model", None, {"Host": "evil.example:8501"}, 403),
    "another origin": ("POST", "/analyse", LINK, {"Origin": "https://evil.example"}, 403),
    "a key less": ("POST", "/analyse", {"text": "a"}, {}, 400),
    "a key more": ("POST", "/analyse", question(more=1), {}, 400),
    "half a character": ("POST", "/analyse", question(text="a\ud800"), {}, 400),
    "no such expert": ("POST", "/analyse", question(experts=["laws"]), {}, 400),
    "no expert": ("POST", "/analyse", question(experts=[]), {}, 400),
    "weight for none": ("POST", "/analyse", question(experts=["news"], prior="songs"), {}, 400),
    "no such prior": ("POST", "/analyse", question(prior="/etc/x.parquet"), {}, 400),
    "no such rule": ("POST", "/analyse", question(weights="last"), {}, 400),
    "evidence twice": ("POST", "/analyse", question(weights="tempered"), {}, 400),
    "no text": ("POST", "/eval", {"text": " \n"}, {}, 400),
    "too long a text": ("POST", "/eval", {"text": "a" * (MAX_JUDGED + 1)}, {}, 400),
    "a wrong question": ("POST", "/", LINK, {}, 405),
}


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS)
def test_what_is_refused_is_told_in_one_line(server: Playground, case: tuple) -> None:
    method, path, body, changes, status = case
    found, text, headers = ask(server, method, path, body, **changes)
    line = json.loads(text)["error"]["message"]
    assert (found, "\n" in line, len(line) <= 500) == (status, False, True), text
    assert "Traceback" not in text
    assert "Access-Control-Allow-Origin" not in headers
    assert ask(server, "GET", "/model")[0] == 200, "and the next is answered"


@pytest.mark.browser
def test_the_page_in_a_browser(server: Playground, browser: webdriver.Chrome) -> None:
    browser.get(f"http://127.0.0.1:{server.port}/")

    def find(selector: str) -> list:
        return browser.find_elements(By.CSS_SELECTOR, selector)

    def text_of(selector: str) -> str:
        return browser.execute_script("return document.querySelector(arguments[0]).textContent", selector)

    wait, example = WebDriverWait(browser, 30), find("#text")[0].get_property("defaultValue")
    wait.until(lambda _: text_of("#tokens") == example)
    find("#text")[0].clear()
    find("#text")[0].send_keys(TEXT)
    wait.until(lambda _: text_of("#tokens") == TEXT)
    assert not find("#tokens b, #tokens script"), "a text is no markup"
    assert len(find("#ribbon > path")) == 3

    # By the keyboard alone: the third token, its numbers, and an expert off.
    find("#tokens")[0].send_keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    pieces = [token.get_property("textContent") for token in find("#tokens span")]
    assert json.dumps(pieces[2]) in text_of("#details")
    before = text_of("#count")
    find("#experts input")[0].send_keys(Keys.SPACE)
    wait.until(lambda _: text_of("#count") != before and find("#experts li.off"))
    assert text_of("#experts li.off output") == ""

    find("#go")[0].send_keys(Keys.ENTER)
    wait.until(lambda _: find("#go")[0].is_enabled() and len(find("#tokens .drawn")) > 10)
    shown = [token.get_property("textContent") for token in find("#tokens span")]
    assert shown[: len(pieces)] == pieces
    assert find("#text")[0].get_property("value").startswith(TEXT)

    find("#example")[0].click()
    wait.until(lambda _: text_of("#tokens") == example)
    weights = Select(find("#weights")[0])
    assert [option.get_attribute("value") for option in weights.options] == list(RULES)
    before = text_of("#count")
    weights.select_by_value("history")
    wait.until(lambda _: text_of("#count") != before)
    assert Select(find("#prior")[0]).first_selected_option.text == "updating"
    assert [entry["message"] for entry in browser.get_log("browser") if "Content Security" in entry["message"]] == []


SEA = "the sea was calm and the law of the sea was long " * 30


@pytest.fixture(scope="module")
def judging(frozen: Run) -> Iterator[Playground]:
    """The playground of a model with a dense model beside it, in a run that says what is usual."""
    with served(frozen.folder / "models" / "demix") as server:
        yield server


def evaluated(judging: Playground, text: str) -> dict:
    status, answer, _ = ask(judging, "POST", "/eval", {"text": text})
    assert status == 200, answer
    return json.loads(answer)


def test_the_answer_is_that_of_the_command(judging: Playground, tmp_path: Path) -> None:
    texts = {"a.txt": SEA, "b.txt": "the sea"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = evaluated(judging, SEA)
    shown = " ".join(demix("eval", judging.model.directory, tmp_path / "a.txt").output.split())
    assert shown.startswith(found["headline"])
    assert found["doubt"] in shown
    told = json.loads(demix("eval", judging.model.directory, tmp_path / "a.txt", "--json").output)
    best = {line["name"]: line["bits_per_byte"] for line in told["experts"]}
    assert {one["name"]: one["nats"] for one in found["ranked"]}.keys() == best.keys()
    assert found["ranked"][0]["name"] == min(best, key=best.get) == found["line"][0]
    assert [one["nats"] for one in found["ranked"]] == sorted(one["nats"] for one in found["ranked"])
    lines = demix("eval", judging.model.directory, tmp_path / "a.txt", tmp_path / "b.txt").output
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")][1:] for line in lines.splitlines() if "│" in line]
    assert [row[:5] for row in rows if row[0]] == [evaluated(judging, text)["line"][:5] for text in texts.values()]


def test_the_sentence_and_the_picture_have_one_rule_and_one_unit(judging: Playground) -> None:
    told = evaluated(judging, SEA)
    asked = question(text=SEA, experts=judging.model.experts, weights=RULES[0], prior="uniform")
    shown = json.loads(ask(judging, "POST", "/analyse", asked)[1])
    nats, weights = np.mean(shown["expert_nats"], axis=0), np.mean(shown["weights"][:-1], axis=0)
    places = [judging.model.experts.index(one["name"]) for one in told["ranked"]]
    # The command counts one token more, that of the document's end, and prints two decimals.
    assert float(told["line"][3]) == pytest.approx(weights[places[0]], abs=0.005 + 1 / len(shown["nats"]))
    np.testing.assert_allclose([one["nats"] for one in told["ranked"]], nats[places], rtol=0.01)


@pytest.mark.browser
def test_files_are_judged_and_compared_in_a_browser(
    judging: Playground, browser: webdriver.Chrome, tmp_path: Path
) -> None:
    browser.get(f"http://127.0.0.1:{judging.port}/")
    wait = WebDriverWait(browser, 30)

    def find(selector: str) -> list:
        return browser.find_elements(By.CSS_SELECTOR, selector)

    def says(text: str) -> bool:
        found = evaluated(judging, text)
        return [find(f"#{name}")[0].text for name in ("answer", "doubt")] == [found["headline"], found["doubt"]]

    example = find("#text")[0].get_property("defaultValue")
    wait.until(lambda _: says(example))
    assert find("#text")[0].get_property("value") == example

    texts = {"a.txt": SEA, "b.md": "the court said no", "c.txt": ""}
    paths = [tmp_path / name for name in (*texts, "d.png")]
    for path in paths[:-1]:
        path.write_text(texts[path.name])
    paths[-1].write_bytes(b"\x89PNG\r\n\x1a\n\0")
    find("#files")[0].send_keys("\n".join(map(str, paths)))
    wait.until(lambda _: len(find("#texts tr")) == 4 and says(SEA))
    rows = [[cell.text for cell in row.find_elements(By.CSS_SELECTOR, "th, td")] for row in find("#texts tr")]
    assert rows[:2] == [[name, *evaluated(judging, texts[name])["line"]] for name in ("a.txt", "b.md")]
    assert [row[0] for row in rows[2:]] == ["c.txt", "d.png"]
    best = evaluated(judging, SEA)["ranked"]
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
        SEA,
        MAX_JUDGED // len(SEA) + 1,
    )
    wait.until(lambda _: len(find("#text")[0].get_property("value")) == MAX_JUDGED)
    assert len(find("#texts tr")) == 5, "one file alone is no comparison"

    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        find("#example")[0].click()
        wait.until(lambda _: says(example))
        faults = Axe().run(browser)["violations"]
        assert [(fault["id"], fault["nodes"][0]["html"]) for fault in faults] == []
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert [entry for entry in severe if "/eval" not in entry["message"]] == []
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
