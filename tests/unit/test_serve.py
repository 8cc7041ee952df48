"""`demix serve` over a real connection, asked by the openai client."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest
import torch
import urllib3

import demix as package
from demix.config.architecture import Routed
from demix.data.tokenizer import Tokenizer
from demix.generate import server
from demix.generate.completions import MAX_PROMPTS, MAX_TOKENS, opened
from demix.generate.server import CONNECTIONS, KEY, MAX_BYTES, place_of
from support.cli import refusal
from support.decoding import LENGTH, write_run
from support.disturbed import until
from support.errors import refused
from support.models import SMALL, model_of, save_model
from support.serving import PROMPT, asked, client_of, serving

# Without a stop, the likeliest tokens of the random model go on for minutes.
ENDLESS = {"prompt": ["the"] * MAX_PROMPTS, "max_tokens": MAX_TOKENS, "temperature": 0}


@pytest.fixture(scope="module")
def run(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the model demix."""
    return write_run(tmp_path_factory.mktemp("served"), tokens)


@pytest.fixture(scope="module")
def address(run: Path) -> Iterator[str]:
    with serving(opened(run / "models" / "demix")) as one:
        yield one


def facts(choice: openai.types.CompletionChoice) -> dict:
    return choice.model_dump(exclude={"index"})


MIXED = ({}, {"weights": "history"}, {"weights": "switching(0.3)", "experts": ["news", "law"]}, {"weights": "average"})


def assert_generated(model: Path, address: str, **more: Any) -> None:
    """A completion is the text of `demix generate`, with what each token needs under the mixture and each expert."""
    opened = package.load(model)
    for how in ({"temperature": 0.0}, {"temperature": 1.2, "top_p": 0.9}):
        found = asked(address, model=model.name, max_tokens=3 * LENGTH, seed=4, by_expert=True, **how, **more)
        made = opened.generate(PROMPT, tokens=3 * LENGTH, seed=4, **{"top_p": 1.0} | how, **more)
        (choice,) = found.choices
        # Bytes at the end that are no character are one here, and not yet one there.
        assert choice.text in (made.text, f"{made.text}\ufffd")
        assert found.usage.completion_tokens == len(made.tokens) == 3 * LENGTH
        nats, by_expert, weights = (
            np.concatenate([one[name] for one in choice.by_expert]) for name in ("nats", "expert_nats", "weights")
        )
        np.testing.assert_allclose(nats, -made.mixture, atol=1e-3)
        np.testing.assert_allclose(by_expert, -made.log_probabilities, atol=1e-3)
        np.testing.assert_allclose(weights[::2], made.weights, atol=1e-4)


@pytest.mark.parametrize("more", MIXED)
def test_a_completion_is_that_of_generate(run: Path, address: str, more: dict) -> None:
    assert_generated(run / "models" / "demix", address, **more)


@pytest.mark.parametrize("kind", ["dense", "routed"])
def test_other_kinds_of_models_are_served(run: Path, kind: str) -> None:
    encoder, model = Tokenizer.load(run / "tokenizer.json"), run / "models" / kind
    routed = Routed(experts=3, top_k=2, every=2, capacity=3.0, balance=0.01) if kind == "routed" else None
    made = model_of(dtype=torch.float32, vocab_size=encoder.vocab_size, architecture=SMALL.replace(routed=routed))
    save_model(made, model, encoder.sha256, kind)
    with serving(opened(model)) as other:
        assert_generated(model, other)


def test_a_stream_is_the_same_in_parts(address: str) -> None:
    how = {"max_tokens": 60, "seed": 3, "temperature": 1.5, "top_p": 0.9, "by_expert": True}
    plain = asked(address, **how).choices[0]
    drawn = plain.text
    assert len(drawn) > 20
    stop = drawn[15:18]
    for stops in (None, [stop, "never"]):
        one = asked(address, stop=stops, **how)
        parts = list(asked(address, stop=stops, stream=True, **how))
        assert one.usage.completion_tokens == len(one.choices[0].by_expert)
        choices = [part.choices[0] for part in parts]
        assert len(choices) > 10
        assert "".join(choice.text for choice in choices) == one.choices[0].text
        assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1].finish_reason == one.choices[0].finish_reason
        assert [value for choice in choices for value in choice.by_expert] == one.choices[0].by_expert
    assert one.choices[0].text == drawn[: drawn.index(stop)]
    assert (one.choices[0].finish_reason, plain.finish_reason) == ("stop", "length")
    # No part of a stop string leaves before it is known whether the string is whole.
    assert asked(address, **how | {"stop": drawn[-1] + "never"}).choices[0].text == drawn


