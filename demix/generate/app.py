"""What `demix serve` and `demix playground` open: a page at /, completions as OpenAI's API at /v1, tokens as vLLM's."""

import asyncio
import base64
import hashlib
import json
import os
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from demix.errors import DemixError
from demix.generate.completions import (
    CompletionRequest,
    Opened,
    Part,
    completed,
    log_probabilities_of,
    name_of,
    prompts_of,
    tokens_of,
)
from demix.generate.page import MixRequest, Page, TextRequest
from demix.generate.server import application, in_url, listening, refusal, request_of, run, server_of
from demix.launch.guarded import LOOPBACK, Guarded
from demix.model.continuations import MixedModel
from demix.settings import Integer, Items, Switch, Text, settings

PAGE = Path(__file__).with_name("page.html")
KEY = "DEMIX_API_KEY"
# Requests that wait while another one is computed.
MAX_WAITING = 16
# From the arrival of a request to its last token.
SECONDS = 300.0
OFFERED = (
    "this server completes texts and has no chat: ask for POST /v1/completions or GET /v1/models, or open the page at /"
)


@settings(kw_only=True)
class TokenizeRequest:
    """The body of a request to /tokenize. No tokens are added, whatever `add_special_tokens` says."""

    prompt: Text
    add_special_tokens: Switch = False
    model: Text = ""


@settings(kw_only=True)
class DetokenizeRequest:
    """The body of a request to /detokenize."""

    tokens: Items[Integer]
    model: Text = ""


