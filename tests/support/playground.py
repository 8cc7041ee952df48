"""Requests to the playground, as its page sends them."""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from demix.generate.completions import Opened, opened
from demix.generate.server import server_of
from support.serving import running


@dataclass
class Playground:
    """A playground that answers at a port."""

    model: Opened
    port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"


@contextmanager
def served(model: Path) -> Iterator[Playground]:
    """The playground of a model's folder, which answers until the context ends."""
    one = opened(model)
    with running(server_of(one, "")) as port:
        yield Playground(one, port)


def ask(
    server: Playground, method: str, path: str, body: object = None, **headers: str | None
) -> tuple[int, str, http.client.HTTPMessage]:
    """Status, text and headers of the answer to a request as the page sends it, but for `headers` (None: left out)."""
    own = f"127.0.0.1:{server.port}"
    sent = {"Host": own, "Origin": f"http://{own}", "Content-Type": "application/json"}
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    sent |= {"Content-Length": str(len(content))} if method == "POST" else {}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in sent.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(content)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.headers
