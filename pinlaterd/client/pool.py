"""The calls of one client: which server each goes to, on which connection, and when once more.

All of it is the same for Client and AsyncClient but for how they wait, which is what a subclass of
Pool says. A call is sent again where that can't do anything twice: as long as it has not left
whole, and, if it is repeatable, once after it did. Times are monotonic seconds.
"""

from __future__ import annotations

import itertools
import random
import socket
import ssl as tls
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Self, TypeVar, cast

from pinlaterd.client import calls
from pinlaterd.client.addresses import Address, Servers, parse_addresses
from pinlaterd.client.calls import PreparedCall
from pinlaterd.client.connection import (
    CannotConnect,
    ClientClosed,
    Connection,
    Endpoint,
    Names,
    in_turn,
    reason_of,
)
from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import ConnectionFailed, EnqueuedInPart, OutcomeUnknown, PinLaterError
from pinlaterd.model import CallContext, JobRecord, Method

_SERVER_DEFAULTS = ServerSettings()
DEFAULT_HOST = _SERVER_DEFAULTS.host
DEFAULT_PORT = _SERVER_DEFAULTS.port
# More than the server takes at most, request_timeout_ms: less makes outcomes unknown needlessly.
DEFAULT_TIMEOUT_SECONDS = 15.0
DEFAULT_CONNECT_TIMEOUT_SECONDS = 5.0
DEFAULT_MAX_CONNECTIONS = 16

# Longer ones are mistakes; the operating system's time-outs end at 24 days.
_LONGEST_SECONDS = 7 * 86_400.0
_MAX_SOURCE_BYTES = 120

T = TypeVar("T")
C = TypeVar("C", bound=Connection)


@dataclass(frozen=True)
class Options:
    """What a client is made with. Raises ValueError for what makes no sense."""

    addresses: tuple[Address, ...]
    source: str
    timeout_seconds: float
    connect_timeout_seconds: float
    max_connections: int
    ssl: tls.SSLContext | None

    def __post_init__(self) -> None:
        if self.max_connections < 1:
            raise ValueError(f"max_connections must be at least 1, not {self.max_connections}")
        for name in ("timeout_seconds", "connect_timeout_seconds"):
            if not 0 < (seconds := getattr(self, name)) <= _LONGEST_SECONDS:
                raise ValueError(
                    f"{name} must be above 0 and at most {_LONGEST_SECONDS:.0f}, not {seconds}"
                )


class Call(Generic[T]):
    """One call under way: where it may still go, and what became of it so far."""

    def __init__(
        self,
        prepared: PreparedCall[T],
        seqid: int,
        message: bytes,
        servers: Sequence[Address],
        *,
        deadline: float,
        connect_timeout_seconds: float,
    ) -> None:
        self.message = message
        self.deadline = deadline
        self._prepared = prepared
        self._seqid = seqid
        self._connect_timeout_seconds = connect_timeout_seconds
        self._may_repeat = prepared.repeatable
        self._untried = deque(servers)
        self._failed_at: set[Address] = set()
        self._failures: list[ConnectionFailed] = []

    def servers(self) -> Iterator[Address]:
        """Where to send it, one server after the other, until one answers."""
        while self._untried:
            yield self._untried.popleft()

    def connect_deadline(self) -> float:
        """Until when connecting now may take: as much time is left to each of the other servers."""
        now = time.monotonic()
        share_seconds = (self.deadline - now) / (1 + len(self._untried))
        return now + min(self._connect_timeout_seconds, share_seconds)

    def result(self, server: Address, answer: bytes) -> T:
        """What the answer says: a result, or an error of the service, raised.

        Raises OutcomeUnknown if it is no answer to this call.
        """
        return self._prepared.decode(self._seqid, answer, server=server)

    def failed(self, server: Address, error: ConnectionFailed) -> None:
        """That server has not answered it.

        One whose connection broke comes once more, as the last: it may have been restarted, and
        serve a new connection.
        """
        if not isinstance(error, CannotConnect) and server not in self._failed_at:
            self._untried.append(server)
        self._failed_at.add(server)
        self._failures.append(error)
        is_over = isinstance(error, ClientClosed) or time.monotonic() >= self.deadline
        if isinstance(error, OutcomeUnknown):
            is_over |= not self._may_repeat
            self._may_repeat = False
        if is_over:
            self._untried.clear()

    def error(self) -> ConnectionFailed:
        """What to raise when no server is left: one error that names each with its failure.

        Once an attempt has left whole the outcome is unknown, whatever became of those after it.
        """
        if len(self._failures) == 1:
            return self._failures[0]
        is_unknown = any(isinstance(failure, OutcomeUnknown) for failure in self._failures)
        kind = OutcomeUnknown if is_unknown else ConnectionFailed
        return kind("; ".join(dict.fromkeys(map(str, self._failures))))


