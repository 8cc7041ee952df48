"""The bounds of the server: whom it waits for, what it takes, and errors in OpenAI's form."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from demix.errors import DemixError
from demix.launch.guarded import Guarded
from demix.settings import Settings, settings_from

CONNECTIONS = 64
MAX_BYTES = 2 << 20
# From the start of a connection, or the end of its last answer, to the end of a request's head.
HEAD_SECONDS = 10
# A request waits so long in all for the other side to send or to take bytes.
SENDER_SECONDS = 60.0
# An error may quote the request, so its line is cut to this length.
MAX_LINE = 500

T = TypeVar("T", bound=Settings)


def refused(line: str, status: int, close: bool = False) -> Response:
    """An error in OpenAI's form, which may `close` the connection."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    line = line[:MAX_LINE].encode(errors="replace").decode()
    error = {"message": line, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error}, status, {"connection": "close"} if close else None)


def refusal(error: Exception) -> Response:
    """The answer to a request that ended in `error`."""
    if isinstance(error, DemixError):
        return refused(str(error).removeprefix("--"), 400)
    if isinstance(error, HTTPException):
        response = refused(error.detail, error.status_code)
        response.headers.update(error.headers or {})
        return response
    if isinstance(error, ClientDisconnect):
        return refused("the sender has left, or was too slow", 408)
    return refused("something went wrong; see the terminal", 500)


async def _answered(request: Request, error: Exception) -> Response:
    return refusal(error)


def request_of(kind: type[T], body: bytes) -> T:
    """The request that a body in JSON holds, in which null stands for a key that is not there.

    Raises DemixError for all else.
    """
    try:
        values = without_null(json.loads(body))
    except (ValueError, RecursionError):
        raise DemixError("request", "is not JSON", "send a JSON object") from None
    if not isinstance(values, dict):
        raise DemixError("request", "is no JSON object", "send one")
    return settings_from(kind, values, "request")


def without_null(value: Any) -> Any:
    """A value of JSON, an object without those of its keys that are null."""
    if isinstance(value, dict):
        return {key: without_null(each) for key, each in value.items() if each is not None}
    return value


def application(routes: Sequence[BaseRoute], offered: str, key: str) -> Guarded:
    """An application of `routes` whose requests have at most MAX_BYTES (`demix.launch.guarded.Guarded`).

    The error for any other request says what is `offered`.
    """

    async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
        raise HTTPException(404, f"{scope['path']!r:.80} is not served here; {offered}")

    handlers: Any = dict.fromkeys((DemixError, HTTPException, ClientDisconnect, Exception), _answered)
    starlette = Starlette(routes=routes, exception_handlers=handlers)
    starlette.router.redirect_slashes, starlette.router.default = False, nothing
    return Guarded(starlette, MAX_BYTES, CONNECTIONS, SENDER_SECONDS, key, refused)


class Connection(H11Protocol):
    """A connection of uvicorn's that ends where the head of a request takes more than HEAD_SECONDS.

    Beyond CONNECTIONS at a time the one that has waited longest for a head is closed; where none waits for a head, the
    answer is 503.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first head, and make place for it."""
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
        """Take bytes, which stop the clock of uvicorn's own method whether or not they end a head."""
        self.conn.receive_data(data)
        self.handle_events()

    def handle_events(self) -> None:
        """Stop the clock once a head has ended."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._unset_keepalive_if_required()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request; an answer may have begun."""
        with suppress(h11.LocalProtocolError):
            super().send_400_response(msg)
        self.transport.close()


def in_url(host: str) -> str:
    """A host as a URL names it."""
    return f"[{host}]" if ":" in host else host


def config_of(app: ASGIApp) -> uvicorn.Config:
    """The settings of a server of `app`, which prints nothing and waits as long as the bounds above say."""
    quiet: Any = {"log_config": None, "log_level": "error", "access_log": False, "server_header": False}
    bounds: Any = {"timeout_keep_alive": HEAD_SECONDS, "timeout_graceful_shutdown": 10}
    return uvicorn.Config(app, http=Connection, ws="none", lifespan="off", proxy_headers=False, **quiet, **bounds)
