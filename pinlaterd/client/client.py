"""The twelve operations as methods that block: the plain way to use the service.

    client = Client("queue.example.com", source="mailer:host7")
    client.create_queue("mail")
    [descriptor] = client.enqueue("mail", [Job(b"to: ada", priority=2, attempts_allowed=5)])

    for job in client.dequeue("mail", limit=10, max_wait_ms=5000):
        send(job.body)
        client.ack("mail", succeeded=[job])

    print(client.lookup([descriptor])[descriptor].state.name)      # SUCCEEDED

Errors. What the service answers is raised as the class of pinlaterd.errors for its code
(QueueNotFound, EnqueueRejected, …, all of them PinLaterError). A service that can't be reached
is ConnectionFailed: nothing was done. A connection that broke after the call was sent, or an
answer that did not come in time, is OutcomeUnknown (a ConnectionFailed too): the call may have
been carried out. A call is sent again by itself, to another address if there are several, only
where that can't do anything twice: if it never left whole, or, once, for what only reads (lookup,
count, queue_names, scan, dry runs) and for an ack that names the claim of each of its jobs. Of an
enqueue that is stored in part, the jobs that are not are sent once more; EnqueuedInPart tells what
became of each.
"""

from __future__ import annotations

import functools
import ssl as tls
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar

from pinlaterd.client import calls
from pinlaterd.client.addresses import parse_addresses
from pinlaterd.client.caller import (
    DEFAULT_CONNECT_TIMEOUT_SECONDS,
    DEFAULT_HOST,
    DEFAULT_MAX_CONNECTIONS,
    DEFAULT_PORT,
    DEFAULT_TIMEOUT_SECONDS,
    Caller,
    checked_connections,
)
from pinlaterd.client.calls import PreparedCall
from pinlaterd.client.pool import ConnectionPool
from pinlaterd.errors import ConnectionFailed, EnqueuedInPart, PinLaterError
from pinlaterd.model import JobRecord, ScanResult

P = ParamSpec("P")
T = TypeVar("T")


def _operation(prepare: Callable[P, PreparedCall[T]]) -> Callable[Concatenate[Client, P], T]:
    """The method that makes that call and returns its result."""

    def operation(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.run(prepare(*args, **kwargs))

    calls.as_method_of("Client", operation, prepare)
    return operation


def _paged_operation(
    prepare: Callable[P, PreparedCall[ScanResult]],
) -> Callable[Concatenate[Client, P], Iterator[JobRecord]]:
    """The method that makes a call for each page, as far as its caller reads."""

    def operation(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[JobRecord]:
        call: PreparedCall[ScanResult] | None = prepare(*args, **kwargs)
        while call is not None:
            page = self.run(call)
            yield from page.jobs
            call = calls.page_after(call, page)

    calls.as_method_of("Client", operation, prepare, returns="Iterator[JobRecord]")
    return operation


def _repeated_operation(
    prepare: Callable[P, PreparedCall[int]],
) -> Callable[Concatenate[Client, P], int]:
    """The method that makes as many calls as all its jobs take, and returns how many it changed."""

    def operation(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> int:
        repeated = calls.RepeatedCall(prepare(*args, **kwargs))
        while (call := repeated.call) is not None:
            began = time.monotonic()
            jobs = self.run(call)
            repeated.after(jobs, time.monotonic() - began)
        return repeated.done

    calls.as_method_of("Client", operation, prepare)
    return operation


class Client:
    """A client of one service; any number of threads may share it.

    Each call takes a connection from a pool of `max_connections`, so more threads than that wait
    for each other. A child that is forked opens connections of its own.
    """

    def __init__(
        self,
        host: str | Sequence[str] = DEFAULT_HOST,
        port: int = DEFAULT_PORT,
        *,
        source: str | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        connect_timeout_seconds: float = DEFAULT_CONNECT_TIMEOUT_SECONDS,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
        ssl: tls.SSLContext | None = None,
    ) -> None:
        """Nothing is connected yet: the first call does that.

        `host` is HOST, HOST:PORT or [IPV6]:PORT (else AddressInvalid, a ValueError), or several of
        them, which lead to the same shards: in this release, addresses of one server. Calls take
        turns over those that are well, and go round those that are not.
        `port` is that of those named without one. `source` is who calls, as the server's claims
        name it (default: PROGRAM:HOST). `timeout_seconds` bounds every call, connecting included;
        the server answers within its request_timeout_ms (10 s), so less makes outcomes unknown
        that need not be. `connect_timeout_seconds` bounds the connecting to one address. `ssl` is
        for servers behind a TLS proxy. Numbers that make no sense are a ValueError.
        """
        self.max_connections = checked_connections(max_connections)
        caller = Caller(
            source=source,
            timeout_seconds=timeout_seconds,
            connect_timeout_seconds=connect_timeout_seconds,
        )
        self._pool = ConnectionPool(
            parse_addresses(host, port),
            caller,
            max_connections=self.max_connections,
            tls=ssl,
        )
        self._made_again = functools.partial(
            type(self),
            host,
            port,
            source=caller.source,
            timeout_seconds=timeout_seconds,
            connect_timeout_seconds=connect_timeout_seconds,
            max_connections=max_connections,
        )
        self._has_tls = ssl is not None

    def __reduce__(self) -> tuple[Callable[[], Client], tuple[()]]:
        """Pickled as what it was made with: another process has connections of its own."""
        if self._has_tls:
            raise TypeError(
                "a Client with ssl= can't be handed to another process, as its SSLContext can't; "
                "make one there"
            )
        return self._made_again, ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        """HOST:PORT, or several with commas in between, for messages."""
        return ", ".join(map(str, self._pool.addresses))

    def close(self) -> None:
        """Close the connections. Calls under way finish; later ones raise ConnectionFailed."""
        self._pool.close()

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
    retry_failed = _repeated_operation(calls.retry_failed)
    delete_jobs = _repeated_operation(calls.delete_jobs)

    def run(self, call: PreparedCall[T]) -> T:
        """Make a call and return its result; what the methods above do."""
        try:
            return self._pool.run(call)
        except EnqueuedInPart as error:
            rest = calls.RestOfEnqueue(call, error)
        try:
            stored = self._pool.run(rest.call)
        except (PinLaterError, ConnectionFailed) as error:
            stored = rest.after(error)
        return rest.result(stored)