class Pool(ABC, Generic[C]):
    """Makes calls, up to `max_connections` at a time.

    The connection used last is handed out first, so that those a load peak opened grow old unused;
    an idle one that the server closed meanwhile is never handed out. A server that failed is probed
    beside the calls, when a call finds that due.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._context = CallContext(options.source)
        self._seqids = itertools.count(1)
        self._names = Names()
        self._lock = threading.Lock()  # of the rest
        self._servers = Servers(options.addresses, rng=random.Random())
        self._idle: defaultdict[Address, list[C]] = defaultdict(list)
        self._lent: set[C] = set()
        self._is_closed = False

    # --- waiting, as a task of an event loop or blocking the thread -----------------------

    @abstractmethod
    async def _take_place(self, deadline: float) -> None:
        """Be one of those that call at a time. Raises TimeoutError."""

    @abstractmethod
    def _leave_place(self) -> None: ...

    @abstractmethod
    async def _result_of(self, future: Future[T], deadline: float) -> T:
        """Raises TimeoutError, and what the future holds."""

    @abstractmethod
    async def _open(self, server: Address, endpoint: Endpoint, deadline: float) -> C:
        """Connect, and with TLS check the server's certificate. Raises OSError."""

    @abstractmethod
    def _start_probe(self, server: Address) -> None:
        """Have `_probe` run beside the calls."""

    # --- calls ----------------------------------------------------------------------------

    async def run(self, call: PreparedCall[T]) -> T:
        """Make a call, or as many as it takes, and return its result."""
        if call.method in (Method.RETRY_FAILED, Method.DELETE_JOBS):
            changed = await calls.change_all(self._call, cast("PreparedCall[int]", call))
            return cast("T", changed)
        try:
            return await self._call(call)
        except EnqueuedInPart as error:
            in_part = error
        return await calls.enqueue_rest(self._call, call, in_part)

    async def _call(self, prepared: PreparedCall[T]) -> T:
        """Make a call, to one server after the other until one answers, and return its result."""
        with self._lock:
            due = self._servers.begin_probe(now=time.monotonic())
            servers = self._servers.order()
        if due is not None:
            self._start_probe(due)
        call = self._begin(prepared, servers, self.options.timeout_seconds)
        try:
            await self._take_place(call.deadline)
        except TimeoutError:
            raise ConnectionFailed(
                f"all {self.options.max_connections} connections were in use until the time was "
                "up; give the client more max_connections"
            ) from None
        try:
            for server in call.servers():
                try:
                    return await self._send(call, server)
                except ConnectionFailed as error:
                    self._failed(server, error)
                    call.failed(server, error)
            raise call.error()
        finally:
            self._leave_place()

    def _begin(
        self, call: PreparedCall[T], servers: Sequence[Address], timeout_seconds: float
    ) -> Call[T]:
        """Its time begins now. Raises InvalidRequest for what Thrift's types cannot hold."""
        seqid = next(self._seqids) & 0x7FFF_FFFF
        message = call.encode(seqid, self._context)  # first, for this finds out what is no number
        wait_seconds = min(max(0.0, call.wait_ms / 1000), _LONGEST_SECONDS)
        return Call(
            call,
            seqid,
            message,
            servers,
            deadline=time.monotonic() + timeout_seconds + wait_seconds,
            connect_timeout_seconds=self.options.connect_timeout_seconds,
        )

    async def _send(self, call: Call[T], server: Address, *, is_probe: bool = False) -> T:
        """A call on one connection. That is closed if it fails: an answer may still be on its way.
        An error that the service has answered is no failure."""
        connection = self._lend_idle(server)
        if connection is None:
            connection = await self._connect(server, call.connect_deadline())
            with self._lock:
                self._lent.add(connection)
        try:
            answer = await connection.call(call.message, deadline=call.deadline)
            result = call.result(server, answer)
        except PinLaterError:
            self._return(connection, is_probe=is_probe)
            raise
        except BaseException:
            self._discard(connection)
            raise
        self._return(connection, is_probe=is_probe)
        return result

    # --- servers --------------------------------------------------------------------------

    async def _connect(self, server: Address, deadline: float) -> C:
        """To the first of the endpoints that the server's name stands for which can be connected.
        Raises CannotConnect."""
        try:
            endpoints = await self._result_of(self._names.look_up(server), deadline)
        except TimeoutError as error:
            raise CannotConnect(server, "DNS has not answered in time") from error
        except OSError as error:
            raise CannotConnect(server, reason_of(error)) from error
        failures: list[OSError] = []
        for endpoint, until in in_turn(endpoints, deadline):
            try:
                return await self._open(server, endpoint, until)
            except OSError as error:
                failures.append(error)
        reasons = ", ".join(dict.fromkeys(map(reason_of, failures)))
        raise CannotConnect(server, reasons) from failures[-1]

    def _failed(self, server: Address, error: ConnectionFailed) -> None:
        """A call failed there. Connections that lie idle are likely to be as dead."""
        if isinstance(error, ClientClosed):  # which says nothing of the server
            return
        with self._lock:
            self._servers.failed(server, now=time.monotonic())
            self._close_idle(server)

    async def _probe(self, server: Address) -> None:
        """Find out whether a server is back, by a look-up of no jobs at all, which changes nothing
        and waits for nothing. It takes no place of those who call."""
        nothing: PreparedCall[dict[str, JobRecord]] = calls.lookup([])
        is_back = False
        try:
            call = self._begin(nothing, [server], self.options.connect_timeout_seconds)
            await self._send(call, server, is_probe=True)
            is_back = True
        except PinLaterError:
            is_back = True  # it is there, and says what ails it
        except ConnectionFailed:
            pass  # it is left alone for longer
        finally:
            self._end_probe(server, is_back=is_back)

    def _end_probe(self, server: Address, *, is_back: bool) -> None:
        with self._lock:
            self._servers.end_probe(server, now=time.monotonic(), is_back=is_back)

    # --- connections ----------------------------------------------------------------------

    def _lend_idle(self, server: Address) -> C | None:
        """Raises ClientClosed."""
        while True:
            with self._lock:
                if self._is_closed:
                    raise ClientClosed
                if not self._idle[server]:
                    return None
                connection = self._idle[server].pop()
                self._lent.add(connection)
            if not connection.is_stale():
                return connection
            self._discard(connection)

    def _return(self, connection: C, *, is_probe: bool) -> None:
        with self._lock:
            if not is_probe:
                self._servers.answered(connection.address)
            self._lent.discard(connection)
            if not self._is_closed:
                self._idle[connection.address].append(connection)
                return
        connection.close()

    def _discard(self, connection: C) -> None:
        with self._lock:
            self._lent.discard(connection)
        connection.close()

    def close(self) -> None:
        """Close what is idle now, and what is lent once it comes back."""
        with self._lock:
            self._is_closed = True
            for server in list(self._idle):
                self._close_idle(server)

    def in_child(self) -> Self:
        """In a child just forked: a pool of its own, with none of the parent's connections.

        They stay open in the parent: closing the child's copies tells the servers nothing. Of this
        pool no lock is taken, for a thread that the child does not have may hold it.
        """
        successor = type(self)(self.options)
        if self._is_closed:
            successor.close()
        idle = [connection for each in list(self._idle.values()) for connection in each]
        for connection in [*idle, *self._lent]:
            connection.close()
        return successor

    def _close_idle(self, server: Address) -> None:
        for connection in self._idle.pop(server, []):
            connection.close()


