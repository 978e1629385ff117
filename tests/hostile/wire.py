"""A raw connection to the Thrift port: bytes out, and what becomes of them."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self

from pinlaterd.rpc import codec
from pinlaterd.rpc.compact import from_binary, to_binary
from tests.hostile.calls import head
from tests.rpc.thrift_bytes import framed

ANSWER_SECONDS = 60.0
TRACE_METHOD = "__can__finagle__trace__v3__"  # unknown to us: answered, whatever came before
_TRACE_SEQID = 0x51EED
_MOST_BYTES = 64 << 20


class RawConnection:
    """`exchange` finds out whether the server answered or closed; a third is a failure.

    If `compact`, what is sent is in that protocol already, and answers are turned into binary."""

    def __init__(self, port: int, *, compact: bool = False) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.open = True
        self._compact = compact
        self._harmless = head(TRACE_METHOD, seqid=_TRACE_SEQID) + bytes(1)
        if compact:
            self._harmless = from_binary(self._harmless)
        self._received = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send, also to a server that closes meanwhile."""
        try:
            self.socket.sendall(data)
        except (ConnectionResetError, BrokenPipeError):
            self.open = False

    def receive_message(self) -> bytes | None:
        """The next framed answer; None if the server closed. TimeoutError if it does neither."""
        while True:
            if len(self._received) >= 4:
                end = 4 + int.from_bytes(self._received[:4], "big")
                if len(self._received) >= end:
                    message = bytes(self._received[4:end])
                    del self._received[:end]
                    return to_binary(message, _MOST_BYTES) if self._compact else message
            try:
                chunk = self.socket.recv(65536)
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                self.open = False
                return None
            self._received += chunk

    def begin(self) -> None:
        """A first, harmless call: from now on the server knows the connection's protocol."""
        self.send(framed(self._harmless))
        assert self.receive_message() is not None

    def exchange(self, message: bytes) -> list[bytes]:
        """Send a framed message and a harmless one behind it: the answers to the first.

        Afterwards `open` says whether the harmless one was answered, or the server closed."""
        self.send(framed(message) + framed(self._harmless))
        answers: list[bytes] = []
        while (answer := self.receive_message()) is not None:
            if codec.peek_seqid(answer) == _TRACE_SEQID:
                break
            answers.append(answer)
        return answers
