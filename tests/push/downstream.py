"""A downstream: an HTTP server of the standard library that notes what it is sent."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Received(NamedTuple):
    """A request as a downstream saw it."""

    path: str
    headers: Mapping[str, str]
    raw: bytes
    at: float  # monotonic seconds

    @property
    def body(self) -> Any:
        return json.loads(self.raw)


class Reply(NamedTuple):
    """An answer: `body` as JSON, or bytes as they are. `status` 0: the connection is dropped."""

    status: int = 202
    body: object = b""
    headers: Mapping[str, str] = {}


Act = Callable[[Received], Reply | None]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def handle_error(self, *_: object) -> None:
        """A client that has gone is none of the test's business."""


class Downstream:
    """`act` says what each request is answered with; it may take its time."""

    def __init__(self, act: Act, port: int, host: str = "127.0.0.1") -> None:
        self.act = act
        self.received: list[Received] = []
        downstream = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                raw, at = self.rfile.read(length), time.monotonic()
                downstream._answer(self, Received(self.path, dict(self.headers), raw, at))

            def log_message(self, *_: object) -> None:
                """Nothing is logged."""

        self._server = _Server((host, port), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"

    def _answer(self, handler: BaseHTTPRequestHandler, received: Received) -> None:
        self.received.append(received)
        reply = self.act(received) or Reply()
        if not reply.status:
            handler.close_connection = True
            return
        content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        with suppress(OSError):
            handler.send_response(reply.status)
            for name, value in reply.headers.items():
                handler.send_header(name, value)
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content)


@contextmanager
def downstream(
    act: Act = lambda _: None, *, port: int = 0, host: str = "127.0.0.1"
) -> Iterator[Downstream]:
    """A downstream that serves on a port of `host`; 0: a free one."""
    made = Downstream(act, port, host)
    thread = threading.Thread(target=made._server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made._server.shutdown()
        made._server.server_close()
        thread.join()
