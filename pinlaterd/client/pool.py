"""The base of Client and AsyncClient: servers, connections, and which calls are sent again.

They differ in how they wait, which a subclass of BaseClient says: its coroutines run in an event
loop, or block the thread that runs them. A connection carries framed messages, one call at a time.
A call is sent again where that can't do anything twice: as long as it has not left whole, and, if
it is repeatable, once after it did. Times are monotonic seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import socket
import ssl as tls
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

from pinlaterd.client import calls
from pinlaterd.client.addresses import Endpoint, Names, ServerList, Servers, open_list
from pinlaterd.client.calls import PreparedCall
from pinlaterd.config.schema import MOST_FRAME_BYTES, Address, ServerSettings
from pinlaterd.errors import (
    ConnectionFailed,
    EnqueuedInPart,
    InvalidRequest,
    OutcomeUnknown,
    PinLaterError,
)
from pinlaterd.model import CallContext, Method

_SERVER_DEFAULTS = ServerSettings()
# Longer ones are mistakes; the operating system's time-outs end at 24 days.
_LONGEST_SECONDS = 7 * 86_400.0
_MAX_SOURCE_BYTES = 120
# The length of an answer is believed up to here. The first bytes of other protocols ("HTTP",
# "SSH-") read as a length are beyond it.
_MAX_ANSWER_BYTES = 1 << 30
RECEIVE_BYTES = 256 * 1024

T = TypeVar("T")


class _Call(NamedTuple, Generic[T]):
    """One call under way."""

    prepared: PreparedCall[T]
    seqid: int
    message: bytes
    deadline: float


class BaseClient(ABC):
    """Makes calls, up to `max_connections` at a time.

    The connection used last is taken first, so that those a load peak opened grow old unused; an
    idle one that the server closed meanwhile is not used. A server that failed is probed beside the
    calls, when a call finds that due.
    """

    _free: threading.BoundedSemaphore | asyncio.BoundedSemaphore  # places of those that call

    def __init__(
        self,
        host: str | Sequence[str] = _SERVER_DEFAULTS.host,
        port: int = _SERVER_DEFAULTS.port,
        *,
        source: str | None = None,
        timeout_seconds: float = 15.0,
        connect_timeout_seconds: float = 5.0,
        max_connections: int = 16,
        ssl: tls.SSLContext | None = None,
    ) -> None:
        """Nothing is connected yet: the first call does that. (All others of an AsyncClient must
        come on its event loop, else they raise RuntimeError.)

        `host` is HOST, HOST:PORT or [IPV6]:PORT (else AddressInvalid, a ValueError), or several of
        them, which lead to the same shards; calls take turns over the healthy ones. `port` is that
        of those named without one. Or it names a list that is followed: file:PATH, of HOST:PORT
        lines, or zk://HOST:PORT,HOST:PORT/PATH, a server set in ZooKeeper. `source` is who calls,
        as the server's claims name it (default: PROGRAM:HOST). `timeout_seconds` bounds every call,
        connecting included; the server answers within its request_timeout_ms (10 s), so less makes
        outcomes unknown that need not be.
        `connect_timeout_seconds` bounds the connecting to one address. `ssl` is for servers behind
        a TLS proxy. Numbers that make no sense are a ValueError.
        """
        if max_connections < 1:
            raise ValueError(f"max_connections must be at least 1, not {max_connections}")
        for name, seconds in (
            ("timeout_seconds", timeout_seconds),
            ("connect_timeout_seconds", connect_timeout_seconds),
        ):
            if not 0 < seconds <= _LONGEST_SECONDS:
                raise ValueError(
                    f"{name} must be above 0 and at most {_LONGEST_SECONDS:.0f}, not {seconds}"
                )
        self._hosts = host, port
        self._source = _default_source() if source is None else source
        self._timeout_seconds = timeout_seconds
        self._connect_timeout_seconds = connect_timeout_seconds
        self.max_connections = max_connections
        self._ssl = ssl
        self._context = CallContext(self._source)
        self._is_closed = False
        self._begin()

    def _begin(self) -> None:
        """Begin without any connection."""
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._seqids = itertools.count(1)
        self._names = Names()
        self._lock = threading.Lock()  # of the rest
        self._list = open_list(*self._hosts)
        weakref.finalize(self, self._list.close)
        self._servers = Servers(self._list.addresses, rng=random.Random())
        self._idle: defaultdict[Address, list[Connection]] = defaultdict(list)

    @property
    def address(self) -> str:
        """HOST:PORT, or several with commas in between, or the list's name, for messages."""
        return self._list.name

    # --- waiting, as a task of an event loop or blocking the thread -----------------------

    @abstractmethod
    async def _take_place(self, deadline: float) -> None:
        """Acquire `_free`. Raises TimeoutError."""

    @abstractmethod
    async def _result_of(self, future: Future[T], deadline: float) -> T:
        """Raises TimeoutError, and what the future holds."""

    @abstractmethod
    async def _open(self, server: Address, endpoint: Endpoint, deadline: float) -> Connection:
        """Connect, and with TLS check the server's certificate. Raises OSError."""

    def _settings(self) -> dict[str, Any]:
        """Return what another client of the same service is made with."""
        host, port = self._hosts
        return {
            "host": host,
            "port": port,
            "source": self._source,
            "timeout_seconds": self._timeout_seconds,
            "connect_timeout_seconds": self._connect_timeout_seconds,
            "max_connections": self.max_connections,
        }

    @abstractmethod
    def _start_probe(self, server: Address) -> None:
        """Have `_probe` run beside the calls."""

    # --- calls ----------------------------------------------------------------------------

    async def _run(self, prepared: PreparedCall[T]) -> T:
        """Make a call, or as many as it takes, and return its result."""
        if prepared.method in (Method.RETRY_FAILED, Method.DELETE_JOBS):
            changed = await calls.change_all(self._call, cast("PreparedCall[int]", prepared))
            return cast("T", changed)
        try:
            return await self._call(prepared)
        except EnqueuedInPart as error:
            in_part = error
        return await calls.enqueue_rest(self._call, prepared, in_part)

    async def _call(self, prepared: PreparedCall[T]) -> T:
        """Make a call, to one server after the other until one answers, and return its result."""
        call = self._encoded(prepared, self._timeout_seconds)
        await self._follow(self._list, call.deadline)
        with self._lock:
            due = self._servers.begin_probe(now=time.monotonic())
            servers = self._servers.order()
        if due is not None:
            self._start_probe(due)
        try:
            await self._take_place(call.deadline)
        except TimeoutError:
            raise ConnectionFailed(
                f"all {self.max_connections} connections were in use until the time was "
                "up; give the client more max_connections"
            ) from None
        try:
            return await self._call_any(call, deque(servers))
        finally:
            self._free.release()

    def _encoded(self, prepared: PreparedCall[T], timeout_seconds: float) -> _Call[T]:
        """Encode a call; its time begins now. Raises InvalidRequest for what Thrift can't hold."""
        seqid = next(self._seqids) & 0x7FFF_FFFF
        message = prepared.encode(seqid, self._context)  # first, for this finds what is no number
        if len(message) > MOST_FRAME_BYTES:  # which no server takes; others say what they take
            raise InvalidRequest(f"a call of {len(message)} bytes; at most {MOST_FRAME_BYTES}")
        wait_seconds = min(max(0.0, prepared.wait_ms / 1000), _LONGEST_SECONDS)
        deadline = time.monotonic() + timeout_seconds + wait_seconds
        return _Call(prepared, seqid, message, deadline)

    async def _call_any(self, call: _Call[T], untried: deque[Address]) -> T:
        """Call any server. One whose connection broke comes once more, as the last: it may have
        been restarted, and serve a new connection."""
        failures: list[ConnectionFailed] = []
        failed_at: set[Address] = set()
        may_repeat = call.prepared.repeatable
        while untried:
            server = untried.popleft()
            try:
                # As much time to connect is left to each of the other servers.
                return await self._send(call, server, connect_share=1 / (1 + len(untried)))
            except CallGivenUp as error:
                failures.append(error)
                break
            except ConnectionFailed as error:
                failure = error
            failures.append(failure)
            with self._lock:
                self._servers.failed(server, now=time.monotonic())
                self._close_idle(server)  # they are likely to be as dead
            if not isinstance(failure, CannotConnect) and server not in failed_at:
                untried.append(server)
            failed_at.add(server)
            is_unknown = isinstance(failure, OutcomeUnknown)
            if (is_unknown and not may_repeat) or time.monotonic() >= call.deadline:
                break
            may_repeat = may_repeat and not is_unknown
        raise _all_failed(failures)

    async def _send(
        self, call: _Call[T], server: Address, *, connect_share: float, is_probe: bool = False
    ) -> T:
        """Make a call on one connection, which is closed if that fails: its answer may still come.
        An error that the service has answered is no failure."""
        connection = self._take_idle(server)
        if connection is None:
            connection = await self._connect(server, call.deadline, connect_share)
        connection.carries = call.prepared
        try:
            answer = await connection.call(call.message, deadline=call.deadline)
            result = call.prepared.decode(call.seqid, answer, server=server)
        except PinLaterError:
            self._return(connection, is_probe=is_probe)
            raise
        except BaseException:
            connection.close()
            raise
        self._return(connection, is_probe=is_probe)
        return result

    # --- servers --------------------------------------------------------------------------

    async def _follow(self, servers: ServerList, deadline: float) -> None:
        """Raises ConnectionFailed if it has never had any."""
        with self._lock:
            if not self._is_closed:
                servers.refresh()
        if not servers.addresses:
            with contextlib.suppress(TimeoutError):
                await self._result_of(servers.was_read, deadline)
            if not servers.addresses:
                raise ConnectionFailed(f"no server is known from {servers.name}: {servers.problem}")
        with self._lock:
            for gone in self._servers.replace(servers.addresses):
                self._close_idle(gone)

    async def _connect(self, server: Address, deadline: float, share: float) -> Connection:
        """Connect to the first of the endpoints that the server's name stands for which can be
        connected, within a share of the time that is left. Raises CannotConnect."""
        now = time.monotonic()
        deadline = now + min(self._connect_timeout_seconds, (deadline - now) * share)
        try:
            endpoints = await self._result_of(self._names.look_up(server), deadline)
        except TimeoutError as error:
            raise CannotConnect(server, "DNS has not answered in time") from error
        except OSError as error:
            raise CannotConnect(server, _reason_of(error)) from error
        failures: list[OSError] = []
        for tried, endpoint in enumerate(endpoints):
            now = time.monotonic()
            until = now + (deadline - now) / (len(endpoints) - tried)
            try:
                connection = await self._open(server, endpoint, until)
            except OSError as error:
                failures.append(error)
            else:
                with self._lock:
                    self._connections.add(connection)
                return connection
        reasons = ", ".join(dict.fromkeys(map(_reason_of, failures)))
        raise CannotConnect(server, reasons) from failures[-1]

    async def _probe(self, server: Address) -> None:
        """Find out whether a server is back, by a look-up of no jobs at all, which changes nothing
        and waits for nothing. It takes no place of those who call."""
        call = self._encoded(calls.lookup([]), self._connect_timeout_seconds)
        is_back = False
        try:
            await self._send(call, server, connect_share=1, is_probe=True)
            is_back = True
        except PinLaterError:
            is_back = True
        except ConnectionFailed:
            pass  # it is left alone for longer
        finally:
            self._end_probe(server, is_back=is_back)

    def _end_probe(self, server: Address, *, is_back: bool) -> None:
        with self._lock:
            self._servers.end_probe(server, now=time.monotonic(), is_back=is_back)

    # --- connections ----------------------------------------------------------------------

    def _take_idle(self, server: Address) -> Connection | None:
        """Raises _ClientClosed."""
        while True:
            with self._lock:
                if self._is_closed:
                    raise _ClientClosed
                if not self._idle[server]:
                    return None
                connection = self._idle[server].pop()
            if not connection.is_stale():
                return connection
            connection.close()

    def _return(self, connection: Connection, *, is_probe: bool) -> None:
        with self._lock:
            if not is_probe:
                self._servers.answered(connection.address)
            if not self._is_closed and connection.address in self._servers:
                self._idle[connection.address].append(connection)
                return
        connection.close()

    def _close(self) -> None:
        """Close what is idle now, and what is lent once it comes back."""
        with self._lock:
            self._is_closed = True
            self._list.close()
            for server in list(self._idle):
                self._close_idle(server)

    def _close_idle(self, server: Address) -> None:
        for connection in self._idle.pop(server, []):
            connection.close()


