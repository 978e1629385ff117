"""A server that says what the test tells it to, over real sockets and the real codec.

What a healthy service does is tested against the real one (`service`); this is for what a healthy
one never does: breaking off, keeping silent, talking nonsense.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from pinlaterd.errors import PinLaterError
from pinlaterd.model import Result
from pinlaterd.rpc import codec


class BreakOff(Exception):
    """Close the connection instead of answering."""


class SayNothing(Exception):
    """Keep the connection, and its peer waiting."""


Reply = Callable[[codec.Call], Result | bytes | Exception]


class ScriptedServer:
    """Answers each call with what `reply` returns, bytes as they are. An exception that it returns
    or raises is an error to answer, or one of the above."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.calls: list[codec.Call] = []
        self.connections = 0
        self.reply: Reply = lambda call: None
        self._open: list[socket.socket] = []
        self._listener = socket.create_server((host, port))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it was closed within the test
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.close_connections()

    def close_connections(self) -> None:
        for connection in self._open:
            with contextlib.suppress(OSError):  # the client was first
                connection.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as stream:
            while header := stream.read(4):
                call = codec.decode_call(stream.read(int.from_bytes(header, "big")))
                self.calls.append(call)
                try:
                    stream.write(self._answer(call))
                    stream.flush()
                except BreakOff:
                    with contextlib.suppress(OSError):  # the whole server went
                        connection.shutdown(socket.SHUT_RDWR)
                    return
                except SayNothing:
                    pass

    def _answer(self, call: codec.Call) -> bytes:
        try:
            result = self.reply(call)
            if isinstance(result, Exception):
                raise result
        except PinLaterError as error:
            message = codec.encode_error(call.head, error)
        else:
            if isinstance(result, bytes):
                return result
            message = codec.encode_reply(call.head, result)
        return len(message).to_bytes(4, "big") + message
