"""A Client that a process made before it forked serves both the parent and the child."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from pinlaterd.client import Client, JobState


def in_child(work: Callable[[], object]) -> str:
    """Fork; return what `work` returned, or raised, in the child."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = repr(work())
        except BaseException as error:  # noqa: BLE001 - the parent's test says what it is
            said = f"raised {error!r}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


@pytest.fixture
def client(server):
    with Client(port=server.port, max_connections=1) as client:
        yield client


def test_parent_and_child_use_connections_of_their_own(server, client):
    server.reply = lambda _: 7
    client.count("mail", JobState.PENDING)

    assert in_child(lambda: client.count("mail", JobState.PENDING)) == "7"
    assert server.connections == 2
    assert client.count("mail", JobState.PENDING) == 7
    assert server.connections == 2  # the parent's first one is as good as before


def test_a_call_under_way_when_the_parent_forks_is_the_parents_alone(server, client):
    is_held, release = threading.Event(), threading.Event()

    def hold_the_first(_call):
        if len(server.calls) == 1:
            is_held.set()
            release.wait(60)
            return 1
        return 2

    server.reply = hold_the_first
    counts: list[int] = []
    caller = threading.Thread(target=lambda: counts.append(client.count("mail", JobState.PENDING)))
    caller.start()
    assert is_held.wait(60)

    # Its only connection is lent, to a thread that the child does not have.
    assert in_child(lambda: client.count("mail", JobState.PENDING)) == "2"
    release.set()
    caller.join()
    assert counts == [1]


def test_a_closed_client_is_closed_in_the_child_too(client):
    client.close()

    assert "this client was closed" in in_child(client.queue_names)
