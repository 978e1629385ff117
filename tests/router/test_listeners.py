"""Listening sockets that pass from one process to another."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from pinlaterd.wire import listeners
from pinlaterd.wire.listeners import Offer, is_offered, take_listeners

ADDRESS = "127.0.0.1:9010"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(listeners, "_ANSWER_SECONDS", 60.0)
    return Path("r.listener")  # short, as Unix sockets need it


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


async def _taken(path: Path, address: str) -> list[socket.socket]:
    loop = asyncio.get_running_loop()
    return list(await loop.run_in_executor(None, partial(take_listeners, path, address)))


def test_what_waits_in_the_queue_passes_with_the_socket(path: Path, listening: socket.socket):
    async def hand_over() -> list[socket.socket]:
        offer = Offer(path, ADDRESS, [listening])
        offer.start()
        taken = await _taken(path, ADDRESS)
        offer.stop()
        return taken

    with socket.create_connection(listening.getsockname()) as client:
        (taken,) = asyncio.run(hand_over())
        listening.close()
        accepted, _ = taken.accept()
        with taken, accepted:
            accepted.sendall(b"served")
            assert client.recv(16) == b"served"


def test_a_socket_of_another_address_is_not_taken(path: Path, listening: socket.socket):
    address = listening.getsockname()

    async def ask() -> list[socket.socket]:
        with contextlib.closing(listening):
            offer = Offer(path, ADDRESS, [listening])
            offer.start()
            taken = await _taken(path, "127.0.0.1:9011")
            offer.stop()
            return taken

    assert asyncio.run(ask()) == []
    with pytest.raises(ConnectionRefusedError):  # nobody kept it open
        socket.create_connection(address)


def test_nobody_is_there(path: Path):
    assert take_listeners(path, ADDRESS) == []
    assert not is_offered(path)

    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))

    assert take_listeners(path, ADDRESS) == []
    assert not is_offered(path)


def test_an_offer_replaces_what_a_killed_process_left(path: Path, listening: socket.socket):
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))

    async def offered() -> list[bool]:
        offer = Offer(path, ADDRESS, [listening])
        offer.start()
        during = is_offered(path)
        offer.stop()
        return [during, is_offered(path)]

    assert asyncio.run(offered()) == [True, False]
