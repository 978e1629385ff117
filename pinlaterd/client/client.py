"""The operations as methods that block.

Errors: a refusal of the service is raised as the class of pinlaterd.errors for its code, all of
them PinLaterError; no answer is ConnectionFailed (nothing was done) or OutcomeUnknown, which is one
(the call may have been carried out). docs/python.md is the guide.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
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


def _operation(prepare: Callable[P, PreparedCall[T]]) -> Callable[Concatenate[Client, P], T]:
    def operation(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(prepare(*args, **kwargs))

    return calls.as_operation(operation, prepare)


def _paged_operation(
    prepare: Callable[P, PreparedCall[ScanResult]],
) -> Callable[Concatenate[Client, P], Iterator[JobRecord]]:
    """With a call for each page, as far as its caller reads."""

    def operation(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[JobRecord]:
        call: PreparedCall[ScanResult] | None = prepare(*args, **kwargs)
        while call is not None:
            page = self.run(call)
            yield from page.jobs
            call = calls.page_after(call, page)

    return calls.as_operation(operation, prepare)


class Client(BaseClient["_BlockingConnection"]):
    """A client of one service; any number of threads may share it.

    Each call takes a connection from a pool of `max_connections`, so more threads than that wait
    for each other. A child that is forked opens connections of its own.
    """

    _free: threading.BoundedSemaphore

    def __reduce__(self) -> tuple[Callable[[], Client], tuple[()]]:
        """Pickled as what it was made with: another process has connections of its own."""
        if self._ssl is not None:
            raise TypeError(
                "a Client with ssl= can't be handed to another process, as its SSLContext can't; "
                "make one there"
            )
        make = functools.partial(
            type(self),
            [str(address) for address in self._addresses],
            source=self._source,
            timeout_seconds=self._timeout_seconds,
            connect_timeout_seconds=self._connect_timeout_seconds,
            max_connections=self._max_connections,
        )
        return make, ()

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
    dequeue = _operation(calls.dequeue)
    ack = _operation(calls.ack)
    checkpoint = _operation(calls.checkpoint)

    lookup = _operation(calls.lookup)
    count = _operation(calls.count)
    scan = _paged_operation(calls.scan)
    retry_failed = _operation(calls.retry_failed)
    delete_jobs = _operation(calls.delete_jobs)

    def run(self, call: PreparedCall[T]) -> T:
        """Make a call and return its result; what the methods above do."""
        return _finish(self._run(call))

    # --- blocking the thread --------------------------------------------------------------

    def _begin(self) -> None:
        super()._begin()
        self._free = threading.BoundedSemaphore(self._max_connections)
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
        """After a fork: connections, and whatever threads wait for, are the parent's.

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
    """The result of a coroutine that never waits for a loop: what it awaits blocks the thread."""
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