def _default_source() -> str:
    program = Path(sys.argv[0]).stem or "python"
    source = f"{program}:{socket.gethostname()}"
    return source.encode()[:_MAX_SOURCE_BYTES].decode(errors="ignore")


# --- connections --------------------------------------------------------------------------


class Connection(ABC):
    address: Address
    carries: PreparedCall[Any] | None = None  # the last call that it was given

    @abstractmethod
    async def call(self, message: bytes, *, deadline: float) -> bytes:
        """Send a message and return the answer to it.

        Raises ConnectionFailed if the message did not go out whole, so that the server can't have
        carried it out, and OutcomeUnknown if it did, or may have, and no answer came.
        """

    @abstractmethod
    def is_stale(self) -> bool:
        """Tell whether the server closed it while it lay idle (or sent something unasked)."""

    @abstractmethod
    def close(self) -> None:
        """End it at once. May be repeated."""


def new_socket(endpoint: Endpoint) -> socket.socket:
    """Set up, but not connected."""
    created = socket.socket(endpoint.family, socket.SOCK_STREAM)
    created.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    created.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return created


def seconds_left(deadline: float) -> float:
    """Raises TimeoutError if there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def answer_length(head: bytes | bytearray) -> int:
    """Decode how many bytes follow the first four. Raises ConnectionError if they frame none."""
    if head == b"HTTP":
        raise ConnectionError(
            "an HTTP server answers there; the Thrift port is another one "
            f"({_SERVER_DEFAULTS.port} if not set)"
        )
    length = int.from_bytes(head, "big")
    if length > _MAX_ANSWER_BYTES:
        raise ConnectionError("what came back is not framed Thrift")
    return length


# --- failures -----------------------------------------------------------------------------


class CannotConnect(ConnectionFailed):
    """`pinlater` counts errors by this name."""

    def __init__(self, server: Address, reason: str) -> None:
        super().__init__(f"cannot connect to pinlaterd at {server}: {reason}")


class CallGivenUp(ConnectionFailed):
    """The client itself has ended the call; this says nothing of any server."""


class _ClientClosed(CallGivenUp):
    def __init__(self) -> None:
        super().__init__("this client was closed")


def call_failed(
    server: Address, error: OSError | EOFError, *, may_have_left: bool
) -> ConnectionFailed:
    reason = _reason_of(error)
    if may_have_left:
        return OutcomeUnknown(
            f"no answer from pinlaterd at {server}: {reason}; the call may have been carried out"
        )
    return ConnectionFailed(
        f"the connection to pinlaterd at {server} broke before the call was sent: {reason}"
    )


def _all_failed(failures: Sequence[ConnectionFailed]) -> ConnectionFailed:
    """Make one error that names each server with its failure. Once an attempt has left whole the
    outcome is unknown, whatever became of those after it."""
    if len(failures) == 1:
        return failures[0]
    is_unknown = any(isinstance(failure, OutcomeUnknown) for failure in failures)
    kind = OutcomeUnknown if is_unknown else ConnectionFailed
    return kind("; ".join(dict.fromkeys(map(str, failures))))


def _reason_of(error: OSError | EOFError) -> str:
    """Return the error in words: the operating system's, whatever asyncio made of it, or TLS's."""
    if isinstance(error, EOFError):
        return "connection closed"
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, tls.SSLCertVerificationError):
        return f"its certificate was refused: {error.verify_message}"
    if isinstance(error, tls.SSLError):
        return f"TLS failed: {(error.reason or str(error.strerror)).replace('_', ' ').lower()}"
    if isinstance(error, socket.gaierror):  # its numbers are not the operating system's
        return str(error.strerror).lower()
    text = os.strerror(error.errno) if error.errno else str(error)
    return text[:1].lower() + text[1:]
