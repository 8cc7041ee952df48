"""The page and its three requests, for browsers on this machine only."""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from demix.generate.playground.answers import (
    DrawRequest,
    MixRequest,
    Opened,
    TextRequest,
    analyse,
    draw,
    judged,
    model_facts,
)
from demix.generate.server import application, listening, request_of, run, server_of
from demix.launch.guarded import Guarded

PAGE = Path(__file__).with_name("page.html")
MOST_BYTES = 256 << 10
# A page stops the text that it has generated before it asks for another.
PATIENCE = 1.0


def pages(model: Opened, stops: Callable[[], bool]) -> Guarded:
    """What is served of `model` until it `stops`: the page, facts about the model, and the answers to its requests."""
    page = PAGE.read_bytes()
    headers = {
        "Content-Security-Policy": content_policy(page.decode()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }

    async def root(request: Request) -> Response:
        return Response(page, headers=headers, media_type="text/html")

    async def facts(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(model_facts, model), headers=headers)

    def posted(kind: type[Any], answer: Callable[[Opened, Any], dict[str, Any]]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            asked = request_of(kind, await request.body())
            return JSONResponse(await run_in_threadpool(answer, model, asked), headers=headers)

        return endpoint

    routes = [
        Route("/", root),
        Route("/model", facts),
        Route("/analyse", posted(MixRequest, analyse), methods=["POST"]),
        Route("/eval", posted(TextRequest, judged), methods=["POST"]),
        Route("/generate", Continuations(model, headers, stops), methods=["POST"]),
    ]
    return application(routes, "open the page at /", MOST_BYTES)


class Continuations:
    """The answers to requests for a continuation, one at a time. None goes on once it `stops`."""

    def __init__(self, model: Opened, headers: Mapping[str, str], stops: Callable[[], bool]):
        self.model, self.headers, self.stops = model, headers, stops
        self._free = asyncio.Semaphore(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = request_of(DrawRequest, await Request(scope, receive).body())
        drawn = await run_in_threadpool(draw, self.model, asked)
        try:
            async with asyncio.timeout(PATIENCE):
                await self._free.acquire()
        except TimeoutError:
            raise HTTPException(429, "another text is being generated; stop it first") from None
        try:
            lines = StreamingResponse(self._lines(drawn), headers=self.headers, media_type="application/x-ndjson")
            await lines(scope, receive, send)
        finally:
            self._free.release()

    async def _lines(self, drawn: Iterator[dict[str, Any]]) -> AsyncIterator[bytes]:
        async for value in iterate_in_threadpool(drawn):
            yield json.dumps(value, allow_nan=False).encode() + b"\n"
            if self.stops():
                return


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


def serve(model: Opened, port: int) -> None:
    """Answer this machine's browsers at a port, of which 0 is a free one, until Ctrl-C."""
    with listening("127.0.0.1", port) as place:
        run(server_of(lambda stops: pages(model, stops)), place, model.directory, "/")
