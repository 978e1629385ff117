"""Callers that connect anew for each call, on bare sockets: what befalls a connection shows."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pinlaterd.model import CallContext, Method, QueueNamesRequest
from pinlaterd.rpc import codec
from tests.hostile.wire import RawConnection
from tests.rpc.thrift_bytes import framed

_ANSWER_SECONDS = 60.0
# Between connecting and calling, in turn: a connection may be met by the end in any state.
_PAUSES_SECONDS = (0.0, 0.0, 0.0, 0.01, 0.1)
_AT_ONCE = struct.pack("ii", 1, 0)


class Callers:
    """Threads that connect, call once, read the answer and go, as fast as they can."""

    def __init__(self, port: int, threads: int = 4) -> None:
        self.errors: list[str] = []
        self._port = port
        self._answered = [0] * threads
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(threads)
        ]

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(_ANSWER_SECONDS)

    def answered(self) -> int:
        return sum(self._answered)

    def _run(self, number: int) -> None:
        for pause in itertools.cycle(_PAUSES_SECONDS):
            if self._stop.is_set():
                return
            try:
                self._call(pause)
            except OSError as error:
                self.errors.append(f"{time.time():.3f}: {error!r}")
                self._stop.wait(0.01)
            else:
                self._answered[number] += 1

    def _call(self, pause: float) -> None:
        message = codec.encode_call(
            Method.QUEUE_NAMES, 1, CallContext("caller"), QueueNamesRequest()
        )
        with RawConnection(self._port) as connection:
            connection.socket.settimeout(_ANSWER_SECONDS)
            # Gone at once: thousands that linger would use up the ports.
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            self._stop.wait(pause)
            connection.send(framed(message))
            answer = connection.receive_message()
            if answer is None:
                raise ConnectionError("closed before the answer")
            codec.decode_reply(Method.QUEUE_NAMES, answer)
