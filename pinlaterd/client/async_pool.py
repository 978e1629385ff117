"""A bounded set of connections to a service's servers, that the tasks of one event loop take turns
with: what `pool` is for threads.

A server that failed is probed in a task of its own, which a call starts when that is due, and which
ends with the probe. A call that is cancelled has its connection closed, whatever it waited for.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from typing import TypeVar

from pinlaterd.client.addresses import Address
from pinlaterd.client.async_connection import AsyncConnection, connect
from pinlaterd.client.caller import Caller, CallUnderWay
from pinlaterd.client.calls import PreparedCall
from pinlaterd.client.failures import too_few_connections
from pinlaterd.client.ledger import Ledger
from pinlaterd.client.names import Names
from pinlaterd.errors import ConnectionFailed, PinLaterError

T = TypeVar("T")


class AsyncConnectionPool:
    """Makes calls, up to `max_connections` at a time, from any number of tasks of one loop."""

    def __init__(
        self,
        addresses: Sequence[Address],
        caller: Caller,
        *,
        max_connections: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.addresses = tuple(addresses)
        self._caller = caller
        self._max_connections = max_connections
        self._tls = tls
        self._ledger: Ledger[AsyncConnection] = Ledger(self.addresses)
        self._free = asyncio.BoundedSemaphore(max_connections)
        self._names = Names()
        self._probes: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, prepared: PreparedCall[T]) -> T:
        """Make a call, to one server after the other until one answers, and return its result."""
        self._check_loop()
        self._probe_if_due()
        call = self._caller.begin(prepared, self._ledger.order())
        await self._take_place(call.deadline)
        try:
            for server in call.servers():
                try:
                    return await self._send(call, server)
                except ConnectionFailed as error:
                    self._ledger.failed(server, error)
                    call.failed(server, error)
            raise call.error()
        finally:
            self._free.release()

    async def close(self) -> None:
        """Close what is idle now, and what is lent once it comes back."""
        self._ledger.close()
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        await asyncio.sleep(0)  # the loop ends in its next turn what was closed in this one

    def _check_loop(self) -> None:
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = running
        elif self._loop is not running:
            raise RuntimeError(
                "this AsyncClient belongs to the event loop of its first call; make one for each"
            )

    async def _take_place(self, deadline: float) -> None:
        """One of the places of those that call at a time."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._free.acquire()
        except TimeoutError:
            raise too_few_connections(self._max_connections) from None

    async def _send(self, call: CallUnderWay[T], server: Address, *, is_probe: bool = False) -> T:
        connection = self._ledger.lend_idle(server)
        if connection is None:
            deadline = call.connect_deadline()
            connection = await connect(server, self._names, deadline=deadline, tls=self._tls)
            self._ledger.lend_new(connection)
        with self._ledger.lent(connection, is_probe=is_probe):
            answer = await connection.call(call.message, deadline=call.deadline)
            return call.result(server, answer)

    # --- servers that failed --------------------------------------------------------------

    def _probe_if_due(self) -> None:
        if (server := self._ledger.begin_probe()) is not None:
            probe = asyncio.create_task(self._probe(server), name=f"probe-{server}")
            self._probes.add(probe)
            probe.add_done_callback(self._probes.discard)

    async def _probe(self, server: Address) -> None:
        """Find out whether a server is back. It takes no place of those who call."""
        is_back = False
        try:
            await self._send(self._caller.begin_probe(server), server, is_probe=True)
            is_back = True
        except PinLaterError:
            is_back = True  # it is there, and says what ails it
        except ConnectionFailed:
            pass  # it is left alone for longer
        finally:
            self._ledger.end_probe(server, is_back=is_back)
