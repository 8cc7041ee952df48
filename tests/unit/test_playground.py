"""The playground: what its page is answered, what is refused, and the page in a real browser."""

import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from demix.data.tokenizer import Tokenizer
from demix.errors import DemixError
from demix.generate.playground.answers import (
    MOST_TOKENS,
    RULES,
)
from demix.generate.playground.server import CONNECTIONS, DRAINED_BYTES, MOST_BYTES, Playground, serve
from demix.mix.mixtures import mix
from demix.model.checkpoint import load_model
from support.decoding import in_blocks, whole, write_run
from support.disturbed import until
from support.models import THREE
from support.playground import ask, served

TEXT = "And the Lord said unto Noah: “naïve” <b>b</b> & <script>alert(1)</script>\n  two spaces"


@pytest.fixture(scope="module")
def server(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Playground]:
    folder = write_run(tmp_path_factory.mktemp("run"), tokens)
    with served(folder / "models" / "demix") as server:
        yield server


def question(**changes: object) -> dict:
    return {"text": TEXT, "experts": list(THREE), "weights": "history", "prior": "updating"} | changes


def drawing(**changes: object) -> dict:
    return question(tokens=20, temperature=1.0, top_p=0.9, seed=1) | changes


@pytest.mark.parametrize(
    ("weights", "prior", "method"),
    [
        ("history", "updating", "updating"),
        ("history", "uniform", "uniform"),
        ("history", "wiki", "cached"),
        ("tempered(0.1,0.99)", "", "uniform"),
        ("switching(0.2)", "wiki", "fitted"),
    ],
)
def test_an_analysis_is_what_mix_says(server: Playground, weights: str, prior: str, method: str) -> None:
    status, text, _ = ask(server, "POST", "/analyse", question(weights=weights, prior=prior))
    assert status == 200, text
    found = json.loads(text)
    assert "".join(found["pieces"]) == TEXT
    directory = server.model.directory
    encoder = Tokenizer.load(directory.parents[1] / "tokenizer.json")
    ids = torch.from_numpy(encoder.encode(TEXT).astype(np.int64))[None]
    scores = whole(load_model(directory, THREE), ids, torch.tensor([encoder.end_of_text]))[:, 0]
    table, mask = in_blocks(scores)
    expected = mix(table, mask, method, weights, log_prior=np.log([0.1, 0.2, 0.7]))[mask]
    np.testing.assert_allclose(found["bits"], -expected / np.log(2), atol=2e-3)
    order = [server.model.experts.index(name) for name in THREE]
    np.testing.assert_allclose(np.array(found["expert_bits"])[:, order].T, -scores / np.log(2), atol=2e-2)
    weights = np.array(found["weights"])
    assert len(weights) == ids.shape[1] + 1
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-3)
    with np.errstate(divide="ignore"):
        mixed = logsumexp(np.log(weights[:-1, order].T) + scores, axis=0)
    np.testing.assert_allclose(mixed, expected, atol=5e-2)


def test_an_expert_that_is_off_has_no_weight(server: Playground) -> None:
    found = json.loads(ask(server, "POST", "/analyse", question(experts=["law", "code"]))[1])
    off = server.model.experts.index("news")
    assert {row[off] for row in found["weights"]} == {0.0}
    alone = json.loads(ask(server, "POST", "/analyse", question(experts=["news"]))[1])
    np.testing.assert_allclose(alone["bits"], np.array(alone["expert_bits"])[:, off], atol=1e-2)
    empty = json.loads(ask(server, "POST", "/analyse", question(text=""))[1])
    assert (empty["pieces"], len(empty["weights"])) == ([], 1)


def test_the_first_tokens_of_a_long_text_are_shown(server: Playground) -> None:
    found = json.loads(ask(server, "POST", "/analyse", question(text="x " * 3000))[1])
    assert len(found["pieces"]) == len(found["bits"]) == len(found["weights"]) - 1 == MOST_TOKENS
    assert found["left_out"] == len(server.model.tokenizer.encode("x " * 3000)) - MOST_TOKENS > 0


