"""Listening sockets, handed from one process to the next.

A process and its handover peer (config.kinds) pass on the sockets that they listen at. Closing one
resets the connections in its queue, so the very socket passes to the successor (SCM_RIGHTS, over a
Unix socket in DIR/run): it stays open as long as one of them lives, and clients that connect
meanwhile are accepted by the one or the other. Each offers its sockets from the moment at which it
serves; when one starts, it asks the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

# A socket for each address that the host's name stands for.
_MOST_SOCKETS = 16
_MOST_BYTES = 1024
_WAITING_ASKERS = 8
# A process that serves answers at once; a frozen one must not keep its successor from starting.
_ANSWER_SECONDS = 2.0


def take_listeners(path: Path, address: str) -> Sequence[socket.socket]:
    """Return the listening sockets offered at `path`, if they are those of `address`; else none.

    Blocks, for two seconds at most: for a process that does not serve yet."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_ANSWER_SECONDS)
        try:
            asking.connect(os.fspath(path))
            name, descriptors, _, _ = socket.recv_fds(
                asking, _MOST_BYTES, _MOST_SOCKETS, socket.MSG_CMSG_CLOEXEC
            )
        except OSError:  # nobody is there, or nobody who answers
            return []
    taken = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    if name == address.encode():
        return taken
    for listener in taken:
        listener.close()
    return []


def is_offered(path: Path) -> bool:
    """Return whether a process offers its sockets at `path`. Never blocks."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        return asking.connect_ex(os.fspath(path)) == 0


class Offer:
    """Offers the listening sockets of `address` at `path` (a Service)."""

    def __init__(self, path: Path, address: str, listeners: Sequence[socket.socket]) -> None:
        self._path = path
        self._address = address
        self._listeners = listeners
        self._loop = asyncio.get_running_loop()
        self._door: socket.socket | None = None

    def start(self) -> None:
        """Raises OSError if `path` can't be had."""
        if self._door is not None:
            return
        self._path.unlink(missing_ok=True)  # what a predecessor that was killed has left
        self._door = socket.socket(socket.AF_UNIX)
        self._door.setblocking(False)
        self._door.bind(os.fspath(self._path))
        self._door.listen(_WAITING_ASKERS)
        self._loop.add_reader(self._door.fileno(), self._give)

    def stop(self) -> None:
        if self._door is None:
            return
        self._loop.remove_reader(self._door.fileno())
        self._door.close()
        self._door = None
        self._path.unlink(missing_ok=True)

    def _give(self) -> None:
        assert self._door is not None
        with contextlib.suppress(OSError):  # the peer has gone: it asked only whether we are there
            asking, _ = self._door.accept()
            with asking:
                asking.setblocking(False)
                descriptors = [listener.fileno() for listener in self._listeners]
                socket.send_fds(asking, [self._address.encode()], descriptors)
