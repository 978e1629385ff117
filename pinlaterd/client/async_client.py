"""The twelve operations as coroutines: the parameters, errors and promises of Client's methods.

    async with AsyncClient("queue.example.com", source="mailer:host7") as client:
        await client.enqueue("mail", [b"to: ada"])
        for job in await client.dequeue("mail", limit=10, max_wait_ms=5000):
            await send(job.body)
            await client.ack("mail", succeeded=[job])
        async for record in client.scan("mail", JobState.FAILED):
            print(record.descriptor, record.custom_status)

A call that is cancelled may have been carried out, like one that ends with OutcomeUnknown.
"""

from __future__ import annotations

import ssl as tls
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from pinlaterd.client import calls
from pinlaterd.client.addresses import parse_addresses
from pinlaterd.client.async_pool import AsyncConnectionPool
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
from pinlaterd.errors import ConnectionFailed, EnqueuedInPart, PinLaterError
from pinlaterd.model import JobRecord, ScanResult

P = ParamSpec("P")
T = TypeVar("T")


def _operation(
    prepare: Callable[P, PreparedCall[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """The method that makes that call and returns its result."""

    async def operation(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.run(prepare(*args, **kwargs))

    calls.as_method_of("AsyncClient", operation, prepare)
    return operation


def _paged_operation(
    prepare: Callable[P, PreparedCall[ScanResult]],
) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[JobRecord]]:
    """The method that makes a call for each page, as far as its caller reads."""

    async def operation(
        self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncIterator[JobRecord]:
        call: PreparedCall[ScanResult] | None = prepare(*args, **kwargs)
        while call is not None:
            page = await self.run(call)
            for job in page.jobs:
                yield job
            call = calls.page_after(call, page)

    calls.as_method_of("AsyncClient", operation, prepare, returns="AsyncIterator[JobRecord]")
    return operation


def _repeated_operation(
    prepare: Callable[P, PreparedCall[int]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, int]]:
    """The method that makes as many calls as all its jobs take, and returns how many it changed."""

    async def operation(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> int:
        repeated = calls.RepeatedCall(prepare(*args, **kwargs))
        while (call := repeated.call) is not None:
            began = time.monotonic()
            jobs = await self.run(call)
            repeated.after(jobs, time.monotonic() - began)
        return repeated.done

    calls.as_method_of("AsyncClient", operation, prepare)
    return operation


class AsyncClient:
    """A client of one service; any number of tasks may share it, all of one event loop.

    Each call takes a connection from a pool of `max_connections`, so more calls than that at a time
    wait for each other.
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
        """The arguments are those of Client.

        Nothing is connected yet: the first call does that. All others must come on its event loop,
        else they raise RuntimeError.
        """
        self.max_connections = checked_connections(max_connections)
        caller = Caller(
            source=source,
            timeout_seconds=timeout_seconds,
            connect_timeout_seconds=connect_timeout_seconds,
        )
        self._pool = AsyncConnectionPool(
            parse_addresses(host, port),
            caller,
            max_connections=self.max_connections,
            tls=ssl,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def address(self) -> str:
        """HOST:PORT, or several with commas in between, for messages."""
        return ", ".join(map(str, self._pool.addresses))

    async def close(self) -> None:
        """Close the connections. Calls under way finish; later ones raise ConnectionFailed."""
        await self._pool.close()

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

    async def run(self, call: PreparedCall[T]) -> T:
        """Make a call and return its result; what the methods above do."""
        try:
            return await self._pool.run(call)
        except EnqueuedInPart as error:
            rest = calls.RestOfEnqueue(call, error)
        try:
            stored = await self._pool.run(rest.call)
        except (PinLaterError, ConnectionFailed) as error:
            stored = rest.after(error)
        return rest.result(stored)
