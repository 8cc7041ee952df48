"""Requests to the playground, as its page sends them."""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from demix.generate.playground.answers import opened
from demix.generate.playground.server import Playground


@contextmanager
def served(model: Path) -> Iterator[Playground]:
    """The playground of a model's folder, which answers until the context ends."""
    server = Playground(opened(model, None), 0)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(
    server: Playground, method: str, path: str, body: object = None, **headers: str | None
) -> tuple[int, str, dict]:
    """Status, text and headers of the answer to a request as the page sends it, but for `headers` (None: left out)."""
    own = f"127.0.0.1:{server.server_port}"
    sent = {"Host": own, "Origin": f"http://{own}", "Content-Type": "application/json"}
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    sent |= {"Content-Length": str(len(content))} if method == "POST" else {}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in sent.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(content)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.headers)
