"""The server of `demix serve`: a page at /, and completions with OpenAI's API at /v1."""

import asyncio
import base64
import hashlib
import json
import math
import os
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Self, TypeVar

import h11
import numpy as np
import torch
import uvicorn
from pydantic import Field
from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from demix.config.mixing import parsed_weights
from demix.errors import DemixError
from demix.evaluate.own_summary import FILES_NOTE, HEADS, cells, doubt, headline
from demix.evaluate.own_text import Judge
from demix.files.json_files import without_nan
from demix.generate.completions import (
    MAX_TOKENS,
    CompletionRequest,
    Opened,
    Part,
    by_expert_of,
    completed,
    prompts_of,
)
from demix.launch.guarded import LOOPBACK, Guarded
from demix.model.clusters import has_clusters
from demix.model.continuations import MixedModel
from demix.model.decode import decoded
from demix.model.directory import tokenizer_of
from demix.settings import Items, Settings, Text, settings_from

PAGE = Path(__file__).with_name("page.html")
KEY = "DEMIX_API_KEY"
# The maximum number of characters of a text that is evaluated.
MAX_JUDGED = 1 << 16
# The rules that the page offers. The first is that of `demix eval`, whose sentence the page shows. With a change of
# experts once in 100 tokens, `switching` follows a change of domain sooner: over twelve texts of three dev documents of
# the sample (100 tokens each) the right expert has 80% of the weight at 5.71 nats per token; with `tempered` it has 56%
# at 5.80.
RULES = ("tempered", "switching(0.01)", "history", "released")
# The rules that the page also offers if the model's run has a clustering of its experts.
BY_CLUSTER = ("cluster", "cluster+history")
OFFERED = (
    "this server completes texts and has no chat: use POST /v1/completions or GET /v1/models, or open the page at /"
)
# One more is answered with 503.
# One more is answered with 503.
CONNECTIONS = 64
MAX_BYTES = 2 << 20
# Maximum seconds from the start of a connection, or the end of its last answer, to the end of a request's head.
HEAD_SECONDS = 10
# An error may quote the request, so its line is cut to this length.
MAX_LINE = 500

T = TypeVar("T", bound=Settings)


class TextRequest(Settings):
    """A request for the domain that is most similar to a text."""

    text: Annotated[Text, Field(max_length=MAX_JUDGED)]


class MixRequest(Settings):
    """A request to mix experts on a text.

    `weights` names the mixing rule (`demix.model.decode.weights_of`), and `prior` is "" (the rule's default), updating,
    uniform or a domain.
    """

    text: Text
    experts: Items[Text]
    weights: Text
    prior: Text


@dataclass
class Page:
    """The answers to the page about a model; `last` is the text of the last request, with its tokens and scores."""

    model: Opened
    lock: Lock = field(default_factory=Lock)
    last: tuple[str, list[int], torch.Tensor] | None = None

    @cached_property
    def judge(self) -> Judge:
        """The evaluator of `demix eval`. The run's dense model is loaded for the first text."""
        model, device = self.model, self.model.trunks[0].token_embedding.device
        path, _ = tokenizer_of(model.directory, model.tokenizer_file)
        return Judge(model.directory, model.trunks, path, device)

    def facts(self) -> dict[str, Any]:
        """The facts about the model that the page shows."""
        rules = RULES + (BY_CLUSTER if has_clusters(self.model.directory) else ())
        return {
            "name": str(self.model.directory),
            "model": self.model.name,
            "experts": self.model.experts,
            "context": self.model.trunks[0].architecture.context,
            "domains": self.model.domains,
            "weights": rules,
            # These rules use earlier blocks, so an updating prior would count the evidence of those twice.
            "all_text": [rule for rule in rules if "updating" in parsed_weights(rule).rules.refused],
            "heads": HEADS,
            "note": FILES_NOTE,
            "most_judged": MAX_JUDGED,
        }

    def judged(self, asked: TextRequest) -> dict[str, Any]:
        """The results of `demix eval` for a text: sentences, its line in a table of texts, and experts, best first."""
        with self.lock:
            result = self.judge.result(asked.text, self.judge.read(asked.text))
        ranked = [{"name": line.name, "nats": math.log(line.perplexity)} for line in result.ranked]
        found = {"headline": headline(result), "doubt": doubt(result), "line": cells(result), "ranked": ranked}
        return dict(without_nan(found))

    def analysed(self, asked: MixRequest) -> dict[str, Any]:
        """The experts' values for each token of a text (`by_expert_of`), and the tokens (`pieces`).

        `left_out` is the number of tokens beyond MAX_TOKENS. If a request has the same text as the one before, no
        forward pass is needed for another mixture.
        """
        model, end = self.model, torch.tensor([self.model.tokenizer.end_of_text])
        mixture = model.mixture(asked.experts, asked.weights, asked.prior)
        posterior = mixture.begin(end.numpy())
        with self.lock:
            if self.last is None or self.last[0] != asked.text:
                ids = model.tokenizer.encode(asked.text).tolist()
                decoder = mixture.decoder(end)
                first = torch.tensor([ids[:MAX_TOKENS]], dtype=torch.long)
                self.last = asked.text, ids, decoder.read(first)[0]
            _, every, scores = self.last
        ids = every[:MAX_TOKENS]
        log_g = posterior.observe(scores.numpy(), np.array([ids], np.int64))
        pieces = list(decoded(model.tokenizer, ids))
        return {"pieces": pieces, "left_out": len(every) - len(ids)} | by_expert_of(
            scores, log_g, posterior.log_weights
        )


