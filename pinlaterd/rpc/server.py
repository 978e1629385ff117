"""The Thrift port: accepts connections and gives each message to one handler.

The handler is called on the event loop with the message (strict or non-strict TBinaryProtocol,
without frames) and its connection, for which it makes one Answer, and must not block; a
ProtocolError instead means that the bytes are no call, and closes that connection. Relies on
asyncio, and runs best on uvloop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Final

from pinlaterd.clock import until_full
from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import how_many
from pinlaterd.rpc.connection import Answer, Connection
from pinlaterd.stats import Stats

__all__ = ["RETIRE_SECONDS", "Answer", "ThriftServer"]

log = logging.getLogger(__name__)

Handler = Callable[[bytes, Connection], object]

# A connection that makes no progress is closed after so many times the time for one call.
_STALL_TIMEOUTS: Final = 3
# While others wait for memory, those that may go on have no more than this.
_CROWDED_SECONDS: Final = 2.0
# A server that stops waits so long for one more call on each connection. What a client sends at
# the moment when its connection is closed has an unknown outcome; who calls all the time is spared
# that by an end that comes with an answer.
RETIRE_SECONDS: Final = 0.25
_CROWDED_CURE: Final = (
    "; others wait for its memory: raise max_buffered_bytes in etc/pinlaterd.yaml"
)
_LOOKS_PER_PATIENCE: Final = 10
_LOOK_SECONDS: Final = 0.5
_LOG_LINES: Final = 20
_LOG_SECONDS: Final = 10.0
_BACKLOG: Final = 1024
# What all connections hold is counted again each time that this part of the limit has come in.
_COUNTS_PER_LIMIT: Final = 64


class ThriftServer:
    """Serves `handler` on settings.host and settings.port (a Service: both ends are safe to
    repeat). With several routers they share the port (SO_REUSEPORT)."""

    def __init__(self, handler: Handler, settings: ServerSettings, stats: Stats) -> None:
        self.handler = handler
        self.max_frame_bytes = settings.max_frame_bytes
        self.max_calls = settings.max_calls_per_connection
        self.max_waiting = settings.max_waiting_per_connection
        self.budget = BufferBudget(settings.max_buffered_bytes, lambda: self._connections)
        self._settings = settings
        self._stats = stats
        self._connections: set[Connection] = set()
        self._stall_seconds = _STALL_TIMEOUTS * settings.request_timeout_ms / 1000
        self._servers: Sequence[asyncio.Server] = ()  # none: not started, or stopping
        self._looking: asyncio.TimerHandle | None = None
        # Time as it passes between looks: a pause of this process is not its clients' silence.
        self._looked_seconds = 0.0
        # Since the last look: who may have to make room, first to last, and the addresses that
        # have more than their share.
        self._idlest: deque[Connection] | None = None
        self._crowding: set[str] = set()
        self._emptied = asyncio.Event()
        self._warnings = 0  # since `_warned_at`
        self._warned_at = 0.0

    @property
    def port(self) -> int:
        """The port that it listens on: of interest where the settings say 0."""
        return int(self.listeners[0].getsockname()[1])

    @property
    def listeners(self) -> Sequence[socket.socket]:
        """The sockets that it listens on; only to look at, or to hand on."""
        return [listener for server in self._servers for listener in server.sockets]

    async def start(self, listeners: Sequence[socket.socket] = ()) -> None:
        """Listen; on `listeners`, which become the server's, instead of sockets of its own.

        Raises OSError if the port can't be had."""
        if self._servers:
            return
        loop = asyncio.get_running_loop()
        if listeners:
            self._servers = [
                await loop.create_server(lambda: Connection(self), sock=found, backlog=_BACKLOG)
                for found in listeners
            ]
        else:
            server = await loop.create_server(
                lambda: Connection(self),
                self._settings.host,
                self._settings.port,
                reuse_port=self._settings.routers > 1,
                backlog=_BACKLOG,
            )
            self._servers = [server]
        self._look()

    async def stop(
        self, grace_seconds: float | None = None, retire_seconds: float = RETIRE_SECONDS
    ) -> None:
        """Take no new connections; answer the calls in flight, and one more of each client that
        calls within `retire_seconds`; close.

        What is not answered after `grace_seconds` (by default: the time that a call may
        take; the other included) is given up.
        """
        if not self._servers:
            return
        if grace_seconds is None:
            grace_seconds = self._settings.request_timeout_ms / 1000
        servers, self._servers = self._servers, ()
        for server in servers:
            server.close()
        for connection in tuple(self._connections):
            connection.retire()
        retire_seconds = min(retire_seconds, grace_seconds / 2)
        if not await self._is_empty_within(retire_seconds):
            for connection in tuple(self._connections):
                connection.finish()
        if not await self._is_empty_within(grace_seconds - retire_seconds):
            log.warning("closing %d connections with calls in flight", len(self._connections))
            for connection in tuple(self._connections):
                connection.abort()
            await self._wait_empty()
        if self._looking is not None:
            self._looking.cancel()
        self._end_warnings()
        for server in servers:
            await server.wait_closed()

    async def _is_empty_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wait_empty(), seconds)
        return not self._connections

    async def _wait_empty(self) -> None:
        while self._connections:
            self._emptied.clear()
            await self._emptied.wait()

    # --- what connections call ----------------------------------------------------------------

    def opened(self, connection: Connection) -> bool:
        connection.idle_since = self._looked_seconds
        full = len(self._connections) >= self._settings.max_connections
        if full and not self._make_room(connection):
            self._stats.count("connections_refused")
            self._warn(
                f"closed a connection from {connection.peer}: there are {len(self._connections)}; "
                "max_connections in etc/pinlaterd.yaml allows no more"
            )
            return False
        self._connections.add(connection)
        self._stats.count("connections_opened")
        self._stats.gauge("connections", len(self._connections))
        if not self._servers:  # it was accepted just before the end
            connection.retire()
        return True

    def _make_room(self, newcomer: Connection) -> bool:
        """Close the connection that has been idle for the longest; False if there is none.

        Addresses with more than an equal share come first: they make room for all others, and one
        of them only for itself. Clients behind one address, as a proxy's, all have the same share.
        """
        if self._idlest is None:
            counts = Counter(_host(each) for each in (newcomer, *self._connections))
            share = self._settings.max_connections / len(counts)
            self._crowding = {host for host, count in counts.items() if count > share}
            self._idlest = deque(sorted(self._connections, key=self._readiness))
        while self._idlest:
            found = self._idlest[0]
            is_crowding = _host(found) in self._crowding
            if _host(newcomer) in self._crowding and not is_crowding:
                return False
            self._idlest.popleft()
            messages = found.messages_if_idle()
            # Who has called lately may be about to call again.
            if (
                found.gone
                or messages is None
                or not (is_crowding or messages == found.messages_seen)
            ):
                continue
            seconds = self._looked_seconds - found.idle_since
            self._warn(
                f"closed the connection from {found.peer}, idle for {seconds:.0f} s, for one from "
                f"{newcomer.peer}: max_connections in etc/pinlaterd.yaml allows no more"
            )
            self._connections.discard(found)
            found.finish()
            return True
        return False

    def _readiness(self, connection: Connection) -> tuple[bool, float]:
        """Tell whether a connection is the last to make room, and since when it has been idle."""
        return _host(connection) not in self._crowding, connection.idle_since

    def closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._stats.gauge("connections", len(self._connections))
        if not self._connections:
            self._emptied.set()

    def refused(self, connection: Connection, reason: str) -> None:
        self._stats.count("connections_closed_on_error")
        self._warn(f"closing the connection from {connection.peer}: {reason}")

    def ended_within_message(self, connection: Connection) -> None:
        missing = how_many(connection.reader.missing, "byte")
        self._warn(
            f"the connection from {connection.peer} ended within a message, of which at least "
            f"{missing} had yet to come"
        )

    # --- from time to time --------------------------------------------------------------------

    def _look(self) -> None:
        """Close connections that have ended or make no progress; the latter sooner while others
        wait for their memory."""
        if self._warnings and time.monotonic() - self._warned_at >= _LOG_SECONDS:
            self._end_warnings()
        self._idlest = None
        self.budget.count()  # also what clients have read meanwhile
        crowded = self.budget.crowded
        patience = min(self._stall_seconds, _CROWDED_SECONDS) if crowded else self._stall_seconds
        for connection in tuple(self._connections):
            connection.look()
            messages = connection.messages_if_idle()
            if messages is None or messages != connection.messages_seen:
                connection.messages_seen, connection.idle_since = messages, self._looked_seconds
            reason = connection.stalled(self._looked_seconds, patience)
            if reason is not None:
                self.refused(connection, f"{reason}{_CROWDED_CURE if crowded else ''}")
                connection.abort()
        wait = until_full(min(patience / _LOOKS_PER_PATIENCE, _LOOK_SECONDS), time.monotonic())
        self._looked_seconds += wait
        self._looking = asyncio.get_running_loop().call_later(wait, self._look)

    def _warn(self, line: str) -> None:
        """Log at most _LOG_LINES in _LOG_SECONDS, so that a flood of hostile connections cannot
        fill the log; how many more there were is said afterwards."""
        if self._warnings == 0:
            self._warned_at = time.monotonic()
        self._warnings += 1
        if self._warnings <= _LOG_LINES:
            log.warning("%s", line)

    def _end_warnings(self) -> None:
        if self._warnings > _LOG_LINES:
            log.warning("... and %d more lines like these", self._warnings - _LOG_LINES)
        self._warnings = 0


