"""A web server on loopback that answers as a test says, and one of a folder's files."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer

# What is sent for the request of a handler, which has this number among all, from 1.
Answer = Callable[["Handler", int], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        site: Site = self.server.site
        with site.lock:
            site.requests.append({key.lower(): value for key, value in self.headers.items()})
            number = len(site.requests)
        self.close_connection = True
        site.answer(self, number)

    def send(self, data: bytes, status: int = 200, stop: int | None = None, **headers: str | None) -> None:
        """Answer with `data`, of which `stop` bytes are sent before the connection closes; None leaves out a header."""
        self.send_response(status)
        for name, value in ({"ETag": '"one"', "Content_Length": str(len(data))} | headers).items():
            if value is not None:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data[:stop])

    def end_headers(self) -> None:
        """Say that the connection closes, else a client may ask again on it just as it does."""
        self.send_header("Connection", "close")
        super().end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """As HTTPServer's, without its look-up of the host's name, which takes seconds where there is no network."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address


@dataclass
class Site:
    """The address, what answers, and the headers of each request so far; `over` is set when the server ends."""

    address: str
    answer: Answer | None
    requests: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serving(answer: Answer | None, handler: Callable[..., BaseHTTPRequestHandler] = Handler) -> Iterator[Site]:
    server = Server(("127.0.0.1", 0), handler)
    server.site = Site(f"http://127.0.0.1:{server.server_port}", answer)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server.site
    finally:
        server.site.over.set()
        server.shutdown()
        server.server_close()


@contextmanager
def serving_folder(folder: Path) -> Iterator[str]:
    """The address of the files of a folder."""
    with serving(None, functools.partial(SimpleHTTPRequestHandler, directory=str(folder))) as site:
        yield site.address