class Completions:
    """The answers to requests for completions, computed one at a time; others wait. None goes on once it `stops`."""

    def __init__(self, model: Opened, stops: Callable[[], bool]):
        self.model, self.stops = model, stops
        self.waiting, self._free = 0, asyncio.Semaphore(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, ends_at = Request(scope, receive), asyncio.get_running_loop().time() + SECONDS
        asked = await run_in_threadpool(Completion.asked_for, self.model, await request.body())
        async with self._turn(ends_at):
            if await request.is_disconnected():
                raise ClientDisconnect
            parts = self._parts(asked, ends_at)
            if asked.request.stream:
                events = asked.events(parts)
                await StreamingResponse(events, media_type="text/event-stream")(scope, receive, send)
                return
            found: list[list[Part]] = [[] for _ in asked.prompts]
            async for index, part in parts:
                found[index].append(part)
                if await request.is_disconnected():
                    raise ClientDisconnect
        await (await run_in_threadpool(asked.whole, found))(scope, receive, send)

    @asynccontextmanager
    async def _turn(self, ends_at: float) -> AsyncIterator[None]:
        if self.waiting >= MAX_WAITING:
            raise HTTPException(429, f"{MAX_WAITING} other requests are waiting; try again later")
        self.waiting += 1
        try:
            async with asyncio.timeout_at(ends_at):
                await self._free.acquire()
        except TimeoutError:
            raise HTTPException(503, f"other requests took more than {SECONDS:g} s; try again later") from None
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self._free.release()

    async def _parts(self, asked: "Completion", ends_at: float) -> AsyncIterator[tuple[int, Part]]:
        for index, prompt in enumerate(asked.prompts):
            self._go_on(ends_at)
            async for part in iterate_in_threadpool(completed(self.model, asked.mixture, asked.request, prompt)):
                yield index, part
                if not part.finish:
                    self._go_on(ends_at)

    def _go_on(self, ends_at: float) -> None:
        if self.stops():
            raise HTTPException(503, "the server is being stopped")
        if asyncio.get_running_loop().time() > ends_at:
            raise HTTPException(400, f"the request took more than {SECONDS:g} s; ask for less")


@dataclass(frozen=True)
class Completion:
    """A request for completions that is understood, and the answers to it in OpenAI's form, each with `about`."""

    model: Opened
    request: CompletionRequest
    mixture: MixedModel
    prompts: list[list[int]]
    about: dict[str, Any]

    @classmethod
    def asked_for(cls, model: Opened, body: bytes) -> Self:
        """The request in `body`. Raises DemixError or HTTPException for what `model` does not answer."""
        asked = request_of(CompletionRequest, body)
        if asked.model != model.name:
            raise HTTPException(404, f"the model {asked.model!r:.80} is not served here; ask for {model.name}")
        about = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        mixture = model.mixture(asked.experts, asked.weights, asked.prior)
        return cls(model, asked, mixture, prompts_of(model, asked), about | {"model": model.name})

    def whole(self, found: Sequence[Sequence[Part]]) -> Response:
        """The answer as one object, whose parts are given by prompt."""
        choices = [self._choice(index, parts) for index, parts in enumerate(found)]
        listed = sum(len(part.tokens) for parts in found for part in parts)
        return JSONResponse(self.about | {"choices": choices, "usage": self._usage(listed)})

    async def events(self, parts: AsyncIterator[tuple[int, Part]]) -> AsyncIterator[bytes]:
        """The answer as server-sent events. An error is the last of them."""
        asked, listed = self.request, 0
        try:
            async for index, part in parts:
                listed += len(part.tokens)
                if part.text or part.finish or asked.logprobs is not None or asked.by_expert:
                    yield _event(self.about | {"choices": [self._choice(index, [part])]})
            if asked.stream_options.include_usage:
                yield _event(self.about | {"choices": [], "usage": self._usage(listed)})
            yield b"data: [DONE]\n\n"
        except (DemixError, HTTPException) as error:
            yield b"data: " + bytes(refusal(error).body) + b"\n\n"

    def _choice(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        asked, text = self.request, "".join(part.text for part in parts)
        logs = None if asked.logprobs is None else log_probabilities_of(self.model.tokenizer, parts)
        choice = {"index": index, "text": text, "logprobs": logs, "finish_reason": parts[-1].finish}
        return choice | ({"by_expert": [part.by_expert for part in parts]} if asked.by_expert else {})

    def _usage(self, listed: int) -> dict[str, int]:
        """The numbers of tokens, where `listed` are those of all parts."""
        given = sum(map(len, self.prompts))
        drawn = listed - given * self.request.echo
        return {"prompt_tokens": given, "completion_tokens": drawn, "total_tokens": given + drawn}


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value, allow_nan=False)}\n\n".encode()


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
    """The application that serves `model`: to requests with the `key`, or without a key to this machine only.

    `stops` says whether the server is about to end.
    """
    tokenizer, html, page = model.tokenizer, PAGE.read_text(), Page(model)
    end = name_of(tokenizer, tokenizer.end_of_text)
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

    def got(facts: Callable[[], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            if request.path_params.get("name", model.name) != model.name:
                raise HTTPException(404, f"the model is not served here; ask for {model.name}")
            return JSONResponse(await run_in_threadpool(facts), headers=headers)

        return endpoint

    def posted(kind: type[Any], answer: Callable[[Any], dict[str, Any]]) -> Callable[[Request], Any]:
        def answered(body: bytes) -> Response:
            return JSONResponse(answer(request_of(kind, body)), headers=headers)

        async def endpoint(request: Request) -> Response:
            return await run_in_threadpool(answered, await request.body())

        return endpoint

    def tokenized(asked: TokenizeRequest) -> dict[str, Any]:
        ids = [tokenizer.end_of_text] if asked.prompt == end else tokens_of(tokenizer, asked.prompt)
        return {"tokens": ids, "count": len(ids), "max_model_len": model.max_tokens}

    def detokenized(asked: DetokenizeRequest) -> dict[str, Any]:
        return {"prompt": tokenizer.decode(tokens_of(tokenizer, asked.tokens))}

    routes = [
        Route("/", root),
        Route("/model", got(page.facts)),
        Route("/analyse", posted(MixRequest, page.analysed), methods=["POST"]),
        Route("/eval", posted(TextRequest, page.judged), methods=["POST"]),
        Route("/v1/completions", Completions(model, stops), methods=["POST"]),
        Route("/v1/models", got(lambda: {"object": "list", "data": [card]})),
        Route("/v1/models/{name}", got(lambda: card)),
        Route("/tokenizer_info", got(lambda: {"eos_token": end})),
        Route("/tokenize", posted(TokenizeRequest, tokenized), methods=["POST"]),
        Route("/detokenize", posted(DetokenizeRequest, detokenized), methods=["POST"]),
    ]
    return application(routes, OFFERED, key)


def place_of(host: str, port: int) -> socket.socket:
    """A socket at a host and port (`listening`); a host other than loopback needs a key in the environment."""
    if in_url(host) not in LOOPBACK and not os.environ.get(KEY):
        cure = f"set {KEY} to a key that requests must bear, or leave --host out"
        raise DemixError(f"--host {host}", "may be reached from other machines", cure)
    return listening(host, port)


def serve(model: Opened, place: socket.socket) -> None:
    """Answer requests at `place` until Ctrl-C, with the key of the environment."""
    run(server_of(lambda stops: served(model, os.environ.get(KEY, ""), stops)), place, model.directory)
