"""The shard's end of the wire: one ZeroMQ ROUTER socket, to which all routers connect.

Blocking only in `wait`. It relies on `wire.envelope` for nothing: frames go through as bytes.
ROUTER_MANDATORY makes a send to a router that has gone, or that does not read, fail at once, so
that what it would have delivered can be taken back.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import zmq

_IPC = "ipc://"
# Messages in transit to and from each router; each holds many calls or answers.
_HIGH_WATER_MESSAGES = 1000
# How long the answers of a shard that stops are still being sent.
_LINGER_MS = 1000
_WAITS_BETWEEN_LOOKS = 20
# Plain numbers: arithmetic with pyzmq's enums costs as much as the calls that take them.
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_READABLE = int(zmq.POLLIN)
_NONE_READABLE: frozenset[int] = frozenset()
_UNREACHABLE = (errno.EHOSTUNREACH, errno.EAGAIN)


class Received(NamedTuple):
    """A frame, and the router that it came from."""

    router: bytes
    frame: bytes


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """One for each process; its one input/output thread serves any number of peers."""
    return zmq.Context()


class ShardEnd:
    """Takes frames from routers and sends frames to them."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MESSAGES)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._endpoint = ""
        self._file: os.stat_result | None = None
        self._waits = 0
        self._readable = False  # as `wait` has just seen
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def bind(self, endpoint: str) -> None:
        """Take calls at `endpoint`. Only the owner of the shard may: a file of that name that a
        predecessor has left is removed."""
        path = _socket_file(endpoint)
        if path is not None:
            path.unlink(missing_ok=True)
        self._socket.bind(endpoint)
        self._endpoint = endpoint
        self._file = path.stat() if path is not None else None

    def bind_again(self) -> None:
        """Take calls at the same endpoint after this process has become the owner again: if another
        one owned the shard meanwhile, the file is that one's, and new routers would not get here.
        Connections stay."""
        path = _socket_file(self._endpoint)
        if path is None or self._is_bound_to(path):
            return
        self._socket.unbind(self._endpoint)
        self.bind(self._endpoint)

    def _is_bound_to(self, path: Path) -> bool:
        try:
            return self._file is not None and os.path.samestat(self._file, path.stat())
        except FileNotFoundError:
            return False

    def watch(self, descriptor: int) -> None:
        """Have `wait` look at `descriptor` too."""
        self._poller.register(descriptor, zmq.POLLIN)

    def forget(self, descriptor: int) -> None:
        self._poller.unregister(descriptor)

    def wait(self, until: Callable[[], float]) -> frozenset[int]:
        """Until a frame is there, or a watched descriptor is readable, or `until()` seconds have
        passed.

        Returns the watched descriptors that are readable. While frames keep coming, those are
        looked at only now and then: a look costs as much as taking a call."""
        self._waits += 1
        if self._waits % _WAITS_BETWEEN_LOOKS and (
            self._socket.getsockopt(zmq.EVENTS) & _READABLE  # type: ignore[operator]
        ):
            self._readable = True
            return _NONE_READABLE
        seconds = until()
        events = self._poller.poll(round(seconds * 1000 + 0.5) if seconds > 0 else 0)
        readable = frozenset([found for found, _ in events if isinstance(found, int)])
        self._readable = len(events) > len(readable)
        return readable

    def receive(self, most_frames: int, most_bytes: int) -> list[Received]:
        """What is there by now, without waiting; stops once either bound is reached."""
        received: list[Received] = []
        size = 0
        socket = self._socket
        readable, self._readable = self._readable, False
        # What was there may go with the connection that it came from.
        with contextlib.suppress(zmq.Again):
            while len(received) < most_frames and size < most_bytes:
                # To ask costs less than the exception of a receive in vain.
                if not (readable or socket.getsockopt(zmq.EVENTS) & _READABLE):  # type: ignore[operator]
                    break
                readable = False
                router = socket.recv(_NOBLOCK)
                frame = socket.recv(_NOBLOCK)
                while socket.getsockopt(zmq.RCVMORE):  # nothing of ours has more parts
                    socket.recv(_NOBLOCK)
                received.append(Received(router, frame))
                size += len(frame)
        return received

    def send(self, router: bytes, frame: bytes) -> bool:
        """False if `router` has gone, or has stopped reading: it gets nothing of this frame."""
        try:
            self._socket.send(router, _MORE)
            self._socket.send(frame, _NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in _UNREACHABLE:
                return False
            raise
        return True

    def close(self) -> None:
        self._socket.close()


def _socket_file(endpoint: str) -> Path | None:
    return Path(endpoint.removeprefix(_IPC)) if endpoint.startswith(_IPC) else None
