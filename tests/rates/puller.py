"""Clients of one particular router that take jobs as fast as they may, and note when.

Routers share a port, and the kernel chooses among them: a connection that came to the wrong one is
closed, and another is tried.
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from typing import NamedTuple, cast

import psutil

from pinlaterd.errors import DequeueRateLimited, PinLaterError
from pinlaterd.model import CallContext, DequeueRequest, DequeueResult, Method
from pinlaterd.rpc import codec

_CALL_SECONDS = 40.0
_CONNECTS = 200


class Taken(NamedTuple):
    at: float  # monotonic seconds: when the answer was there
    jobs: int


class Puller:
    """One worker on a thread. It dequeues up to `limit` jobs at a time, for as long as told."""

    def __init__(
        self, port: int, router_pid: int, queue: str, *, limit: int, wait_ms: int, pause: float = 0
    ) -> None:
        """`pause`: seconds between calls, also after one that was refused."""
        self.taken: list[Taken] = []
        self.errors: list[PinLaterError | OSError] = []
        self.refused = 0
        self._request = DequeueRequest(queue, limit, max_wait_ms=wait_ms)
        self._pause = pause
        self._socket = _connect_to(port, router_pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(_CALL_SECONDS)
        self._socket.close()

    def between(self, begin: float, end: float) -> int:
        """Jobs taken from `begin` to `end`, monotonic seconds."""
        return sum(taken.jobs for taken in list(self.taken) if begin <= taken.at < end)

    def _run(self) -> None:
        for seqid in itertools.count():
            if self._stop.is_set():
                return
            try:
                jobs = self._dequeue(seqid)
            except DequeueRateLimited:
                self.refused += 1
            except (PinLaterError, OSError) as error:
                self.errors.append(error)
                return
            else:
                if jobs:
                    self.taken.append(Taken(time.monotonic(), jobs))
            self._stop.wait(self._pause)

    def _dequeue(self, seqid: int) -> int:
        message = codec.encode_call(Method.DEQUEUE, seqid, CallContext("puller"), self._request)
        self._socket.sendall(struct.pack(">I", len(message)) + message)
        (size,) = struct.unpack(">I", self._receive(4))
        result = codec.decode_reply(Method.DEQUEUE, self._receive(size))
        return len(cast("DequeueResult", result).jobs)

    def _receive(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            part = self._socket.recv(size - len(received))
            if not part:
                raise ConnectionResetError("the router has closed the connection")
            received += part
        return bytes(received)


def _connect_to(port: int, pid: int) -> socket.socket:
    for _ in range(_CONNECTS):
        connection = socket.create_connection(("127.0.0.1", port), _CALL_SECONDS)
        if _has_accepted(pid, connection.getsockname()[1]):
            return connection
        connection.close()
    raise AssertionError(f"{_CONNECTS} connections, and none came to the router of pid {pid}")


def _has_accepted(pid: int, from_port: int) -> bool:
    router = psutil.Process(pid)
    return any(
        peer.raddr and peer.raddr.port == from_port for peer in router.net_connections("tcp")
    )
