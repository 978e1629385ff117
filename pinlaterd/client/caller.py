"""What calls have in common, blocking or not: who calls, with how much patience, and where a call
goes when a server fails it.

A call is sent again where that can't do anything twice: as long as it has not left whole, and, if
it is repeatable, once after it did. Nothing here does I/O; times are monotonic seconds.
"""

from __future__ import annotations

import itertools
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from pinlaterd.client import calls
from pinlaterd.client.addresses import Address
from pinlaterd.client.calls import PreparedCall
from pinlaterd.client.failures import CannotConnect, ClientClosed
from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import ConnectionFailed, OutcomeUnknown
from pinlaterd.model import CallContext, JobRecord

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


class Caller:
    """Begins calls, and numbers them."""

    def __init__(
        self, *, source: str | None, timeout_seconds: float, connect_timeout_seconds: float
    ) -> None:
        """Raises ValueError for what is no time-out."""
        self.source = source if source is not None else _default_source()
        self._context = CallContext(self.source)
        self._timeout_seconds = _checked("timeout_seconds", timeout_seconds)
        self._connect_seconds = _checked("connect_timeout_seconds", connect_timeout_seconds)
        self._seqids = itertools.count(1)

    def begin(self, call: PreparedCall[T], servers: Sequence[Address]) -> CallUnderWay[T]:
        """A call that may go to these servers, in this order; its time begins now.

        Raises InvalidRequest for what Thrift's types cannot hold.
        """
        return self._begin(call, servers, self._timeout_seconds)

    def begin_probe(self, server: Address) -> CallUnderWay[dict[str, JobRecord]]:
        """A call that changes nothing and waits for nothing: a look-up of no jobs at all."""
        return self._begin(calls.lookup([]), [server], self._connect_seconds)

    def _begin(
        self, call: PreparedCall[T], servers: Sequence[Address], timeout_seconds: float
    ) -> CallUnderWay[T]:
        seqid = next(self._seqids) & 0x7FFF_FFFF
        message = call.encode(seqid, self._context)  # first, for this finds out what is no number
        wait_seconds = min(max(0.0, call.wait_ms / 1000), _LONGEST_SECONDS)
        return CallUnderWay(
            call,
            seqid,
            message,
            servers,
            deadline=time.monotonic() + timeout_seconds + wait_seconds,
            connect_timeout_seconds=self._connect_seconds,
        )


class CallUnderWay(Generic[T]):
    """One call, where it may still go, and what became of it so far."""

    def __init__(
        self,
        call: PreparedCall[T],
        seqid: int,
        message: bytes,
        servers: Sequence[Address],
        *,
        deadline: float,
        connect_timeout_seconds: float,
    ) -> None:
        self.message = message
        self.deadline = deadline
        self._call = call
        self._seqid = seqid
        self._connect_timeout_seconds = connect_timeout_seconds
        self._may_repeat = call.repeatable
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

    def result(self, address: Address, answer: bytes) -> T:
        """What the answer says: a result, or an error of the service, raised.

        Raises OutcomeUnknown if it is no answer to this call.
        """
        return self._call.decode(self._seqid, answer, server=address)

    def failed(self, address: Address, error: ConnectionFailed) -> None:
        """That server has not answered it.

        One whose connection broke comes once more, as the last: it may have been restarted, and
        serve a new connection.
        """
        if not isinstance(error, CannotConnect) and address not in self._failed_at:
            self._untried.append(address)
        self._failed_at.add(address)
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


def checked_connections(max_connections: int) -> int:
    """Raises ValueError."""
    if max_connections < 1:
        raise ValueError(f"max_connections must be at least 1, not {max_connections}")
    return max_connections


def _checked(name: str, seconds: float) -> float:
    if not 0 < seconds <= _LONGEST_SECONDS:
        raise ValueError(
            f"{name} must be above 0 and at most {_LONGEST_SECONDS:.0f}, not {seconds}"
        )
    return seconds


def _default_source() -> str:
    program = Path(sys.argv[0]).stem or "python"
    source = f"{program}:{socket.gethostname()}"
    return source.encode()[:_MAX_SOURCE_BYTES].decode(errors="ignore")