def refused(line: str, status: int, close: bool = False) -> Response:
    """An error response in OpenAI's form; with `close` the connection is closed."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    line = line[:MAX_LINE].encode(errors="replace").decode()
    error = {"message": line, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error}, status, {"connection": "close"} if close else None)


def refusal(request: Request | None, error: Exception) -> Response:
    """The response to a `request` that failed with `error`."""
    if isinstance(error, DemixError):
        return refused(str(error).removeprefix("--"), 400)
    if isinstance(error, HTTPException):
        response = refused(error.detail, error.status_code)
        response.headers.update(error.headers or {})
        return response
    if isinstance(error, ClientDisconnect):
        return refused("the sender has left, or was too slow", 408)
    return refused("something went wrong; see the terminal", 500)


def request_of(kind: type[T], body: bytes) -> T:
    """The request in a JSON body, in which null means that the key is absent.

    Raises DemixError for any other body.
    """
    try:
        values = json.loads(body)
        # Unpaired surrogates are an error here.
        json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise DemixError("request", "is not JSON in valid Unicode", "send a JSON object") from None
    if not isinstance(values, dict):
        raise DemixError("request", "is not a JSON object", "send a JSON object")
    return settings_from(kind, {key: value for key, value in values.items() if value is not None}, "request")


class Completions:
    """Answers requests for completions one at a time; others wait. No request continues when the server `stops`."""

    def __init__(self, model: Opened, stops: Callable[[], bool]):
        self.model, self.stops, self._free = model, stops, asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        asked = await run_in_threadpool(Completion.asked_for, self.model, await request.body())
        async with self._free:
            if await request.is_disconnected():
                raise ClientDisconnect
            parts = self._parts(asked)
            if asked.request.stream:
                events = asked.events(parts)
                await StreamingResponse(events, media_type="text/event-stream")(scope, receive, send)
                return
            found: list[list[Part]] = [[] for _ in asked.prompts]
            async for index, part in parts:
                found[index].append(part)
                if await request.is_disconnected():
                    raise ClientDisconnect
        await JSONResponse(asked.whole(found))(scope, receive, send)

    async def _parts(self, asked: "Completion") -> AsyncIterator[tuple[int, Part]]:
        for index, prompt in enumerate(asked.prompts):
            async for part in iterate_in_threadpool(completed(self.model, asked.mixture, asked.request, prompt)):
                if self.stops():
                    raise HTTPException(503, "the server is being stopped")
                yield index, part


@dataclass(frozen=True)
class Completion:
    """A valid request for completions, and the responses to it in OpenAI's form, each with `about`."""

    model: Opened
    request: CompletionRequest
    mixture: MixedModel
    prompts: list[list[int]]
    about: dict[str, Any]

    @classmethod
    def asked_for(cls, model: Opened, body: bytes) -> Self:
        """The request in `body`. Raises DemixError or HTTPException if `model` cannot answer it."""
        asked = request_of(CompletionRequest, body)
        if asked.model != model.name:
            raise HTTPException(404, f"the model {asked.model!r:.80} is not served here; ask for {model.name}")
        about = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        mixture = model.mixture(asked.experts, asked.weights, asked.prior)
        return cls(model, asked, mixture, prompts_of(model, asked), about | {"model": model.name})

    def whole(self, found: Sequence[Sequence[Part]]) -> dict[str, Any]:
        """The response as one object, from the parts of each prompt."""
        read, drawn = sum(map(len, self.prompts)), sum(map(len, found))
        usage = {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}
        choices = [self._choice(index, parts) for index, parts in enumerate(found)]
        return self.about | {"choices": choices, "usage": usage}

    async def events(self, parts: AsyncIterator[tuple[int, Part]]) -> AsyncIterator[bytes]:
        """The response as server-sent events. If there is an error, it is the last event."""
        try:
            async for index, part in parts:
                if part.text or part.finish or self.request.by_expert:
                    value = self.about | {"choices": [self._choice(index, [part])]}
                    yield f"data: {json.dumps(value, allow_nan=False)}\n\n".encode()
            yield b"data: [DONE]\n\n"
        except (DemixError, HTTPException) as error:
            yield b"data: " + bytes(refusal(None, error).body) + b"\n\n"

    def _choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        text = "".join(part.text for part in parts)
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": parts[-1].finish}
        return choice | ({"by_expert": [part.by_expert for part in parts]} if self.request.by_expert else {})


