"""One TCP connection that carries framed messages, one call at a time.

It knows nothing of Thrift: bytes go out, bytes come back. After any failure it is closed and
must not be used again, for an answer may still be on its way. Deadlines are monotonic seconds.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time

from pinlaterd.errors import ConnectionFailed, OutcomeUnknown

# The length of an answer is believed up to here. The first bytes of other protocols ("HTTP",
# "SSH-") read as a length are beyond it.
_MAX_ANSWER_BYTES = 1 << 30
_RECEIVE_BYTES = 256 * 1024


class NotSent(ConnectionFailed):
    """The connection broke before the message had left whole: another one may serve."""


class Connection:
    """A connection to the service, made when it is constructed."""

    def __init__(self, host: str, port: int, *, deadline: float) -> None:
        """Connect, or raise ConnectionFailed."""
        self._address = f"{host}:{port}"
        try:
            self._socket = socket.create_connection((host, port), timeout=_seconds_left(deadline))
        except OSError as error:
            raise ConnectionFailed(
                f"cannot connect to pinlaterd at {self._address}: {_reason(error)}"
            ) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def is_stale(self) -> bool:
        """Whether the server closed it while it lay idle (or says something nobody asked for)."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

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
            raise NotSent(
                f"the connection to pinlaterd at {self._address} broke before the call was sent: "
                f"{_reason(error)}"
            ) from error
        try:
            return self._receive(deadline)
        except OSError as error:
            self.close()
            raise OutcomeUnknown(
                f"no answer from pinlaterd at {self._address}: {_reason(error)}; "
                "the call may have been carried out"
            ) from error

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


def _reason(error: OSError) -> str:
    """The error in words: the operating system's, without `[Errno 111]`."""
    if isinstance(error, TimeoutError):
        return "timed out"
    return (error.strerror or str(error)).lower()
