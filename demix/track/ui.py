"""MLflow's server with requests of bounded size; `make ui` starts it by `mlflow server --app-name demix`."""

from mlflow.server.fastapi_app import app as mlflow_app
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# MLflow holds a whole request in memory. The largest requests of `track` are a figure and a table.
MOST_BYTES = 256 << 20


class Bounded:
    """An application that answers 413 to a request of more than `most` bytes, with or without a Content-Length."""

    def __init__(self, app: ASGIApp, most: int):
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        too_much = f"a request has at most {self.most} bytes"
        # The server in front refuses a length that is no number.
        if int(dict(scope["headers"]).get(b"content-length", b"0")) > self.most:
            await PlainTextResponse(too_much, 413)(scope, receive, send)
            return
        received, refused = 0, False

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.most:
                raise HTTPException(413, too_much)
            return message

        async def answered(message: Message) -> None:
            nonlocal refused
            # MLflow turns the exception into an internal error (500), which must not reach the client.
            if received > self.most and message["type"] == "http.response.start":
                refused = True
                await PlainTextResponse(too_much, 413)(scope, receive, send)
            elif not refused:
                await send(message)

        await self.app(scope, counted, answered)


app = Bounded(mlflow_app, MOST_BYTES)