def _host(connection: Connection) -> str:
    return connection.peer.rpartition(":")[0]


class BufferBudget:
    """The memory of all connections together: unfinished messages and unread answers.

    The sum is kept as an estimate that only grows, one addition for each piece of data, and counted
    exactly whenever the estimate reaches the next mark. Above half the limit not all may go on, but
    only so many that what their unfinished messages still lack fits into what is left: those first
    that lack the least, since they are the soonest to free their memory. One unfinished message
    may always go on, so that there is no deadlock; the limit may be exceeded by that one, and by
    what was on its way. To close those who may go on and do not is up to the server.
    """

    def __init__(self, max_bytes: int, connections: Callable[[], Collection[Connection]]) -> None:
        self._max_bytes = max_bytes
        self._connections = connections
        self._step = max(1, max_bytes // _COUNTS_PER_LIMIT)
        self._estimate = self._counted = 0
        self._mark = max_bytes // 2
        self.crowded = False  # somebody has to wait for memory

    def charge(self, size: int) -> None:
        """Allow so many bytes more to be held."""
        self._estimate += size
        if self._estimate > self._mark:
            self.count()

    def room(self) -> int:
        """Return how many more bytes may be held, leaving half of the limit to others."""
        half = self._max_bytes // 2
        if self._estimate > half // 2 and self._estimate - self._counted > self._step:
            self.count()
        return max(0, half - self._estimate)

    def count(self) -> None:
        """Count exactly, and say who may go on."""
        if not self._estimate:  # nothing has come in since all that was held had gone
            return
        connections = self._connections()
        total = sum(connection.held_bytes() for connection in connections)
        self._estimate = self._counted = total
        self._mark = max(self._max_bytes // 2, total + self._step)
        if total > self._max_bytes // 2:
            self._admit(connections, self._max_bytes - total)
        elif self.crowded:
            self.crowded = False
            for connection in connections:
                connection.hold(False)

    def _admit(self, connections: Collection[Connection], room: int) -> None:
        self.crowded = False
        first = True
        lacking = sorted(
            ((connection.reader.missing, connection) for connection in connections),
            key=lambda each: each[0],
        )
        for missing, connection in lacking:
            room -= missing
            waits = room < 0 and not (first and missing)
            connection.hold(waits)
            self.crowded |= waits
            if missing:
                first = False
