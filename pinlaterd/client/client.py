"""The operations as methods that block, and as coroutines: the two ways to wait.

Errors: a refusal of the service is raised as the class of pinlaterd.errors for its code, all of
them PinLaterError; no answer is ConnectionFailed (nothing was done) or OutcomeUnknown, which is one
(the call may have been carried out, as may one that is cancelled). docs/python.md is the guide.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import select
import socket
import ssl
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

from pinlaterd.client import calls
from pinlaterd.client.addresses import Endpoint
from pinlaterd.client.calls import PreparedCall
from pinlaterd.client.pool import (
    RECEIVE_BYTES,
    BaseClient,
    CallGivenUp,
    Connection,
    answer_length,
    call_failed,
    new_socket,
    seconds_left,
)
from pinlaterd.config.schema import Address
from pinlaterd.model import JobRecord, ScanResult

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

# The event loops in which a worker runs handlers, until a blocking call was made in one.
HANDLER_LOOPS: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()

# --- blocking -----------------------------------------------------------------------------


def _operation(prepare: Callable[P, PreparedCall[T]]) -> Callable[Concatenate[Client, P], T]:
    def operation(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(prepare(*args, **kwargs))

    return calls.as_operation(operation, prepare)


def _paged_operation(
    prepare: Callable[P, PreparedCall[ScanResult]],
) -> Callable[Concatenate[Client, P], Iterator[JobRecord]]:
    """Make a method that makes a call for each page, as far as its caller reads."""

    def operation(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[JobRecord]:
        for page in calls.pages(self.run, prepare(*args, **kwargs)):
            yield from page.jobs

    return calls.as_operation(operation, prepare)


class Client(BaseClient):
    """A client of one service; any number of threads may share it.

    Each call takes a connection from a pool of `max_connections`, so more threads than that wait
    for each other. A child that is forked opens connections of its own.
    """

    _free: threading.BoundedSemaphore
    _of_loops: dict[asyncio.AbstractEventLoop, AsyncClient]

    def __reduce__(self) -> tuple[Callable[[], Client], tuple[()]]:
        """Pickle what it was made with: another process has connections of its own."""
        if self._ssl is not None:
            raise TypeError(
                "a Client with ssl= can't be handed to another process, as its SSLContext can't; "
                "make one there"
            )
        return functools.partial(type(self), **self._settings()), ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Calls under way finish; later ones raise ConnectionFailed."""
        self._close()

    create_queue = _operation(calls.create_queue)
    delete_queue = _operation(calls.delete_queue)
    queue_names = _operation(calls.queue_names)

    enqueue = _operation(calls.enqueue)
    enqueue_keyed = _operation(calls.enqueue_keyed)
    dequeue = _operation(calls.dequeue)
    ack = _operation(calls.ack)
    ack_jobs = _operation(calls.ack_jobs)
    checkpoint = _operation(calls.checkpoint)
    apply_checkpoints = _operation(calls.apply_checkpoints)
    finish_jobs = _operation(calls.finish_jobs)

    lookup = _operation(calls.lookup)
    lookup_keys = _operation(calls.lookup_keys)
    count = _operation(calls.count)
    scan = _paged_operation(calls.scan)
    retry_failed = _operation(calls.retry_failed)
    delete_jobs = _operation(calls.delete_jobs)

    def run(self, call: PreparedCall[T]) -> T:
        """Make a call and return its result; what the methods above do."""
        loop = asyncio._get_running_loop()  # noqa: SLF001 - it is public, whatever its name
        if loop is not None and loop in HANDLER_LOOPS:
            HANDLER_LOOPS.discard(loop)
            log.warning(
                "%s blocks the event loop of an `async def` handler, and all jobs in it: await "
                "job.asave, or a method of job.aclient; this is logged once",
                call.method.value,
            )
        return _finish(self._run(call))

    def asynchronous(self, **changes: Any) -> AsyncClient:
        """Make an AsyncClient of the same service, with the same settings but for `changes`."""
        return AsyncClient(**(self._settings() | {"ssl": self._ssl} | changes))

    def of_running_loop(self) -> AsyncClient:
        """Return the AsyncClient with the same settings that all tasks of this event loop share."""
        loop = asyncio.get_running_loop()
        with self._lock:
            found = self._of_loops.get(loop)
            if found is None:
                for closed in [each for each in self._of_loops if each.is_closed()]:
                    del self._of_loops[closed]
                found = self._of_loops[loop] = self.asynchronous()
            return found

    async def leave_loop(self) -> None:
        """Close the AsyncClient of the running loop, if it has one."""
        if client := self._of_loops.pop(asyncio.get_running_loop(), None):
            await client.close()

    def _begin(self) -> None:
        super()._begin()
        self._free = threading.BoundedSemaphore(self.max_connections)
        self._of_loops = {}
        _clients.add(self)

    async def _take_place(self, deadline: float) -> None:
        if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError

    async def _result_of(self, future: Future[T], deadline: float) -> T:
        return future.result(timeout=max(0.0, deadline - time.monotonic()))

    async def _open(
        self, server: Address, endpoint: Endpoint, deadline: float
    ) -> _BlockingConnection:
        connected = new_socket(endpoint)
        try:
            connected.settimeout(seconds_left(deadline))
            connected.connect(endpoint.where)
            if self._ssl is not None:
                connected.settimeout(seconds_left(deadline))
                connected = self._ssl.wrap_socket(connected, server_hostname=server.host)
            return _BlockingConnection(server, connected)
        except BaseException:
            connected.close()
            raise

    def _start_probe(self, server: Address) -> None:
        probe = threading.Thread(
            target=lambda: _finish(self._probe(server)), name=f"probe-{server}", daemon=True
        )
        try:
            probe.start()
        except RuntimeError:  # no more threads: the call does not suffer, and the next one looks
            self._end_probe(server, is_back=False)

    def _begin_in_child(self) -> None:
        """Begin again after a fork: connections, and whatever threads wait for, are the parent's.

        Closing the child's copies tells the servers nothing. No lock is taken, for a thread that
        the child does not have may hold it.
        """
        inherited = list(self._connections)
        self._begin()
        for connection in inherited:
            connection.close()


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._begin_in_child()  # noqa: SLF001 - part of it


