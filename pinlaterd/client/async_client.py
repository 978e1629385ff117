"""The operations as coroutines: the parameters, errors and promises of Client's methods.

A call that is cancelled may have been carried out, like one that ends with OutcomeUnknown.
"""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from pinlaterd.client import calls
from pinlaterd.client.addresses import Address, Endpoint
from pinlaterd.client.calls import PreparedCall
from pinlaterd.client.pool import (
    RECEIVE_BYTES,
    BaseClient,
    Connection,
    answer_length,
    call_failed,
    new_socket,
    seconds_left,
)
from pinlaterd.model import JobRecord, ScanResult

P = ParamSpec("P")
T = TypeVar("T")


def _operation(
    prepare: Callable[P, PreparedCall[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    async def operation(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.run(prepare(*args, **kwargs))

    return calls.as_operation(operation, prepare)


def _paged_operation(
    prepare: Callable[P, PreparedCall[ScanResult]],
) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[JobRecord]]:
    """With a call for each page, as far as its caller reads."""

    async def operation(
        self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncIterator[JobRecord]:
        call: PreparedCall[ScanResult] | None = prepare(*args, **kwargs)
        while call is not None:
            page = await self.run(call)
            for job in page.jobs:
                yield job
            call = calls.page_after(call, page)

    return calls.as_operation(operation, prepare)


class AsyncClient(BaseClient["_StreamConnection"]):
    """A client of one service; any number of tasks may share it, all of one event loop.

    Each call takes a connection from a pool of `max_connections`, so more calls than that at a time
    wait for each other.
    """

    _free: asyncio.BoundedSemaphore
    _loop: asyncio.AbstractEventLoop | None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Calls under way finish; later ones raise ConnectionFailed."""
        self._close()
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        await asyncio.sleep(0)  # the loop ends in its next turn what was closed in this one

    create_queue = _operation(calls.create_queue)
    delete_queue = _operation(calls.delete_queue)
    queue_names = _operation(calls.queue_names)

    enqueue = _operation(calls.enqueue)
    dequeue = _operation(calls.dequeue)
    ack = _operation(calls.ack)
    checkpoint = _operation(calls.checkpoint)

    lookup = _operation(calls.lookup)
    count = _operation(calls.count)
    scan = _paged_operation(calls.scan)
    retry_failed = _operation(calls.retry_failed)
    delete_jobs = _operation(calls.delete_jobs)

    async def run(self, call: PreparedCall[T]) -> T:
        """Make a call and return its result; what the methods above do."""
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            raise RuntimeError(
                "this AsyncClient belongs to the event loop of its first call; make one for each"
            )
        return await self._run(call)

    # --- waiting in the loop --------------------------------------------------------------

    def _begin(self) -> None:
        super()._begin()
        self._free = asyncio.BoundedSemaphore(self._max_connections)
        self._probes: set[asyncio.Task[None]] = set()
        self._loop = None

    async def _take_place(self, deadline: float) -> None:
        if not self._free.locked():  # then there is nothing to wait for
            await self._free.acquire()
            return
        async with asyncio.timeout(deadline - time.monotonic()):
            await self._free.acquire()

    async def _result_of(self, future: Future[T], deadline: float) -> T:
        if not future.done():
            async with asyncio.timeout(deadline - time.monotonic()):
                await asyncio.wrap_future(future)
        return future.result()

    async def _open(
        self, server: Address, endpoint: Endpoint, deadline: float
    ) -> _StreamConnection:
        tls = self._ssl
        plain = new_socket(endpoint)
        try:
            plain.setblocking(False)
            async with asyncio.timeout(seconds_left(deadline)):
                await asyncio.get_running_loop().sock_connect(plain, endpoint.where)
                reader, writer = await asyncio.open_connection(
                    sock=plain,
                    limit=RECEIVE_BYTES,
                    ssl=tls,
                    server_hostname=server.host if tls else None,
                )
            return _StreamConnection(server, reader, writer)
        except BaseException:
            plain.close()
            raise

    def _start_probe(self, server: Address) -> None:
        probe = asyncio.create_task(self._probe(server), name=f"probe-{server}")
        self._probes.add(probe)
        probe.add_done_callback(self._probes.discard)


class _StreamConnection(Connection):
    """What asyncio was given to send leaves later, and goes on leaving when nobody waits for it any
    more. So a call that failed or was cancelled must have its connection closed at once, which
    drops what has not left."""

    def __init__(
        self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.address = address
        self._reader, self._writer = reader, writer
        self._is_tls = writer.get_extra_info("ssl_object") is not None
        self._poll = select.poll()
        self._poll.register(writer.get_extra_info("socket").fileno(), select.POLLIN)
        # With nothing below the mark, `drain` ends when all has left.
        writer.transport.set_write_buffer_limits(high=0)

    def close(self) -> None:
        """What has not left yet never does."""
        self._writer.transport.abort()

    def is_stale(self) -> bool:
        """Whether the server closed it, seen by the loop or not yet."""
        if self._reader.at_eof() or self._writer.is_closing():
            return True
        if self._is_tls:  # what is there to be read may be TLS's own
            return False
        return bool(self._poll.poll(0))

    async def call(self, message: bytes, *, deadline: float) -> bytes:
        may_have_left = False
        try:
            async with asyncio.timeout(seconds_left(deadline)):
                may_have_left = self._is_tls  # which has buffers of its own
                self._writer.write(len(message).to_bytes(4, "big") + message)
                await self._writer.drain()
                may_have_left = True
                length = answer_length(await self._reader.readexactly(4))
                return await self._reader.readexactly(length)
        except (OSError, EOFError) as error:
            raise call_failed(self.address, error, may_have_left=may_have_left) from error