def test_a_continuation_is_a_line_a_token_and_reproduces(server: Playground) -> None:
    status, text, _ = ask(server, "POST", "/generate", drawing())
    assert status == 200
    lines = [json.loads(line) for line in text.splitlines()]
    assert 0 < len(lines) <= 20
    assert (
        ask(server, "POST", "/generate", drawing())[1] == text != ask(server, "POST", "/generate", drawing(seed=2))[1]
    )
    written = ask(server, "POST", "/generate", drawing(text="a", temperature=0, tokens=5))[1].splitlines()
    added = "".join(json.loads(line)["pieces"][0] for line in written)
    analysed = json.loads(ask(server, "POST", "/analyse", question(text="a" + added))[1])
    if len(analysed["pieces"]) == 1 + len(written):
        np.testing.assert_allclose(analysed["weights"][-1], json.loads(written[-1])["weights"][0], atol=2e-4)


def test_the_page_may_run_its_own_script_alone(server: Playground) -> None:
    status, _, headers = ask(server, "GET", "/")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("sha256-") == 2
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert ask(server, "GET", "/model", Host=f"localhost:{server.server_port}")[0] == 200


LINK = {"text": "a", "experts": ["law"], "weights": "tempered", "prior": "uniform"}
REFUSALS = {
    "no host": ("GET", "/", None, {"Host": None}, 403),
    "another host": ("GET", "/model", None, {"Host": "evil.example:8501"}, 403),
    "no port": ("GET", "/", None, {"Host": "127.0.0.1"}, 403),
    "posted to another host": ("POST", "/analyse", LINK, {"Host": "evil.example"}, 403),
    "another origin": ("POST", "/analyse", LINK, {"Origin": "https://evil.example"}, 403),
    "null origin": ("POST", "/analyse", LINK, {"Origin": "null"}, 403),
    "no origin": ("POST", "/generate", LINK, {"Origin": None}, 403),
    "a form": ("POST", "/analyse", LINK, {"Content_Type": "text/plain"}, 415),
    "no length": ("POST", "/analyse", b"", {"Content_Length": None}, 411),
    "a negative length": ("POST", "/analyse", b"", {"Content_Length": "-1"}, 411),
    "chunks": ("POST", "/analyse", b"", {"Transfer_Encoding": "chunked"}, 411),
    "too much": ("POST", "/analyse", b" " * (MOST_BYTES + 1), {}, 413),
    "far too much": ("POST", "/analyse", b" " * DRAINED_BYTES, {}, 413),
    "no JSON": ("POST", "/analyse", b"{", {}, 400),
    "no UTF-8": ("POST", "/analyse", b'{"text": "\xff"}', {}, 400),
    "nested": ("POST", "/analyse", b"[" * 200_000, {}, 400),
    "a list": ("POST", "/analyse", [1], {}, 400),
    "a key less": ("POST", "/analyse", {"text": "a"}, {}, 400),
    "a key more": ("POST", "/analyse", question(more=1), {}, 400),
    "a number": ("POST", "/analyse", question(text=1), {}, 400),
    "a long wrong value": ("POST", "/analyse", question(text=["x" * 9999]), {}, 400),
    "no such expert": ("POST", "/analyse", question(experts=["laws"]), {}, 400),
    "no expert": ("POST", "/analyse", question(experts=[]), {}, 400),
    "weight for none": ("POST", "/analyse", question(experts=["news"], prior="songs"), {}, 400),
    "no such prior": ("POST", "/analyse", question(prior="/etc/x.parquet"), {}, 400),
    "no such rule": ("POST", "/analyse", question(weights="last"), {}, 400),
    "evidence twice": ("POST", "/analyse", question(weights="tempered"), {}, 400),
    "no text": ("POST", "/eval", {"text": " \n"}, {}, 400),
    "evaluated for another page": ("POST", "/eval", {"text": "a"}, {"Origin": "null"}, 403),
    "too long a text": ("POST", "/generate", drawing(text="x " * 30_000), {}, 400),
    "too many tokens": ("POST", "/generate", drawing(tokens=501), {}, 400),
    "cold": ("POST", "/generate", drawing(temperature=-0.1), {}, 400),
    "no temperature": ("POST", "/generate", drawing(temperature=float("nan")), {}, 400),
    "no mass": ("POST", "/generate", drawing(top_p=0), {}, 400),
    "a wrong path": ("GET", "/../page.html", None, {}, 404),
    "a wrong question": ("POST", "/", LINK, {}, 404),
    "another method": ("PUT", "/", None, {}, 501),
}


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS)
def test_what_is_refused_is_told_in_one_line(server: Playground, case: tuple) -> None:
    method, path, body, changes, status = case
    found, text, headers = ask(server, method, path, body, **changes)
    assert (found, text.count("\n")) == (status, 1), text
    assert len(text) < 400
    assert "Traceback" not in text
    assert "Access-Control-Allow-Origin" not in headers
    assert ask(server, "GET", "/model")[0] == 200, "and the next is answered"


