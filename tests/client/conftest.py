"""Servers that answer, keep silent or are not there, and workers that work."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from pinlaterd.client import Client, Handlers, Job, JobRecord, Worker
from tests.client.either_client import connect
from tests.client.scripted_server import ScriptedServer
from tests.client.working import have_ended, records_of, running
from tests.conftest import WaitUntil

__all__ = ["connect"]


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
def work_until_ended(client: Client, wait_until: WaitUntil) -> Callable[..., list[JobRecord]]:
    """Have handlers work on jobs of one queue until they have ended; return their records."""

    def work(handlers: Handlers, queue: str, jobs: Iterable[Job]) -> list[JobRecord]:
        descriptors = client.enqueue(queue, jobs)
        with running(Worker(client, handlers, max_wait_ms=100)):
            wait_until(lambda: have_ended(client, descriptors), seconds=60)
        return records_of(client, descriptors)

    return work
