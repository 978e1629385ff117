"""One connection, TCP or TLS over it, that carries framed messages, one call at a time.

It knows nothing of Thrift: bytes go out, bytes come back. After any failure it must not be used
again, for an answer may still be on its way. Deadlines are monotonic seconds.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from pinlaterd.client.addresses import Address
from pinlaterd.client.failures import cannot_connect, name_not_found, no_answer, not_sent
from pinlaterd.client.names import Endpoint, Names, in_turn
from pinlaterd.config.schema import ServerSettings

# The length of an answer is believed up to here. The first bytes of other protocols ("HTTP",
# "SSH-") read as a length are beyond it.
_MAX_ANSWER_BYTES = 1 << 30
_RECEIVE_BYTES = 256 * 1024


class Connection:
    """A connection to the server at `address`, made when it is constructed."""

    def __init__(
        self, address: Address, names: Names, *, deadline: float, tls: ssl.SSLContext | None = None
    ) -> None:
        """Connect, and with `tls` check the server's certificate, or raise CannotConnect."""
        self.address = address
        self._socket = _connect(address, names, deadline, tls)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def is_stale(self) -> bool:
        """Whether the server closed it while it lay idle (or says something nobody asked for)."""
        self._socket.setblocking(False)
        try:
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):  # TLS itself may have said something
            return False
        except OSError:
            return True
        return True

    def call(self, message: bytes, *, deadline: float) -> bytes:
        """Send a message and return the answer to it.

        Raises NotSent if the message did not go out whole, so that the server can't
        have carried it out, and OutcomeUnknown if it did and no answer came.
        """
        try:
            self._socket.settimeout(seconds_left(deadline))
            self._socket.sendall(len(message).to_bytes(4, "big") + message)
        except OSError as error:
            raise not_sent(self.address, error) from error
        try:
            return self._receive(deadline)
        except OSError as error:
            raise no_answer(self.address, error) from error

    def _receive(self, deadline: float) -> bytes:
        received = bytearray()
        end = 4
        while len(received) < end:
            self._socket.settimeout(seconds_left(deadline))
            chunk = self._socket.recv(_RECEIVE_BYTES)
            if not chunk:
                raise ConnectionError("connection closed")
            known_before = len(received) >= 4
            received += chunk
            if not known_before and len(received) >= 4:
                end = 4 + answer_length(received[:4])
        if len(received) > end:
            raise ConnectionError("more came back than one answer")
        return bytes(memoryview(received)[4:])


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


def new_socket(endpoint: Endpoint) -> socket.socket:
    """Set up, but not connected."""
    created = socket.socket(endpoint.family, socket.SOCK_STREAM)
    created.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    created.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return created


def _connect(
    server: Address, names: Names, deadline: float, tls: ssl.SSLContext | None
) -> socket.socket:
    """To the first of the endpoints that the server's name stands for which can be connected."""
    try:
        endpoints = names.look_up(server).result(timeout=max(0.0, deadline - time.monotonic()))
    except OSError as error:
        raise name_not_found(server, error) from error
    failures: list[OSError] = []
    for endpoint, until in in_turn(endpoints, deadline):
        try:
            return _connect_endpoint(endpoint, server.host, until, tls)
        except OSError as error:
            failures.append(error)
    raise cannot_connect(server, failures) from failures[-1]


def _connect_endpoint(
    endpoint: Endpoint, host: str, deadline: float, tls: ssl.SSLContext | None
) -> socket.socket:
    plain = new_socket(endpoint)
    try:
        plain.settimeout(seconds_left(deadline))
        plain.connect(endpoint.where)
        if tls is None:
            return plain
        plain.settimeout(seconds_left(deadline))
        return tls.wrap_socket(plain, server_hostname=host)
    except BaseException:
        plain.close()
        raise