def content_policy(page: str) -> str:
    """The Content-Security-Policy: only the page's own script and style run (by hash), and only this server answers."""

    def hashes(tag: str) -> str:
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; img-src data:;"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def served(model: Opened, key: str, stops: Callable[[], bool]) -> Guarded:
    """The application that serves `model` to requests with the `key`, or, without a key, only to this machine.

    `stops` returns whether the server is about to end.
    """
    html, page = PAGE.read_text(), Page(model)
    made = int((model.directory / "model.json").stat().st_mtime)
    card = {"id": model.name, "object": "model", "created": made, "owned_by": "demix"}
    headers = {
        "Content-Security-Policy": content_policy(html),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }

    async def root(request: Request) -> Response:
        return Response(html, headers=headers, media_type="text/html")

    def route(path: str, answer: Callable[..., dict[str, Any]], kind: type[Any] | None = None) -> Route:
        """A path that returns an `answer` to GET, or, if `kind` is given, to a posted request of this kind."""

        def answered(body: bytes) -> Response:
            asked = () if kind is None else (request_of(kind, body),)
            return JSONResponse(answer(*asked), headers=headers)

        async def endpoint(request: Request) -> Response:
            return await run_in_threadpool(answered, await request.body())

        return Route(path, endpoint, methods=["POST" if kind else "GET"])

    routes = [
        Route("/", root),
        route("/model", page.facts),
        route("/analyse", page.analysed, MixRequest),
        route("/eval", page.judged, TextRequest),
        route("/v1/models", lambda: {"object": "list", "data": [card]}),
        Route("/v1/completions", Completions(model, stops), methods=["POST"]),
    ]

    async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
        raise HTTPException(404, f"{scope['path']!r:.80} is not served here; {OFFERED}")

    handlers: Any = dict.fromkeys((DemixError, HTTPException, ClientDisconnect, Exception), refusal)
    starlette = Starlette(routes=routes, exception_handlers=handlers)
    starlette.router.redirect_slashes, starlette.router.default = False, nothing
    return Guarded(starlette, MAX_BYTES, key, refused)


class Connection(H11Protocol):
    """A uvicorn connection that is closed if the head of a request needs more than HEAD_SECONDS.

    If there are more than CONNECTIONS, the one that has waited longest for a head is closed. If none waits for a head,
    the response is 503.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first head, and close another connection if there are too many."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        others: list[Any] = [one for one in self.connections if one is not self and not one.transport.is_closing()]
        if len(others) < CONNECTIONS:
            return
        if waiting := [one for one in others if one.timeout_keep_alive_task]:
            min(waiting, key=lambda one: one.timeout_keep_alive_task.when()).timeout_keep_alive_handler()
        else:
            self.app: ASGIApp = refused(f"{CONNECTIONS} other requests are under way; try again later", 503, close=True)

    def data_received(self, data: bytes) -> None:
        """Receive bytes. uvicorn's own method stops the clock even if they do not complete a head."""
        self.conn.receive_data(data)
        self.handle_events()

    def handle_events(self) -> None:
        """Stop the clock when a head is complete."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._unset_keepalive_if_required()

    def send_400_response(self, msg: str) -> None:
        """Reject bytes that are not a request; a response may already have begun."""
        with suppress(h11.LocalProtocolError):
            super().send_400_response(msg)
        self.transport.close()


def in_url(host: str) -> str:
    """A host in the form of a URL."""
    return f"[{host}]" if ":" in host else host


def config_of(app: ASGIApp) -> uvicorn.Config:
    """The settings of a server of `app`, which prints nothing and uses the time limits of this module."""
    quiet: Any = {"log_config": None, "log_level": "error", "access_log": False, "server_header": False}
    bounds: Any = {"timeout_keep_alive": HEAD_SECONDS, "timeout_graceful_shutdown": 10}
    return uvicorn.Config(app, http=Connection, ws="none", lifespan="off", proxy_headers=False, **quiet, **bounds)


def place_of(host: str, port: int) -> socket.socket:
    """A socket at a host and port; port 0 means any free port.

    Raises DemixError if it cannot be opened, and for a host other than loopback without a key in the environment.
    """
    if in_url(host) not in LOOPBACK and not os.environ.get(KEY):
        cure = f"set {KEY} to a key that requests must send, or omit --host"
        raise DemixError(f"--host {host}", "may be accessible from other machines", cure)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        cause = f"cannot be used ({error.strerror})"
        raise DemixError(f"{in_url(host)}:{port}", cause, "give another host or port") from None


def server_of(model: Opened, key: str) -> uvicorn.Server:
    """The server of `model` with the application `served`."""
    server = uvicorn.Server(config_of(served(model, key, lambda: server.should_exit)))
    return server


def serve(model: Opened, place: socket.socket) -> None:
    """Answer requests at `place` until Ctrl-C, with the key of the environment. The first line prints the addresses."""
    host, port, *_ = place.getsockname()
    address = f"http://{in_url(host)}:{port}"
    print(f"{model.directory}: page {address}/, completions {address}/v1 (no chat); stop it with Ctrl-C", flush=True)
    # If signals are ignored, as in a background job of a shell, the server ends by itself.
    with suppress(KeyboardInterrupt):
        server_of(model, os.environ.get(KEY, "")).run(sockets=[place])
    print(f"{address}: stopped")