def test_unpaired_surrogates_do_no_harm(server: Playground) -> None:
    asked = b'{"text": "a\\ud800b", "experts": ["law"], "weights": "tempered", "prior": "uniform"}'
    status, text, _ = ask(server, "POST", "/analyse", asked)
    assert status in (200, 400), text


def test_one_text_is_written_at_a_time(server: Playground) -> None:
    with server.drawing:
        assert ask(server, "POST", "/generate", drawing())[0] == 429
        assert ask(server, "POST", "/analyse", question())[0] == 200, "reading goes on beside it"
    assert ask(server, "POST", "/generate", drawing())[0] == 200


def test_a_reader_who_leaves_makes_place_for_the_next(server: Playground) -> None:
    body = json.dumps(drawing(tokens=500)).encode()
    own = f"127.0.0.1:{server.server_port}"
    head = f"POST /generate HTTP/1.1\r\nHost: {own}\r\nOrigin: http://{own}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert connection.recv(12) == b"HTTP/1.0 200"
    assert server.drawing.acquire(timeout=30)
    server.drawing.release()


def test_slow_senders_are_hung_up_on(server: Playground, monkeypatch: pytest.MonkeyPatch) -> None:
    """They send a byte now and then; the limit is of the whole request."""
    monkeypatch.setattr("demix.generate.playground.server.SECONDS", 0.3)
    slow = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(CONNECTIONS)]
    for each in slow:
        each.sendall(b"POST /analyse HTTP/1.1\r\nX: ")

    def answers() -> bool:
        for each in slow:
            with suppress(OSError):
                each.sendall(b"a")
        with suppress(OSError, http.client.HTTPException):
            return ask(server, "GET", "/model")[0] == 200
        return False

    # Those before it take every place.
    until(answers, 15)
    for each in slow:
        each.close()


def test_a_port_in_use_is_refused(server: Playground) -> None:
    with pytest.raises(DemixError):
        Playground(server.model, server.server_port)


@pytest.mark.browser
def test_the_page_in_a_browser(server: Playground, browser: webdriver.Chrome) -> None:
    browser.get(server.address)

    def find(selector: str) -> list:
        return browser.find_elements(By.CSS_SELECTOR, selector)

    def text_of(selector: str) -> str:
        return browser.execute_script("return document.querySelector(arguments[0]).textContent", selector)

    wait = WebDriverWait(browser, 30)
    wait.until(lambda _: text_of("#tokens") == server.model.example)
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

    find("#none")[0].click()
    wait.until(lambda _: len(find("#experts li.off")) == 3 and text_of("#error") != "")
    find("#all")[0].click()
    wait.until(lambda _: not find("#experts li.off") and text_of("#error") == "")

    find("#example")[0].click()
    wait.until(lambda _: text_of("#tokens") == server.model.example)
    weights = Select(find("#weights")[0])
    assert [option.get_attribute("value") for option in weights.options] == list(RULES)
    before = text_of("#count")
    weights.select_by_value("history")
    wait.until(lambda _: text_of("#count") != before)
    assert Select(find("#prior")[0]).first_selected_option.text == "updating"
    assert [entry["message"] for entry in browser.get_log("browser") if "Content Security" in entry["message"]] == []


def test_ctrl_c_stops_the_server_in_one_line(server: Playground, capsys: pytest.CaptureFixture[str]) -> None:
    own = Playground(server.model, 0)

    def stop() -> None:
        # It answers once the server is in its loop.
        connection = http.client.HTTPConnection("127.0.0.1", own.server_port, timeout=30)
        connection.request("GET", "/")
        connection.getresponse().read()
        os.kill(os.getpid(), signal.SIGINT)

    thread = Thread(target=stop)
    thread.start()
    serve(own)
    thread.join()
    assert len(capsys.readouterr().out.splitlines()) == 2
