"""Limits on the requests to a server on this machine."""

import hmac
from collections.abc import Callable

from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# This machine's own host names, as in a URL.
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Guarded:
    """An application that serves only its own pages, and bodies of requests of at most `most` bytes.

    A request for another host, or by a page of another origin, gets status 403, whatever its path. With a `key`, a
    request without it gets 401; host and origin are then not checked, because no other page can know the key. A larger
    body gets 413, with or without a Content-Length; the application receives a body only when it is complete. `refused`
    builds the response from a line and a status.
    """

    def __init__(
        self, app: ASGIApp, most: int, key: str = "", refused: Callable[[str, int], Response] = PlainTextResponse
    ):
        self.app, self.most, self.key, self.refused = app, most, key, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        named = [(name, value.decode("latin-1")) for name, value in scope["headers"]]
        hosts, origins = ([value for name, value in named if name == wanted] for wanted in (b"host", b"origin"))
        own = {f"{name}:{scope['server'][1]}" for name in LOOPBACK}
        local = len(hosts) == 1 and own.issuperset(hosts) and {f"http://{host}" for host in own}.issuperset(origins)
        if not (local or self.key):
            await self.refused("only this server's own pages are served", 403)(scope, receive, send)
            return
        headers = dict(named)
        given = headers.get(b"authorization", "").encode("latin-1")
        if self.key and not hmac.compare_digest(given, f"Bearer {self.key}".encode()):
            line = "the key is missing or wrong: send it as Authorization: Bearer KEY"
            await self.refused(line, 401)(scope, receive, send)
            return
        # The web server has already rejected a length that is not a number.
        body, size, more = bytearray(), int(headers.get(b"content-length", "0")), True
        while more and size <= self.most:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            size, more = len(body), message.get("more_body", False)
        if size > self.most:
            await self.refused(f"a request has at most {self.most} bytes", 413)(scope, receive, send)
            return
        whole: list[Message] = [{"type": "http.request", "body": bytes(body)}]

        async def received() -> Message:
            return whole.pop() if whole else await receive()

        await self.app(scope, received, send)
