"""An S3 server of moto's in a thread: it counts requests, and fails as told."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "pages"
SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"

Start = Callable[[str, list[tuple[str, str]]], object]


class S3Server:
    """What it was asked (method, path) stands in `requests`; `busy` answers are 503s first.

    `denied` are methods that are answered by 403.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.busy = 0
        self.denied: frozenset[str] = frozenset()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.port}"

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        if self.busy > 0:
            self.busy -= 1
            return _refusal("503 Slow Down", SLOW_DOWN, environ, start)
        if method in self.denied:
            return _refusal("403 Forbidden", DENIED, environ, start)
        answer: Iterable[bytes] = self._app(environ, start)
        return answer

    def count(self, method: str, ending: str = "") -> int:
        """How many requests of this kind there were for a path that ends so."""
        return sum(each[0] == method and each[1].endswith(ending) for each in list(self.requests))

    def environment(self) -> dict[str, str]:
        """What leads a client here."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()


def _refusal(status: str, body: bytes, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server with an empty bucket; this process and its children are led to it."""
    import boto3

    server = S3Server()
    server.start()
    before = dict(os.environ)
    os.environ.update(server.environment())
    try:
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield server
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.stop()
