"""The service behind what speaks HTTP: calls that outlast the restart of a router.

An HTTP request has the time that a call has (`request_timeout_ms`). A call that could not be sent,
since no router listened, is made again until that is up; one whose outcome is unknown never is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from pinlaterd.client import AsyncClient
from pinlaterd.client.calls import PreparedCall, lookup, release
from pinlaterd.client.pool import CallGivenUp
from pinlaterd.clock import Clock
from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import ConnectionFailed, OutcomeUnknown, PinLaterError
from pinlaterd.lifecycle import StopSignal
from pinlaterd.model import ClaimedJob
from pinlaterd.wire.process import wait_until_served

log = logging.getLogger(__name__)
T = TypeVar("T")

# Routers are restarted within a second.
_AGAIN_SECONDS = 0.05
# For calls that are answered at once, and for those that wait for jobs.
_CONNECTIONS = 64
_WAITING_CONNECTIONS = 1_000


class RouterClient:
    """Makes calls of this server's routers, for requests of one event loop."""

    def __init__(self, settings: ServerSettings, clock: Clock, kind: str) -> None:
        """`kind`: of the process, by which routers know the caller."""
        self._clock = clock
        self.seconds = settings.request_timeout_ms / 1000  # that a request has
        self._at_once = _client(settings, kind, self.seconds, _CONNECTIONS)
        self._waiting = _client(settings, kind, self.seconds, _WAITING_CONNECTIONS)
        self._releases: set[asyncio.Task[None]] = set()
        self._claims: dict[asyncio.Future[Any], PreparedCall[Any]] = {}  # under way

    async def run(self, call: PreparedCall[T]) -> T:
        """Return the result of `call`. Raises what AsyncClient raises."""
        client = self._waiting if call.wait_ms else self._at_once
        until = self._clock.monotonic() + self.seconds
        while True:
            try:
                return await client.run(call)
            except (OutcomeUnknown, CallGivenUp):
                raise
            except ConnectionFailed:
                if self._clock.monotonic() >= until:
                    raise
                await asyncio.sleep(_AGAIN_SECONDS)

    async def claim(self, queue: str, call: PreparedCall[list[ClaimedJob]]) -> list[ClaimedJob]:
        """Return the jobs of a dequeue; if it is cancelled, they are pending again."""
        claiming = asyncio.ensure_future(self.run(call))
        self._claims[claiming] = call
        claiming.add_done_callback(self._claims.pop)
        try:
            return await asyncio.shield(claiming)
        except CallGivenUp:  # its wait was ended
            return []
        except asyncio.CancelledError:
            client = self._waiting if call.wait_ms else self._at_once
            if not (claiming.done() or client.hang_up(call)):
                claiming.cancel()  # it was not sent yet
            self._start(self._release_claimed(queue, claiming))
            raise

    def end_waits(self) -> None:
        """Have the claims that wait for jobs answered now."""
        for call in self._claims.values():
            if call.wait_ms:
                self._waiting.hang_up(call)

    def release(self, queue: str, jobs: Sequence[ClaimedJob]) -> None:
        """Begin to make claimed jobs pending again, at no attempt's cost."""
        if jobs:
            self._start(self._release(queue, jobs))

    async def _release_claimed(
        self, queue: str, claiming: asyncio.Future[list[ClaimedJob]]
    ) -> None:
        with contextlib.suppress(asyncio.CancelledError, ConnectionFailed, PinLaterError):
            self.release(queue, await claiming)

    async def _release(self, queue: str, jobs: Sequence[ClaimedJob]) -> None:
        try:
            await self.run(release(queue, jobs))
        except (ConnectionFailed, PinLaterError) as error:
            log.warning(
                "%d jobs of %s stay claimed until that times out: %s", len(jobs), queue, error
            )

    def _start(self, release: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(release)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def wait_until_served(self, stop: StopSignal) -> None:
        """Return once a router answers, so that the first request meets no error; or `stop` is
        set."""
        await wait_until_served(lambda: self._at_once.run(lookup([])), stop)

    async def close(self) -> None:
        while self._releases:
            await asyncio.wait(self._releases)
        await self._at_once.close()
        await self._waiting.close()


def _client(settings: ServerSettings, kind: str, seconds: float, connections: int) -> AsyncClient:
    """Return a client of the routers; `seconds`: in which they answer."""
    return AsyncClient(
        *settings.own_address,
        source=f"{kind}:{settings.advertised_host}",
        timeout_seconds=seconds + 1,  # so that the router's own answer comes first
        max_connections=connections,
    )