class BaseClient(ABC, Generic[C]):
    """What both clients are made with."""

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
        """Nothing is connected yet: the first call does that. (All others of an AsyncClient must
        come on its event loop, else they raise RuntimeError.)

        `host` is HOST, HOST:PORT or [IPV6]:PORT (else AddressInvalid, a ValueError), or several of
        them, which lead to the same shards: in this release, addresses of one server. Calls take
        turns over those that are well, and go round those that are not.
        `port` is that of those named without one. `source` is who calls, as the server's claims
        name it (default: PROGRAM:HOST). `timeout_seconds` bounds every call, connecting included;
        the server answers within its request_timeout_ms (10 s), so less makes outcomes unknown
        that need not be. `connect_timeout_seconds` bounds the connecting to one address. `ssl` is
        for servers behind a TLS proxy. Numbers that make no sense are a ValueError.
        """
        self._options = Options(
            parse_addresses(host, port),
            _default_source() if source is None else source,
            timeout_seconds,
            connect_timeout_seconds,
            max_connections,
            ssl,
        )
        self._pool = self._new_pool(self._options)

    @abstractmethod
    def _new_pool(self, options: Options) -> Pool[C]: ...

    @property
    def max_connections(self) -> int:
        return self._options.max_connections

    @property
    def address(self) -> str:
        """HOST:PORT, or several with commas in between, for messages."""
        return ", ".join(map(str, self._options.addresses))


def _default_source() -> str:
    program = Path(sys.argv[0]).stem or "python"
    source = f"{program}:{socket.gethostname()}"
    return source.encode()[:_MAX_SOURCE_BYTES].decode(errors="ignore")
