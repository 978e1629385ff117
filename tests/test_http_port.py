"""HTTP ports: no client takes them from others, and no web page reads them by a name of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

import pytest
import uvloop
from aiohttp import web

from pinlaterd.http_port import HttpPort, body_of
from tests.deployment import unused_port

HOST = "127.0.0.1"
STEP_SECONDS = 1.5  # no process is held up for so long as it connects
SECONDS = 60.0
LONG_ANSWER_BYTES = 64 * 1024 * 1024
HEAD = f"POST /echo HTTP/1.1\r\nHost: {HOST}\r\n"
GET = f"GET /echo HTTP/1.1\r\nHost: {HOST}\r\n\r\n"
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def on_loop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine on the loop that our processes have."""

    @functools.wraps(test)
    def run(**arguments: object) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(**arguments))

    return run


class Served:
    def __init__(self, port: int) -> None:
        self.port = port
        self.working = asyncio.Semaphore(0)  # released by each slow request that has arrived
        self.finish = asyncio.Event()

    async def echo(self, request: web.Request) -> web.Response:
        return web.Response(body=bytes(await body_of(request)) or b"nothing")

    async def slow(self, _request: web.Request) -> web.Response:
        self.working.release()
        await self.finish.wait()
        return web.Response(text="done")

    async def long(self, _request: web.Request) -> web.Response:
        return web.Response(body=bytes(LONG_ANSWER_BYTES))

    async def connect(self, text: str = "") -> Ends:
        reader, writer = await asyncio.open_connection(HOST, self.port)
        writer.write(text.encode())
        return reader, writer

    async def ask(self, text: str) -> str:
        """Return the status line and the rest of a whole answer; "" if there is none."""
        reader, writer = await self.connect(
            text.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n")
        )
        with contextlib.closing(writer):
            return (await ended(reader)).decode()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server ends the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(SECONDS):
            while data := await reader.read(65536):
                found += data
    return found


@contextlib.asynccontextmanager
async def served(
    names: Sequence[str] = (),
    most: int = 50,
    step_seconds: float = SECONDS,
    most_buffered_bytes: int = 1_000_000,
) -> AsyncIterator[Served]:
    found = Served(unused_port())
    application = web.Application()
    application.router.add_route("*", "/echo", found.echo)
    application.router.add_get("/slow", found.slow)
    application.router.add_get("/long", found.long)
    port = HttpPort(
        application,
        lambda: names,
        most_connections=most,
        step_seconds=step_seconds,
        most_buffered_bytes=most_buffered_bytes,
        ends_with_client=True,
    )
    await port.listen(HOST, found.port)
    try:
        yield found
    finally:
        found.finish.set()
        await port.stop()


@pytest.mark.parametrize("sent", ["", "GET /ec", HEAD, GET, GET + "GET /ec"])
@on_loop
async def test_who_does_not_go_on_is_closed(sent):
    async with served(step_seconds=STEP_SECONDS) as port:
        reader, writer = await port.connect(sent)
        with contextlib.closing(writer):
            found = await ended(reader)

    assert (b"200 OK" in found) == sent.startswith(GET)


@on_loop
async def test_a_body_that_stops_is_refused():
    async with served(step_seconds=STEP_SECONDS) as port:
        found = await port.ask(HEAD + "Content-Length: 9\r\n\r\nhalf")

    assert found.startswith("HTTP/1.1 408 ")
    assert f"did not come within {STEP_SECONDS} s" in found


@on_loop
async def test_who_does_not_take_the_answer_is_closed():
    async with served(step_seconds=STEP_SECONDS) as port:
        reader, writer = await port.connect(GET.replace("echo", "long"))
        with contextlib.closing(writer):
            await asyncio.sleep(2 * STEP_SECONDS)  # in which it takes nothing
            found = await ended(reader)

    assert 0 < len(found) < LONG_ANSWER_BYTES


@on_loop
async def test_an_answer_may_take_long():
    async with served(step_seconds=STEP_SECONDS) as port:
        asking = asyncio.create_task(port.ask(GET.replace("echo", "slow")))
        await port.working.acquire()
        await asyncio.sleep(2 * STEP_SECONDS)
        port.finish.set()

        assert "done" in await asking


@on_loop
async def test_a_connection_serves_one_request_after_another():
    async with served() as port:
        reader, writer = await port.connect()
        with contextlib.closing(writer):
            for text in ("one", "two"):
                writer.write(f"{HEAD}Content-Length: 3\r\n\r\n{text}".encode())
                assert await reader.readuntil(text.encode())


@on_loop
async def test_half_requests_keep_nobody_out():
    """Also while those that were closed come again."""
    async with served(most=20) as port:
        asking = asyncio.create_task(port.ask(GET.replace("echo", "slow")))
        await port.working.acquire()
        held = [await port.connect("GET /ec") for _ in range(100)]
        answers = [await port.ask(GET) for _ in range(3)]
        port.finish.set()

        assert [answer[:12] for answer in answers] == ["HTTP/1.1 200"] * 3
        assert "done" in await asking  # what is being answered goes on
        assert await ended(held[0][0]) == b""
        for _, writer in held:
            writer.close()


@on_loop
async def test_a_port_that_is_full_of_work_refuses():
    async with served(most=2) as port:
        busy = [asyncio.create_task(port.ask(GET.replace("echo", "slow"))) for _ in range(2)]
        for _ in busy:
            await port.working.acquire()

        assert await port.ask(GET) == ""
        port.finish.set()
        assert ["done" in answer for answer in await asyncio.gather(*busy)] == [True, True]
        assert "200 OK" in await port.ask(GET)


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1:9999", True),
        ("10.1.2.3", True),
        ("[::1]:9999", True),
        ("localhost:9999", True),
        (socket.gethostname(), True),
        (f"{socket.gethostname().upper()}:9999", True),
        ("jobs-1.example:9999", True),
        ("Jobs-1.Example.", True),
        ("", True),  # no browser leaves it out
        ("evil.example", False),
        ("evil.example:9999", False),
        ("127.0.0.1.evil.example", False),
        ("jobs-1.example.evil.example", False),
        ("localhost.evil.example", False),
        ("[evil.example]", False),
        ("1.2.3.4@evil.example", False),
    ],
)
@on_loop
async def test_only_names_of_this_server_are_answered(host, is_ours):
    async with served(names=["jobs-1.example", ""]) as port:
        found = await port.ask(GET.replace(f"Host: {HOST}", f"Host: {host}"))

    assert found.startswith("HTTP/1.1 200 " if is_ours else "HTTP/1.1 421 ")
    assert is_ours or "http_hosts" in found


@on_loop
async def test_each_of_several_host_lines_counts():
    async with served() as port:
        found = await port.ask(GET.replace("\r\n\r\n", "\r\nHost: evil.example\r\n\r\n"))

    assert "200 OK" not in found


@on_loop
async def test_bodies_together_take_bounded_room():
    async with served(most_buffered_bytes=1000) as port:
        _, writer = await port.connect(HEAD + "Content-Length: 900\r\n\r\n" + 600 * "x")
        with contextlib.closing(writer):
            await port.ask(GET)  # the other was read by now
            refused = await port.ask(HEAD + "Content-Length: 600\r\n\r\n" + 600 * "y")
        await port.ask(GET)
        taken = await port.ask(HEAD + "Content-Length: 600\r\n\r\n" + 600 * "z")

    assert refused.startswith("HTTP/1.1 503 ")
    assert "Retry-After: 1" in refused
    assert 600 * "z" in taken
