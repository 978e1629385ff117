"""What blocking connections and asyncio's have in common: framing, names, failures in words.

A connection carries framed messages, TCP or TLS over it, one call at a time. It knows nothing of
Thrift: bytes go out, bytes come back. Deadlines are monotonic seconds.

ConnectionFailed      nothing was done
  NotSent             the call did not leave whole: another connection may serve
    CannotConnect     there was no connection
  OutcomeUnknown      it left whole, and no answer to it came
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from pinlaterd.client.addresses import Address
from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import ConnectionFailed, OutcomeUnknown

# The length of an answer is believed up to here. The first bytes of other protocols ("HTTP",
# "SSH-") read as a length are beyond it.
_MAX_ANSWER_BYTES = 1 << 30
RECEIVE_BYTES = 256 * 1024


class Connection(ABC):
    """A connection to `address`. After any failure of a call it must be closed: an answer may still
    be on its way."""

    address: Address

    @abstractmethod
    async def call(self, message: bytes, *, deadline: float) -> bytes:
        """Send a message and return the answer to it.

        Raises NotSent if the message did not go out whole, so that the server can't have carried it
        out, and OutcomeUnknown if it did, or may have, and no answer came.
        """

    @abstractmethod
    def is_stale(self) -> bool:
        """Whether the server closed it while it lay idle (or says something nobody asked for)."""

    @abstractmethod
    def close(self) -> None:
        """End it at once."""


def answer_length(head: bytes | bytearray) -> int:
    """How many bytes follow the first four. Raises ConnectionError if these frame nothing."""
    if head == b"HTTP":
        raise ConnectionError(
            "an HTTP server answers there; the Thrift port is another one "
            f"({ServerSettings().port} if not set)"
        )
    length = int.from_bytes(head, "big")
    if length > _MAX_ANSWER_BYTES:
        raise ConnectionError("what came back is not framed Thrift")
    return length


def seconds_left(deadline: float) -> float:
    """Raises TimeoutError if there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


# --- names and endpoints ------------------------------------------------------------------


class Endpoint(NamedTuple):
    """A server by number, as a socket takes it."""

    family: socket.AddressFamily
    where: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]


class Names:
    """Asks DNS what the hosts of one client's servers stand for; any thread may use it.

    The system's own look-up can't be bounded or cancelled: it lasts until the name servers have
    been silent for long enough, often longer than a call has. So it runs in a daemon thread, one at
    a time for each host, that all who ask meanwhile wait for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[Address, Future[list[Endpoint]]] = {}

    def look_up(self, server: Address) -> Future[list[Endpoint]]:
        """Its endpoints, in the system's order of preference, or an OSError."""
        if _is_numeric(server.host):
            known: Future[list[Endpoint]] = Future()
            _resolve(server, known)  # no name server is asked
            return known
        with self._lock:
            if server not in self._under_way:
                found: Future[list[Endpoint]] = Future()
                found.set_running_or_notify_cancel()  # who gives up does not end it for the others
                threading.Thread(
                    target=self._ask, args=(server, found), name=f"dns-{server.host}", daemon=True
                ).start()
                self._under_way[server] = found
            return self._under_way[server]

    def _ask(self, server: Address, found: Future[list[Endpoint]]) -> None:
        _resolve(server, found)
        with self._lock:  # the next one to ask begins another look-up
            del self._under_way[server]


def in_turn(endpoints: Sequence[Endpoint], deadline: float) -> Iterator[tuple[Endpoint, float]]:
    """Each with the time (monotonic seconds) until which it may be tried, so that the others have
    as long."""
    for number, endpoint in enumerate(endpoints):
        now = time.monotonic()
        yield endpoint, now + (deadline - now) / (len(endpoints) - number)


def new_socket(endpoint: Endpoint) -> socket.socket:
    """Set up, but not connected."""
    created = socket.socket(endpoint.family, socket.SOCK_STREAM)
    created.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    created.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return created


def _resolve(server: Address, found: Future[list[Endpoint]]) -> None:
    try:
        infos = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
    except OSError as error:
        found.set_exception(error)
    else:
        found.set_result([Endpoint(family, where) for family, _, _, _, where in infos])


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


# --- failures -----------------------------------------------------------------------------


class NotSent(ConnectionFailed):
    """The connection broke before the message had left whole: another one may serve."""


class CannotConnect(NotSent):
    """No connection came about."""

    def __init__(self, server: Address, reason: str) -> None:
        super().__init__(f"cannot connect to pinlaterd at {server}: {reason}")


class ClientClosed(ConnectionFailed):
    """No call is made any more."""

    def __init__(self) -> None:
        super().__init__("this client was closed")


def call_failed(
    server: Address, error: OSError | EOFError, *, may_have_left: bool
) -> ConnectionFailed:
    reason = reason_of(error)
    if may_have_left:
        return OutcomeUnknown(
            f"no answer from pinlaterd at {server}: {reason}; the call may have been carried out"
        )
    return NotSent(
        f"the connection to pinlaterd at {server} broke before the call was sent: {reason}"
    )


def reason_of(error: OSError | EOFError) -> str:
    """The error in words: the operating system's, whatever asyncio made of it, or TLS's."""
    if isinstance(error, EOFError):
        return "connection closed"
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate was refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {(error.reason or str(error.strerror)).replace('_', ' ').lower()}"
    if isinstance(error, socket.gaierror):  # its numbers are not the operating system's
        return str(error.strerror).lower()
    text = os.strerror(error.errno) if error.errno else str(error)
    return text[:1].lower() + text[1:]
