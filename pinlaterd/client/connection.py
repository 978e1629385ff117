"""One connection, TCP or TLS over it, that carries framed messages, one call at a time.

It knows nothing of Thrift: bytes go out, bytes come back. After any failure it is closed and
must not be used again, for an answer may still be on its way. Deadlines are monotonic seconds.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from pinlaterd.client.addresses import Address
from pinlaterd.client.failures import cannot_connect, no_answer, not_sent

# The length of an answer is believed up to here. The first bytes of other protocols ("HTTP",
# "SSH-") read as a length are beyond it.
_MAX_ANSWER_BYTES = 1 << 30
_RECEIVE_BYTES = 256 * 1024


class Connection:
    """A connection to the server at `address`, made when it is constructed."""

    def __init__(
        self, address: Address, *, deadline: float, tls: ssl.SSLContext | None = None
    ) -> None:
        """Connect, and with `tls` check the server's certificate, or raise CannotConnect."""
        self.address = address
        try:
            self._socket = _connect(address, deadline, tls)
        except OSError as error:
            raise cannot_connect(address, error) from error

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
            self._socket.settimeout(_seconds_left(deadline))
            self._socket.sendall(len(message).to_bytes(4, "big") + message)
        except OSError as error:
            self.close()
            raise not_sent(self.address, error) from error
        try:
            return self._receive(deadline)
        except OSError as error:
            self.close()
            raise no_answer(self.address, error) from error

    def _receive(self, deadline: float) -> bytes:
        received = bytearray()
        end = 4
        while len(received) < end:
            self._socket.settimeout(_seconds_left(deadline))
            chunk = self._socket.recv(_RECEIVE_BYTES)
            if not chunk:
                raise ConnectionError("connection closed")
            known_before = len(received) >= 4
            received += chunk
            if not known_before and len(received) >= 4:
                length = int.from_bytes(received[:4], "big")
                if length > _MAX_ANSWER_BYTES:
                    raise ConnectionError("what came back is not framed Thrift")
                end = 4 + length
        if len(received) > end:
            raise ConnectionError("more came back than one answer")
        return bytes(memoryview(received)[4:])


def _seconds_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _connect(address: Address, deadline: float, tls: ssl.SSLContext | None) -> socket.socket:
    plain = socket.create_connection(address, timeout=_seconds_left(deadline))
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if tls is None:
            return plain
        plain.settimeout(_seconds_left(deadline))
        return tls.wrap_socket(plain, server_hostname=address.host)
    except BaseException:
        plain.close()
        raise
