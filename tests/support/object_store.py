"""A server of S3 on loopback, of moto, whose answers a test may break."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import boto3
import requests
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

KEY, SECRET = "AKIAHUNTER2HUNTER222", "hunter2/secret+key"


@dataclass
class ObjectStore:
    """The address, and the method and the range of each request for the bucket `corpus` so far.

    A request with a range that is `broken` gets the status 403.
    """

    address: str
    asked: list[tuple[str, str]] = field(default_factory=list)
    broken: Callable[[str], bool] = lambda _: False

    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.address,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )

    def put(self, files: Mapping[str, bytes]) -> None:
        """Put these files into the bucket `corpus`."""
        client = self.client()
        for name, data in files.items():
            client.put_object(Bucket="corpus", Key=name, Body=data)

    def refuse_keys(self) -> None:
        """From now on take the keys of known users alone; there are none."""
        requests.post(f"{self.address}/moto-api/reset-auth", data=b"0", timeout=10).raise_for_status()

    def reset(self) -> None:
        """Empty the store but for a bucket `corpus`, and take any key."""
        self.broken = lambda _: False
        requests.post(f"{self.address}/moto-api/reset-auth", data=b"inf", timeout=10).raise_for_status()
        requests.post(f"{self.address}/moto-api/reset", timeout=10).raise_for_status()
        self.client().create_bucket(Bucket="corpus")
        self.asked.clear()


@contextmanager
def serving_store() -> Iterator[ObjectStore]:
    moto = DomainDispatcherApplication(create_backend_app)

    def answered(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        if not environ["PATH_INFO"].startswith("/corpus"):
            return moto(environ, start)
        span = environ.get("HTTP_RANGE", "")
        store.asked.append((environ["REQUEST_METHOD"], span))
        if not store.broken(span):
            return moto(environ, start)
        start("403 Forbidden", [("Content-Length", "0")])
        return []

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = make_server("127.0.0.1", 0, answered, threaded=True)
    store = ObjectStore(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
