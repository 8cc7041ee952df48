"""`demix serve` in a thread of this process, and the openai client."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import openai
import uvicorn

from demix.generate.completions import Opened
from demix.generate.server import place_of, server_of

PROMPT = "Zoë’s naïve café – 東京 is where the committee of the House met."


@contextmanager
def running(server: uvicorn.Server) -> Iterator[int]:
    """A server in a thread of this process, and its port."""
    with place_of("127.0.0.1", 0) as place:
        thread = Thread(target=server.run, kwargs={"sockets": [place]})
        thread.start()
        try:
            yield place.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def serving(model: Opened, key: str = "") -> Iterator[str]:
    with running(server_of(model, key)) as port:
        yield f"http://127.0.0.1:{port}"


def client_of(address: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=60)


def asked(address: str, prompt: object = PROMPT, model: str = "demix", **more: object) -> openai.types.Completion:
    """The answer to the openai client; what it does not know itself goes into the body as it is."""
    body = {name: more.pop(name) for name in ("experts", "weights", "by_expert", "more") if name in more}
    return client_of(address).completions.create(model=model, prompt=prompt, extra_body=body, **more)
