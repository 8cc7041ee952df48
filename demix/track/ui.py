"""MLflow's server for this machine's browser alone; `make ui` starts it by `mlflow server --app-name demix`."""

import asyncio
import os
from urllib.parse import quote

from mlflow.server.fastapi_app import app as mlflow_app
from mlflow.tracking import MlflowClient
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# MLflow holds a whole request in memory. The largest requests of `track` are a figure and a table.
MOST_BYTES = 256 << 20
MOST_BODIES = 4
# A request with a body waits so long in all for the other side to send or to take bytes.
SECONDS = 60.0


class Guarded:
    """An application that serves its own pages alone, and at most so many request bodies of at most `most` bytes.

    The answer is 403 to a request for another host or by a page of another origin, whatever the path, and 413 to a
    body of more bytes, with or without a Content-Length. At most `bodies` requests with a body are under way at a time;
    others wait. Such a request ends after `seconds` of waiting for its sender.
    """

    def __init__(self, app: ASGIApp, most: int, bodies: int, seconds: float):
        self.app, self.most, self.seconds = app, most, seconds
        self.places = asyncio.Semaphore(bodies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        named = [(name, value.decode("latin-1")) for name, value in scope["headers"]]
        hosts, origins = ([value for name, value in named if name == wanted] for wanted in (b"host", b"origin"))
        own = {f"{name}:{scope['server'][1]}" for name in ("127.0.0.1", "localhost")}
        if len(hosts) != 1 or not own.issuperset(hosts) or not {f"http://{host}" for host in own}.issuperset(origins):
            await PlainTextResponse("only this server's own pages are served", 403)(scope, receive, send)
            return
        headers = dict(named)
        # The server in front refuses a length that is no number.
        length = int(headers.get(b"content-length", "0"))
        if length > self.most:
            await PlainTextResponse(self._too_much, 413)(scope, receive, send)
        elif length or b"transfer-encoding" in headers:
            async with self.places:
                await self._with_body(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    @property
    def _too_much(self) -> str:
        return f"a request has at most {self.most} bytes"

    async def _with_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        left, received, whole, refused = self.seconds, 0, False, False
        clock = asyncio.get_running_loop().time

        async def counted() -> Message:
            nonlocal left, received, whole
            if whole:
                return await receive()
            start = clock()
            try:
                async with asyncio.timeout(left):
                    message = await receive()
            except TimeoutError:
                message = {"type": "http.disconnect"}
            left -= clock() - start
            whole = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > self.most:
                raise HTTPException(413, self._too_much)
            return message

        async def answered(message: Message) -> None:
            nonlocal left, refused
            # MLflow turns the exception into an internal error (500), which must not reach the client.
            if received > self.most and message["type"] == "http.response.start":
                refused = True
                await PlainTextResponse(self._too_much, 413)(scope, receive, send)
            elif not refused:
                start = clock()
                async with asyncio.timeout(left):
                    await send(message)
                left -= clock() - start

        await self.app(scope, counted, answered)


def links(uri: str, address: str) -> list[str]:
    """One line per experiment of the store at `uri`: its runs, and the curves of all its models side by side."""
    filtered = quote("tags.`demix.kind` = 'training'", safe="")
    # In order of time MLflow would show the models below the whole run, folded away.
    query = f"searchFilter={filtered}&orderByKey={quote('tags.`mlflow.runName`', safe='')}&compareRunsMode=CHART"
    lines = []
    for one in MlflowClient(tracking_uri=uri).search_experiments():
        # MLflow makes this one by itself.
        if one.name != "Default":
            runs = f"{address}/#/experiments/{one.experiment_id}/runs"
            lines.append(f"{one.name}: runs {runs}, models {runs}?{query}")
    return lines


def app() -> Guarded:
    """What `mlflow server` serves. Prints the links of the store in the variable URI, which it is about to serve."""
    print(*links(os.environ["URI"], f"http://127.0.0.1:{os.environ['PORT']}"), sep="\n", flush=True)
    return Guarded(mlflow_app, MOST_BYTES, MOST_BODIES, SECONDS)
