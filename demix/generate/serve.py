"""A server of completions by a mixture of experts that speaks OpenAI's API, and vLLM's for tokens."""

import asyncio
import json
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from demix.errors import DemixError
from demix.generate.completions import (
    CompletionRequest,
    Part,
    Served,
    completed,
    log_probabilities_of,
    name_of,
    prompts_of,
    tokens_of,
)
from demix.generate.server import application, in_url, listening, refusal, request_of, run, server_of
from demix.launch.guarded import LOOPBACK, Guarded
from demix.model.continuations import MixedModel
from demix.settings import Integer, Items, Switch, Text, settings

KEY = "DEMIX_API_KEY"
MOST_BYTES = 2 << 20
# Requests that wait while another one is computed.
MOST_WAITING = 16
# From the arrival of a request to its last token.
SECONDS = 300.0
OFFERED = "this server completes texts and has no chat: ask for POST /v1/completions or GET /v1/models"


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

    def __init__(self, model: Served, stops: Callable[[], bool]):
        self.model, self.stops = model, stops
        self.waiting, self._free = 0, asyncio.Semaphore(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, ends_at = Request(scope, receive), asyncio.get_running_loop().time() + SECONDS
        asked, mixture, prompts = await run_in_threadpool(self._understood, await request.body())
        about = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        about["model"] = self.model.name
        async with self._turn(ends_at):
            if await request.is_disconnected():
                raise ClientDisconnect
            parts = self._parts(asked, mixture, prompts, ends_at)
            if asked.stream:
                events = self._events(asked, about, prompts, parts)
                await StreamingResponse(events, media_type="text/event-stream")(scope, receive, send)
                return
            found: list[list[Part]] = [[] for _ in prompts]
            async for index, part in parts:
                found[index].append(part)
                if await request.is_disconnected():
                    raise ClientDisconnect

        def whole() -> Response:
            choices = [self._choice(asked, index, each) for index, each in enumerate(found)]
            drawn = sum(len(part.tokens) for each in found for part in each)
            return JSONResponse(about | {"choices": choices, "usage": _usage(asked, prompts, drawn)})

        await (await run_in_threadpool(whole))(scope, receive, send)

    def _understood(self, body: bytes) -> tuple[CompletionRequest, MixedModel, list[list[int]]]:
        asked = request_of(CompletionRequest, body)
        if asked.model != self.model.name:
            raise HTTPException(404, f"the model {asked.model!r:.80} is not served here; ask for {self.model.name}")
        return asked, self.model.mixture(asked.experts, asked.weights), prompts_of(self.model, asked)

    @asynccontextmanager
    async def _turn(self, ends_at: float) -> AsyncIterator[None]:
        if self.waiting >= MOST_WAITING:
            raise HTTPException(429, f"{MOST_WAITING} other requests are waiting; try again later")
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

    async def _parts(
        self, asked: CompletionRequest, mixture: MixedModel, prompts: Sequence[list[int]], ends_at: float
    ) -> AsyncIterator[tuple[int, Part]]:
        for index, prompt in enumerate(prompts):
            self._go_on(ends_at)
            async for part in iterate_in_threadpool(completed(self.model, mixture, asked, prompt)):
                yield index, part
                if not part.finish:
                    self._go_on(ends_at)

    def _go_on(self, ends_at: float) -> None:
        if self.stops():
            raise HTTPException(503, "the server is being stopped")
        if asyncio.get_running_loop().time() > ends_at:
            raise HTTPException(400, f"the request took more than {SECONDS:g} s; ask for less")

    async def _events(
        self,
        asked: CompletionRequest,
        about: dict[str, Any],
        prompts: Sequence[list[int]],
        parts: AsyncIterator[tuple[int, Part]],
    ) -> AsyncIterator[bytes]:
        drawn = 0
        try:
            async for index, part in parts:
                drawn += len(part.tokens)
                if part.text or part.finish or asked.logprobs is not None:
                    yield _event(about | {"choices": [self._choice(asked, index, [part])]})
            if asked.stream_options.include_usage:
                yield _event(about | {"choices": [], "usage": _usage(asked, prompts, drawn)})
            yield b"data: [DONE]\n\n"
        except (DemixError, HTTPException) as error:
            yield b"data: " + bytes(refusal(error).body) + b"\n\n"

    def _choice(self, asked: CompletionRequest, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(part.text for part in parts),
            "logprobs": None if asked.logprobs is None else log_probabilities_of(self.model.tokenizer, parts),
            "finish_reason": parts[-1].finish,
        }


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value, allow_nan=False)}\n\n".encode()


def _usage(asked: CompletionRequest, prompts: Sequence[list[int]], listed: int) -> dict[str, int]:
    """The numbers of tokens, where `listed` are those of all parts."""
    given = sum(map(len, prompts))
    drawn = listed - given * asked.echo
    return {"prompt_tokens": given, "completion_tokens": drawn, "total_tokens": given + drawn}


def api(model: Served, key: str, stops: Callable[[], bool]) -> Guarded:
    """What is served of `model` until it `stops`: to who bears the `key`, or without one to this machine alone."""
    tokenizer = model.tokenizer
    end = name_of(tokenizer, tokenizer.end_of_text)
    made = int((model.directory / "model.json").stat().st_mtime)
    card = {"id": model.name, "object": "model", "created": made, "owned_by": "demix"}

    async def one_model(request: Request) -> Response:
        if request.path_params["name"] != model.name:
            raise HTTPException(404, f"the model is not served here; ask for {model.name}")
        return JSONResponse(card)

    def told(facts: dict[str, Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            return JSONResponse(facts)

        return endpoint

    def tokenized(body: bytes) -> Response:
        text = request_of(TokenizeRequest, body).prompt
        ids = [tokenizer.end_of_text] if text == end else tokens_of(tokenizer, text)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": model.most_tokens})

    def detokenized(body: bytes) -> Response:
        ids = tokens_of(tokenizer, request_of(DetokenizeRequest, body).tokens)
        return JSONResponse({"prompt": tokenizer.decode(ids)})

    def posted(answer: Callable[[bytes], Response]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            return await run_in_threadpool(answer, await request.body())

        return endpoint

    routes = [
        Route("/v1/completions", Completions(model, stops), methods=["POST"]),
        Route("/v1/models", told({"object": "list", "data": [card]})),
        Route("/v1/models/{name}", one_model),
        Route("/tokenizer_info", told({"eos_token": end})),
        Route("/tokenize", posted(tokenized), methods=["POST"]),
        Route("/detokenize", posted(detokenized), methods=["POST"]),
    ]
    return application(routes, OFFERED, MOST_BYTES, key)


def place_of(host: str, port: int) -> socket.socket:
    """A socket at a host and port (`listening`); a host other than loopback needs a key in the environment."""
    if in_url(host) not in LOOPBACK and not os.environ.get(KEY):
        cure = f"set {KEY} to a key that requests must bear, or leave --host out"
        raise DemixError(f"--host {host}", "may be reached from other machines", cure)
    return listening(host, port)


def serve(model: Served, place: socket.socket) -> None:
    """Answer requests at `place` until Ctrl-C, with the key of the environment."""
    server = server_of(lambda stops: api(model, os.environ.get(KEY, ""), stops))
    run(server, place, model.directory, "/v1", f" serves the model {model.name}: POST /v1/completions, no chat")
