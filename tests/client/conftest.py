"""A server that says what the test tells it to, over real sockets and the real codec.

What a healthy service does is tested against the real one (`service`); this is for what a healthy
one never does: breaking off, keeping silent, talking nonsense.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from pinlaterd.client import Client, Handlers, Job, JobRecord, Worker
from pinlaterd.errors import PinLaterError
from pinlaterd.model import Result
from pinlaterd.rpc import codec
from tests.client.either_client import connect
from tests.client.working import have_ended, records_of, running
from tests.conftest import WaitUntil

__all__ = ["connect"]


class BreakOff(Exception):
    """Close the connection instead of answering."""


class SayNothing(Exception):
    """Keep the connection, and its peer waiting."""


Reply = Callable[[codec.Call], Result | bytes]


class ScriptedServer:
    """Answers each call with what `reply` returns or raises; bytes go out as they are."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.calls: list[codec.Call] = []
        self.connections = 0
        self.reply: Reply = lambda call: None
        self._open: list[socket.socket] = []
        self._listener = socket.create_server((host, port))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it was closed within the test
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.close_connections()

    def close_connections(self) -> None:
        for connection in self._open:
            with contextlib.suppress(OSError):  # the client was first
                connection.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as stream:
            while header := stream.read(4):
                call = codec.decode_call(stream.read(int.from_bytes(header, "big")))
                self.calls.append(call)
                try:
                    stream.write(self._answer(call))
                    stream.flush()
                except BreakOff:
                    with contextlib.suppress(OSError):  # the whole server went
                        connection.shutdown(socket.SHUT_RDWR)
                    return
                except SayNothing:
                    pass

    def _answer(self, call: codec.Call) -> bytes:
        try:
            result = self.reply(call)
        except PinLaterError as error:
            message = codec.encode_error(call.head, error)
        else:
            if isinstance(result, bytes):
                return result
            message = codec.encode_reply(call.head, result)
        return len(message).to_bytes(4, "big") + message


@pytest.fixture
def start_server() -> Iterator[Callable[..., ScriptedServer]]:
    started: list[ScriptedServer] = []

    def start(**where: Any) -> ScriptedServer:
        started.append(ScriptedServer(**where))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def server(start_server: Callable[..., ScriptedServer]) -> ScriptedServer:
    return start_server()


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Connections are made and nobody ever reads from them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


@pytest.fixture
def black_hole() -> Iterator[str]:
    """HOST:PORT where connections are neither made nor refused: the listener's queue is full."""
    with contextlib.ExitStack() as open_sockets:
        listener = open_sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listener.getsockname()
        for _ in range(4):
            waiting = open_sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        yield f"127.0.0.1:{address[1]}"


@pytest.fixture
def break_off() -> type[Exception]:
    return BreakOff


@pytest.fixture
def say_nothing() -> type[Exception]:
    return SayNothing


@pytest.fixture
def work_until_ended(client: Client, wait_until: WaitUntil) -> Callable[..., list[JobRecord]]:
    """Have handlers work on jobs of one queue until they have ended; return their records."""

    def work(handlers: Handlers, queue: str, jobs: Iterable[Job]) -> list[JobRecord]:
        descriptors = client.enqueue(queue, jobs)
        with running(Worker(client, handlers, max_wait_ms=100)):
            wait_until(lambda: have_ended(client, descriptors), seconds=60)
        return records_of(client, descriptors)

    return work
