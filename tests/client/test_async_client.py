"""What is asyncio's own: cancelled calls, many calls at a time, loops that come and go.

What AsyncClient has in common with Client is tested with that (`connect`).
"""

from __future__ import annotations

import asyncio
import socket
import threading

import psutil
import pytest

from pinlaterd.client import AsyncClient, JobState
from pinlaterd.model import DequeueResult, Method
from tests.client.scripted_server import BreakOff, SayNothing


async def until(happened: threading.Event) -> None:
    assert await asyncio.to_thread(happened.wait, 60)


async def cancel(call: asyncio.Task) -> None:
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


def test_a_cancelled_call_has_its_connection_closed(server):
    """Its answer is still to come, and must not be taken for that to the next call."""
    asked = threading.Event()

    def first_silent(_call):
        if not asked.is_set():
            asked.set()
            return SayNothing()
        return 7

    server.reply = first_silent

    async def cancel_and_call_again() -> int:
        async with AsyncClient(port=server.port) as client:
            call = asyncio.create_task(client.count("mail", JobState.PENDING))
            await until(asked)
            await cancel(call)
            return await client.count("mail", JobState.PENDING)

    assert asyncio.run(cancel_and_call_again()) == 7
    assert server.connections == 2


def test_a_call_cancelled_in_the_line_leaves_the_line(server):
    holding, release = threading.Event(), threading.Event()

    def hold_dequeues(call):
        if call.head.method_name == Method.DEQUEUE:
            holding.set()
            release.wait(60)
            return DequeueResult([])
        return 7

    server.reply = hold_dequeues

    async def cancel_who_waits() -> int:
        async with AsyncClient(port=server.port, max_connections=1) as client:
            first = asyncio.create_task(client.dequeue("mail", limit=1, max_wait_ms=20_000))
            await until(holding)
            waiting = asyncio.create_task(client.count("mail", JobState.PENDING))
            await asyncio.sleep(0)
            await cancel(waiting)
            release.set()
            assert await first == []
            return await client.count("mail", JobState.PENDING)

    assert asyncio.run(cancel_who_waits()) == 7
    assert server.connections == 1


def test_a_call_cancelled_while_it_connects_leaves_no_socket_behind(black_hole, wait_until):
    port = int(black_hole.rpartition(":")[2])

    def sockets() -> int:
        ends = [each.raddr for each in psutil.Process().net_connections("tcp") if each.raddr]
        return sum(end.port == port for end in ends)

    before = sockets()

    async def cancel_who_connects() -> None:
        patient = AsyncClient(black_hole, timeout_seconds=60, connect_timeout_seconds=60)
        async with patient as client:
            call = asyncio.create_task(client.queue_names())
            await asyncio.to_thread(wait_until, lambda: sockets() > before)
            await cancel(call)
            assert sockets() == before

    asyncio.run(cancel_who_connects())


def test_what_has_not_left_when_a_call_is_cancelled_never_does():
    body = b"x" * (32 << 20)  # more than the system buffers
    with socket.create_server(("127.0.0.1", 0)) as listener:

        async def cancel_who_sends() -> socket.socket:
            async with AsyncClient(port=listener.getsockname()[1]) as client:
                call = asyncio.create_task(client.enqueue("mail", [body]))
                connection, _ = await asyncio.to_thread(listener.accept)
                assert await asyncio.to_thread(connection.recv, 1)
                await cancel(call)
                return connection

        with asyncio.run(cancel_who_sends()) as connection:
            received = 0
            while chunk := connection.recv(1 << 20):
                received += len(chunk)
    assert received < len(body)


def test_a_client_belongs_to_one_loop_and_says_so(server):
    server.reply = lambda _: 1
    client = AsyncClient(port=server.port)

    async def call_and_close() -> int:
        async with client:
            return await client.count("mail", JobState.PENDING)

    async def call() -> int:
        return await client.count("mail", JobState.PENDING)

    assert asyncio.run(call_and_close()) == 1
    with pytest.raises(RuntimeError, match="make one for each"):
        asyncio.run(call())


def test_close_ends_a_probe_that_is_under_way(start_server):
    broken, well = start_server(), start_server()

    broken.reply = lambda _: BreakOff() if len(broken.calls) == 1 else SayNothing()
    well.reply = lambda _: 5

    async def close_while_probing() -> None:
        servers = [f"127.0.0.1:{server.port}" for server in (broken, well)]
        async with AsyncClient(servers, connect_timeout_seconds=3600) as client:
            while len(broken.calls) < 2:
                assert await client.count("mail", JobState.PENDING) == 5
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(close_while_probing())
