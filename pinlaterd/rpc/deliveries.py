"""Which answers have reached their client: those whose bytes its machine has acknowledged.

The end of a connection does not say how far the client has read, but the kernel knows how many
bytes the client's kernel has taken. An answer counts as delivered once all of it is acknowledged;
how much of that a client that died had read is not known here. Relies on Linux' TCP_INFO; where it
does not tell, all that was written counts as delivered.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections import deque
from typing import Final, Generic, Protocol, TypeVar

_INFO_BYTES: Final = 128  # of struct tcp_info, as far as tcpi_bytes_acked
_BYTES_ACKED: Final = struct.Struct("120xQ").unpack_from
_CLOSE: Final = 7  # TCP_CLOSE: the client has reset the connection
_CLOSE_WAIT: Final = 8  # TCP_CLOSE_WAIT: the client has closed it
# What may be kept until the next look, before the kernel is asked: that is a system call.
_KEPT_ANSWERS: Final = 64
_KEPT_BYTES: Final = 256 * 1024


class Written(Protocol):
    @property
    def message(self) -> bytes | None: ...


A = TypeVar("A", bound=Written)


class Deliveries(Generic[A]):
    """The answers of one connection that were written and may not have arrived, oldest first."""

    def __init__(self, connected: socket.socket) -> None:
        # The transport's own descriptor: let go of with `detach`, never closed here.
        self._socket = socket.socket(fileno=connected.fileno())
        self._answers: deque[tuple[int, A]] = deque()
        self.held_bytes = 0

    def detach(self) -> None:
        """The connection ends: its descriptor is used no more."""
        self._socket.detach()

    def written(self, end: int, answer: A) -> None:
        """`answer` was written up to byte `end` of the connection."""
        self._answers.append((end, answer))
        self.held_bytes += len(answer.message or b"")
        if len(self._answers) > _KEPT_ANSWERS or self.held_bytes > _KEPT_BYTES:
            self.forget_delivered()

    def forget_delivered(self) -> None:
        if not self._answers:
            return
        acknowledged = self._acknowledged_bytes()
        while self._answers and self._answers[0][0] <= acknowledged:
            _, answer = self._answers.popleft()
            self.held_bytes -= len(answer.message or b"")

    def undelivered(self) -> list[A]:
        """Those of which a part at least was never acknowledged."""
        self.forget_delivered()
        return [answer for _, answer in self._answers]

    def client_has_ended(self) -> bool:
        """Whether the client has closed the connection: shows also while nothing is read."""
        return self._info()[:1] in (bytes((_CLOSE,)), bytes((_CLOSE_WAIT,)))

    def _acknowledged_bytes(self) -> int:
        info = self._info()
        if len(info) < _INFO_BYTES:
            return sys.maxsize
        (acknowledged,) = _BYTES_ACKED(info)
        return int(acknowledged)

    def _info(self) -> bytes:
        return self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
