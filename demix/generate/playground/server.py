"""The HTTP server of the page and its three requests, for browsers on this machine only."""

import base64
import hashlib
import io
import json
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Any, cast

from demix.errors import DemixError
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
from demix.settings import settings_from

PAGE = Path(__file__).with_name("page.html")
MOST_BYTES = 256 << 10
# The server reads up to this many bytes of a body that is too long: otherwise the browser sees no answer.
DRAINED_BYTES = 4 << 20
CONNECTIONS = 32
# A request waits so long in all for the other side to send or to take bytes.
SECONDS = 20
# An error may quote the request, so its line is cut to this length.
MOST_LINE = 300


class Playground(ThreadingHTTPServer):
    """The server for one model, on 127.0.0.1 only. With `port` 0 the system chooses a free port."""

    daemon_threads = True

    def __init__(self, model: Opened, port: int):
        self.model = model
        self.page = PAGE.read_bytes()
        self.policy = content_policy(self.page.decode())
        self.drawing, self._places = Lock(), BoundedSemaphore(CONNECTIONS)
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            raise DemixError(f"--port {port}", f"cannot be used ({error.strerror})", "give another port") from None
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer each request in its own thread. A connection beyond CONNECTIONS at a time is closed."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request as the base class does, then free its connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error to the terminal, unless a browser closed the connection."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Connection(io.RawIOBase):
    """The bytes of a connection. Raises TimeoutError once its reads and writes took so many seconds in all."""

    def __init__(self, connection: socket.socket, seconds: float):
        self._connection, self._left = connection, seconds

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what is there, waiting for the first byte."""
        with self._waiting():
            return self._connection.recv_into(buffer)

    def write(self, data: Any) -> int:
        """Write all of `data`."""
        with self._waiting():
            self._connection.sendall(data)
        return len(data)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.monotonic()
        # A limit of zero would mean not to wait.
        self._connection.settimeout(max(self._left, 0.001))
        try:
            yield
        finally:
            self._left -= time.monotonic() - start


class RefusedError(Exception):
    """A request that the server refuses with a status and one line of text."""

    def __init__(self, status: int, line: str):
        self.status, self.line = status, line
        super().__init__(line)


class Handler(BaseHTTPRequestHandler):
    """Handles one request. The end of the connection ends an answer of unknown length, as in HTTP/1.0."""

    server: Playground
    server_version, sys_version = "demix", ""
    _begun = False

    def setup(self) -> None:
        """Limit the time of all reads and writes together: that of each would let a slow sender stay for hours."""
        self.connection = self.request
        limited = _Connection(self.connection, SECONDS)
        self.rfile = io.BufferedReader(limited)
        # The base class writes without a buffer, too.
        self.wfile = cast(io.BufferedIOBase, limited)

    def do_GET(self) -> None:
        """Send the page, or the facts about the model."""
        self._answered(self._get)

    def do_POST(self) -> None:
        """Answer a request of the page."""
        self._answered(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because requests contain private texts."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send one line where the base class, which refuses malformed requests itself, would send a page."""
        self._send(code, "text/plain; charset=utf-8", f"{message or 'refused'}\n".encode())

    def _answered(self, answer: Callable[[], None]) -> None:
        try:
            # Another host name may resolve to 127.0.0.1 (DNS rebinding), so only the server's own names pass.
            hosts = self.headers.get_all("Host", [])
            if len(hosts) != 1 or hosts[0] not in self.server.hosts:
                raise RefusedError(403, f"open {self.server.address}")
            answer()
        except RefusedError as error:
            self._send(error.status, "text/plain; charset=utf-8", f"{error.line}\n".encode())
        except DemixError as error:
            line = f"{error.subject} {error.cause}; {error.cure}"
            self._send(400, "text/plain; charset=utf-8", f"{line[:MOST_LINE]}\n".encode(errors="replace"))
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception:
            if not self._begun:
                self._send(500, "text/plain; charset=utf-8", b"something went wrong; see the terminal\n")
            raise

    def _get(self) -> None:
        if self.path == "/":
            self._send(200, "text/html; charset=utf-8", self.server.page)
        elif self.path == "/model":
            self._send_json(model_facts(self.server.model))
        else:
            raise RefusedError(404, "there is nothing here")

    def _post(self) -> None:
        body = self._body()
        if self.headers.get("Origin") not in {f"http://{host}" for host in self.server.hosts}:
            raise RefusedError(403, "requests are accepted from this page only")
        if self.headers.get_content_type() != "application/json":
            raise RefusedError(415, "send application/json")
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            raise RefusedError(400, "the request is not JSON") from None
        model = self.server.model
        if self.path == "/analyse":
            self._send_json(analyse(model, settings_from(MixRequest, _mapping(asked), "request")))
        elif self.path == "/eval":
            self._send_json(judged(model, settings_from(TextRequest, _mapping(asked), "request")))
        elif self.path == "/generate":
            drawing = settings_from(DrawRequest, _mapping(asked), "request")
            if not self.server.drawing.acquire(timeout=1):
                raise RefusedError(429, "another text is being generated; stop it first")
            try:
                self._stream(draw(model, drawing))
            finally:
                self.server.drawing.release()
        else:
            raise RefusedError(404, "there is nothing here")

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,18}", length) or "Transfer-Encoding" in self.headers:
            raise RefusedError(411, "send the length of the request")
        if int(length) > MOST_BYTES:
            left = min(int(length), DRAINED_BYTES)
            while left and (piece := self.rfile.read(min(left, 1 << 16))):
                left -= len(piece)
            raise RefusedError(413, f"a request has at most {MOST_BYTES} bytes")
        return self.rfile.read(int(length))

    def _stream(self, values: Iterator[dict[str, Any]]) -> None:
        """Send one line of JSON per value, as soon as the value is there."""
        self._head(200, "application/x-ndjson")
        for value in values:
            self.wfile.write(json.dumps(value, allow_nan=False).encode() + b"\n")

    def _send_json(self, value: dict[str, Any]) -> None:
        self._send(200, "application/json", json.dumps(value, allow_nan=False).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self._head(status, kind, len(body))
        self.wfile.write(body)

    def _head(self, status: int, kind: str, length: int | None = None) -> None:
        self._begun = True
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Security-Policy": self.server.policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
            "Connection": "close",
        }
        if length is not None:
            headers["Content-Length"] = str(length)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


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


def _mapping(asked: Any) -> dict[str, Any]:
    if not isinstance(asked, dict):
        raise RefusedError(400, "the request is no JSON object")
    return asked


def serve(server: Playground) -> None:
    """Answer requests until Ctrl-C."""
    print(f"{server.model.directory}: {server.address} (stop it with Ctrl-C)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print(f"{server.address}: stopped")
    finally:
        server.server_close()