os.register_at_fork(after_in_child=_after_fork_in_child)


def _finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits for a loop: it blocks the thread."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("unreachable: a Client waits for no loop")


class _BlockingConnection(Connection):
    def __init__(self, address: Address, connected: socket.socket) -> None:
        self.address = address
        self._socket = connected
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def is_stale(self) -> bool:
        if not self._poll.poll(0):
            return False
        self._socket.setblocking(False)
        try:
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):  # TLS itself may have sent something
            return False
        except OSError:
            return True
        return True

    async def call(self, message: bytes, *, deadline: float) -> bytes:
        has_left = False
        try:
            self._socket.settimeout(seconds_left(deadline))
            self._socket.sendall(len(message).to_bytes(4, "big") + message)
            has_left = True
            return self._receive(deadline)
        except OSError as error:
            raise call_failed(self.address, error, may_have_left=has_left) from error

    def _receive(self, deadline: float) -> bytes:
        received, end = bytearray(), 4
        while len(received) < end:
            self._socket.settimeout(seconds_left(deadline))
            chunk = self._socket.recv(RECEIVE_BYTES)
            if not chunk:
                raise ConnectionError("connection closed")
            received += chunk
            if end == 4 and len(received) >= 4:
                end += answer_length(received[:4])
        if len(received) > end:
            raise ConnectionError("more came back than one answer")
        return bytes(memoryview(received)[4:])


# --- for asyncio --------------------------------------------------------------------------


def _async_operation(
    prepare: Callable[P, PreparedCall[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    async def operation(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.run(prepare(*args, **kwargs))

    return calls.as_operation(operation, prepare)


def _async_paged_operation(
    prepare: Callable[P, PreparedCall[ScanResult]],
) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[JobRecord]]:
    """Make a method that makes a call for each page, as far as its caller reads."""

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


class AsyncClient(BaseClient):
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

    create_queue = _async_operation(calls.create_queue)
    delete_queue = _async_operation(calls.delete_queue)
    queue_names = _async_operation(calls.queue_names)

    enqueue = _async_operation(calls.enqueue)
    enqueue_keyed = _async_operation(calls.enqueue_keyed)
    dequeue = _async_operation(calls.dequeue)
    ack = _async_operation(calls.ack)
    ack_jobs = _async_operation(calls.ack_jobs)
    checkpoint = _async_operation(calls.checkpoint)
    apply_checkpoints = _async_operation(calls.apply_checkpoints)
    finish_jobs = _async_operation(calls.finish_jobs)

    lookup = _async_operation(calls.lookup)
    lookup_keys = _async_operation(calls.lookup_keys)
    count = _async_operation(calls.count)
    scan = _async_paged_operation(calls.scan)
    retry_failed = _async_operation(calls.retry_failed)
    delete_jobs = _async_operation(calls.delete_jobs)

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

    def hang_up(self, call: PreparedCall[Any]) -> bool:
        """Have the server end its wait for a call under way; return False if that can't be asked.
        The call returns what the server has answered by then, which cancelling it would lose, or
        raises CallGivenUp; then the server releases what it has claimed."""
        carriers = [each for each in self._connections if each.carries is call]
        return any(cast("_StreamConnection", each).hang_up() for each in carriers)

    def _begin(self) -> None:
        super()._begin()
        self._free = asyncio.BoundedSemaphore(self.max_connections)
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
    """A connection whose data asyncio sends later, even if nobody waits for it any more. A call
    that failed or was cancelled must close it at once, which drops what was not sent."""

    def __init__(
        self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.address = address
        self._reader, self._writer = reader, writer
        self._is_tls = writer.get_extra_info("ssl_object") is not None
        self._poll = select.poll()
        self._poll.register(writer.get_extra_info("socket").fileno(), select.POLLIN)
        self._is_hung_up = False
        # With nothing below the mark, `drain` ends when all has left.
        writer.transport.set_write_buffer_limits(high=0)

    def close(self) -> None:
        """Close at once, dropping what was not sent."""
        self._writer.transport.abort()

    def hang_up(self) -> bool:
        """Send no more; what the server has sent is still read. Return False if this kind of
        connection has no such end."""
        self._is_hung_up = self._writer.can_write_eof() and not self._writer.is_closing()
        if self._is_hung_up:
            self._writer.write_eof()
        return self._is_hung_up

    def is_stale(self) -> bool:
        """Return whether the server closed it, seen by the loop or not yet, or we hung up."""
        if self._is_hung_up or self._reader.at_eof() or self._writer.is_closing():
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
            if self._is_hung_up:
                raise CallGivenUp("the wait for an answer was ended") from error
            raise call_failed(self.address, error, may_have_left=may_have_left) from error