def test_several_prompts_are_answered_as_each_alone(address: str) -> None:
    texts = [PROMPT, "", "The house divided."]
    how = {"max_tokens": 12, "seed": 5, "by_expert": True}
    together = asked(address, texts, **how)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    alone = [asked(address, text, **how) for text in texts]
    assert [facts(choice) for choice in together.choices] == [facts(one.choices[0]) for one in alone]
    assert together.usage.total_tokens == sum(one.usage.total_tokens for one in alone)
    assert facts(asked(address, PROMPT, **how | {"seed": 6}).choices[0]) != facts(together.choices[0])
    unseeded = {asked(address, max_tokens=20).choices[0].text for _ in range(5)}
    assert len(unseeded) > 1


def test_models_are_listed(address: str) -> None:
    client = client_of(address)
    (only,) = client.models.list()
    assert (only.id, only.object, only.owned_by) == ("demix", "model", "demix")
    with pytest.raises(openai.NotFoundError):
        asked(address, model="gpt-4", max_tokens=1)


WRONG = {
    "no such rule": {"weights": "best"},
    "no clusters": {"weights": "cluster"},
    "no such expert": {"experts": ["nesw"]},
    "no expert": {"experts": []},
    "an unknown key": {"more": {"top_k": 3}},
    "a key of bytes": {"more": 1, "user": "\\ud800"},
    "several answers": {"n": 2},
    "a bias": {"logit_bias": {"50": 1}},
    "nothing": {"max_tokens": 0},
    "the prompt again": {"more": {"echo": True}},
    "a number as text": {"temperature": "0.5"},
    "a seed of 65 bits": {"more": {"seed": 2**63}},
    "log-probabilities": {"logprobs": 1},
    "too long": {"max_tokens": MAX_TOKENS + 1},
    "too long a prompt": {"prompt": "a b " * 4097},
    "token ids": {"prompt": [1, 2]},
    "no prompts": {"prompt": []},
    "too many prompts": {"prompt": ["a"] * 33},
    "too many stops": {"stop": ["a"] * 17},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_refused_in_one_line(address: str, wrong: dict) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        asked(address, **{"max_tokens": 1} | wrong)
    assert caught.value.body["type"] == "invalid_request_error"
    assert "\n" not in caught.value.body["message"]


def test_what_changes_nothing_may_be_said(address: str) -> None:
    plain = asked(address, max_tokens=9, seed=1, temperature=1, stop=None).choices[0]
    said = {"n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "suffix": None}
    found = asked(address, max_tokens=9, seed=1, user="me", logprobs=None, temperature=None, **said)
    assert facts(found.choices[0]) == facts(plain)


@pytest.mark.parametrize("edge", [{"temperature": 5e-324}, {"top_p": 0}, {"top_p": 5e-324, "temperature": 2}])
def test_the_ends_of_ranges_are_the_likeliest_tokens(address: str, edge: dict) -> None:
    likeliest = asked(address, max_tokens=9, temperature=0).choices[0]
    for seed in (-(2**63), -1, 0, 2**63 - 1):
        assert facts(asked(address, max_tokens=9, seed=seed, **edge).choices[0]) == facts(likeliest)


def posted(address: str, body: bytes | dict, path: str = "/v1/completions", **headers: str) -> tuple[int, dict]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = urllib3.request("POST", address + path, body=content, headers=sent, retries=False)
    return answer.status, answer.json()["error"] if answer.status >= 400 else answer.json()


def test_requests_are_json_of_bounded_size(address: str) -> None:
    for body in (
        b"{",
        b'{"prompt": "\xff"}',
        b"[" * 200_000,
        b'{"model": "demix", "prompt": null}',
        b'{"model": "demix", "prompt": "a", "temperature": NaN}',
        b'{"model": "demix", "prompt": "a\\ud800"}',
        b'{"model": "demix", "prompt": "a", "\\ud800": 1}',
        b'{"model": "demix", "prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
    ):
        assert posted(address, body)[0] == 400, body[:60]
    for path in ("/v1/completions", "/analyse"):
        assert posted(address, b" " * (MAX_BYTES + 1), path)[0] == 413
    many = b",".join(b'"%d":0' % one for one in range(100_000))
    began = time.monotonic()
    assert posted(address, b"{%s}" % many)[0] == 400
    assert time.monotonic() - began < 10, "the time is linear in the number of keys"
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/embeddings"):
        status, error = posted(address, b"", path)
        assert (status, "POST /v1/completions" in error["message"], "no chat" in error["message"]) == (404, 1, 1)
    assert urllib3.request("GET", f"{address}/v1/completions").status == 405


def test_half_a_head_blocks_nobody(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 2)
    with serving(opened(run / "models" / "demix")) as address, ExitStack() as held:
        port = int(address.rpartition(":")[2])
        for _ in range(CONNECTIONS + 9):
            slow = held.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            slow.sendall(b"GET /v1/models HTTP/1.1\r\nHost: ")
        assert slow.recv(1) == b""
        assert len(client_of(address).models.list().data) == 1


def test_who_comes_when_all_places_are_taken_is_told_so(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS", 1)
    with serving(opened(run / "models" / "demix")) as address, ExitStack() as held:
        events = client_of(address).completions.create(model="demix", stream=True, **ENDLESS)
        next(iter(held.enter_context(events)))
        with pytest.raises(openai.InternalServerError) as caught:
            client_of(address).models.list()
    assert (caught.value.status_code, caught.value.body["type"]) == (503, "server_error")


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 20_000,
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n",
    ],
    ids=["no host", "TLS", "a long head", "a negative length", "a long length", "an encoding"],
)
def test_what_is_no_request_is_refused_and_ends_the_connection(address: str, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=30) as connection:
        connection.sendall(sent)
        assert b"".join(iter(lambda: connection.recv(1 << 16), b"")).startswith(b"HTTP/1.1 400 ")


def test_a_key_is_asked_for_where_one_is_set(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    with refused("--host 0.0.0.0"):
        place_of("0.0.0.0", 0)
    monkeypatch.setenv(KEY, "schlüssel-1")
    place_of("0.0.0.0", 0).close()
    with serving(opened(run / "models" / "demix"), "sk-right") as address:
        for wrong in ("sk-wrong", "sk-righ", "sk-right2"):
            with pytest.raises(openai.AuthenticationError):
                client_of(address, wrong).models.list()
        for path in ("/v1/completions", "/eval", "/nowhere"):
            assert posted(address, {"prompt": "a"}, path)[0] == 401
        right = client_of(address, "sk-right")
        assert right.completions.create(model="demix", prompt="a", max_tokens=1).usage.completion_tokens == 1
        # Through a proxy, the server has another name.
        header = {"Authorization": "Bearer sk-right"}
        assert posted(address, {"text": "a"}, "/eval", Host="models.example", **header)[0] == 200


def is_busy(address: str) -> bool:
    """Whether another request keeps one waiting."""
    try:
        client_of(address).with_options(timeout=1).completions.create(model="demix", prompt="a", max_tokens=1)
    except openai.APITimeoutError:
        return True
    return False


def test_a_reader_who_leaves_makes_place_for_the_next(address: str) -> None:
    """An endless request would otherwise keep the others waiting for minutes, which the client does not."""
    with client_of(address).completions.create(model="demix", stream=True, **ENDLESS) as events:
        next(iter(events))
        assert is_busy(address)
    assert asked(address, max_tokens=1).usage.completion_tokens == 1
    place = ("127.0.0.1", int(address.rpartition(":")[2]))
    body = json.dumps({"model": "demix"} | ENDLESS).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {place[0]}:{place[1]}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(place, timeout=30) as connection, socket.create_connection(place) as waiting:
        connection.sendall(head.encode() + body)
        until(lambda: is_busy(address))
        waiting.sendall(head.encode() + body)
    assert asked(address, max_tokens=1).usage.completion_tokens == 1


@pytest.mark.full
def test_the_command_serves_until_ctrl_c(run: Path) -> None:
    command = [sys.executable, "-m", "demix", "serve", str(run / "models" / "demix"), "--port", "0"]
    told = {name: value for name, value in os.environ.items() if name != KEY}
    process = subprocess.Popen(command, env=told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        page, address = (word.rstrip("/,") for word in line.split() if word.startswith("http"))
        assert address == f"{page}/v1"
        address = page
        listening = {one.laddr.ip for one in psutil.Process(process.pid).net_connections() if one.status == "LISTEN"}
        assert listening == {"127.0.0.1"}
        assert asked(address, max_tokens=3, temperature=0).usage.completion_tokens == 3
        events = client_of(address).completions.create(model="demix", stream=True, **ENDLESS)
        next(iter(events))
        process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError):
            list(events)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out.count("\n"), err) == (0, 1, "")


def test_a_mistake_of_the_command_is_one_line(run: Path, address: str) -> None:
    model, port = str(run / "models" / "demix"), address.rpartition(":")[2]
    for options, subject in (
        (["--port", port], f"127.0.0.1:{port}"),
        (["--port", "0", "--weights", "best"], "--weights best"),
        (["--port", "0", "--prior", "updating"], "--prior updating"),
        (["--port", "0", "--experts", "lawe"], "lawe"),
        (["--host", "nowhere.invalid", "--port", "0"], "--host nowhere.invalid"),
    ):
        refusal("serve", model, *options, of=subject)
